"""Base class of mesh axes, and their ordered registry. Imports no torch.

Degrees, layouts, plans and reports iterate over the registry. An axis is one `MeshAxis` object. If it needs torch code
of its own, `MeshAxis.on_ranks` names a subclass of `parallel.axis.AxisOnRanks`. An installed package registers its own
axes on import (docs/howto/extend.md); the degree of each becomes a key of `parallel`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar, Literal

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema import Config, add_degree
from lightning_llm.model.spec import LinearSpec

if TYPE_CHECKING:
    from lightning_llm.plan.degrees import Degrees
    from lightning_llm.plan.divisibility import ShardedAxis
    from lightning_llm.plan.traffic import RankStep, Sent

Dimension = Literal["data", "parameters", "sequence", "width", "layers"]
"""Dimensions that ranks divide: a step's micro-batches; stored parameters, gathered for use; the tokens of a sequence;
heads, and rows or columns of weights; blocks."""

BUILT_IN, FOLDED = ("pp", "dp_replicate", "dp_shard", "cp", "tp"), ("ep",)
"""Outermost first: neighboring ranks share a tensor-parallel group; pipeline stages are farthest apart.

A node then contains whole TP groups, which communicate most; pipeline stages, which communicate least, are on different
nodes (Narayanan et al. 2021, arXiv 2104.04473, section 3; Megatron-LM's order "tp-cp-dp-pp"). `FOLDED`: see
`MeshAxis.folds`."""


class MeshAxis:
    """Base class of mesh axes. An axis divides the dimensions in `cuts`; subclasses add checks, traffic and memory."""

    name: ClassVar[str]
    """Name of the axis, of its degree in `Degrees`, and of its key in `parallel`."""
    description: ClassVar[str] = ""
    """Description of the key `parallel.<name>`, for the reference."""
    cuts: ClassVar[tuple[Dimension, ...]] = ()
    on_ranks: ClassVar[str] = "lightning_llm.parallel.axis:AxisOnRanks"
    """`module:Class` of the axis' torch code."""
    in_every_mesh: ClassVar[bool] = False
    """Whether the mesh keeps the axis at a degree of 1."""
    folds: ClassVar[bool] = False
    """Whether the axis divides ranks that the data axes count already (Megatron-LM's "folding"), so that the degrees of
    the other axes multiply to the number of ranks."""

    def layout_problems(self, config: Config, degrees: "Degrees", fits: bool) -> Iterator[Problem]:
        """Yield the reasons why the layout or the batch does not allow the degree of this axis.

        `fits`: whether `degrees` multiply to the number of ranks; if not, they are the config's degrees, with 1 for
        null.
        """
        return iter(())

    def search_degrees(self, config: Config, ranks: int) -> Sequence[int]:
        """Return the degrees of this axis that `plan --search` tries; it skips those that do not divide `ranks`.

        The search derives the degrees of dp_replicate and dp_shard from the ranks that the other axes leave.
        """
        return (1,)

    def machine_problems(self, config: Config, degrees: "Degrees") -> Iterator[Problem]:
        """Yield the reasons why a group of this axis does not fit the machines.

        Called only if `degrees` multiply to the number of ranks.
        """
        return iter(())

    def sharding_problems(self, config: Config, degrees: "Degrees") -> Iterator[Problem]:
        """Yield the sizes of the model and its sequences that the degree does not divide."""
        return iter(())

    def cut_operands(
        self, operand: str, linears: list[LinearSpec], config: Config, degrees: "Degrees"
    ) -> Iterator[tuple[int, "ShardedAxis"]]:
        """Yield the dimensions of `operand` (x [M, K], w [N, K], dy [M, N]) of `linears` that the axis splits."""
        return iter(())

    def add_sent(self, sent: "Sent", step: "RankStep") -> None:
        """Add the bytes that a rank sends over the axis in a step to `sent`."""

    def order_problem(self, degrees: "Degrees") -> str | None:
        """Return why training with this axis' degree differs in bits from a single rank; None if it does not."""
        return None


class MeshAxes(Mapping[str, MeshAxis]):
    """The registered axes by name, outermost first; `folded` ones are not among them.

    The degrees of the axes multiply to the number of ranks.
    """

    def __init__(self, built_in: tuple[str, ...], folded: tuple[str, ...]):
        self._axes: dict[str, MeshAxis] = {}
        self._folded: dict[str, MeshAxis] = {}
        self._cutting: dict[tuple[Dimension, ...], tuple[str, ...]] = {}
        self._built_in, self._loaded = (built_in, folded), False

    def register(self, axis: MeshAxis, outside: str | None = None) -> None:
        """Add `axis` directly outside the axis called `outside` (None: innermost), and its degree as a key of
        `parallel`.

        Raises:
            ValueError: another axis has that name, none is called `outside`, or the axis folds.
        """
        if axis.name in self.every():
            raise ValueError(f"axis '{axis.name}' is already registered: {type(self.every()[axis.name]).__qualname__}")
        if axis.folds:
            raise ValueError(f"'{axis.name}' cannot be registered: only built-in axes fold")
        names = list(self._axes)
        if outside is not None and outside not in names:
            raise ValueError(f"'{axis.name}' cannot be registered outside '{outside}': there is no such axis")
        names.insert(len(names) if outside is None else names.index(outside), axis.name)
        self._axes = {name: axis if name == axis.name else self._axes[name] for name in names}
        self._cutting.clear()
        add_degree(axis.name, axis.description)

    def cutting(self, *dimensions: Dimension) -> tuple[str, ...]:
        """Return the names of the axes that cut any of `dimensions`, outermost first."""
        if dimensions not in self._cutting:
            found = tuple(name for name, axis in self.items() if set(dimensions) & set(axis.cuts))
            self._cutting[dimensions] = found
        return self._cutting[dimensions]

    def __getitem__(self, name: str) -> MeshAxis:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, MeshAxis]:
        if not self._loaded:
            self._loaded = True
            self._axes, self._folded = (
                {name: import_module(f"{__package__}.{name}").AXIS for name in names} for names in self._built_in
            )
        return self._axes

    @property
    def folded(self) -> Mapping[str, MeshAxis]:
        """The axes that divide ranks of other axes (`MeshAxis.folds`)."""
        self._all()
        return self._folded

    def every(self) -> dict[str, MeshAxis]:
        """Return all axes, `folded` ones last."""
        return {**self._all(), **self._folded}


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of `number` in order."""
    return tuple(each for each in range(1, number + 1) if number % each == 0)


AXES = MeshAxes(BUILT_IN, FOLDED)
