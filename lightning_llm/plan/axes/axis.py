"""Base class of mesh axes, and their ordered registry: degrees, layouts, plans and reports iterate over it. No torch.

An axis is one object here and, where its ranks do more than the base class on torch's side, one class there
(`MeshAxis.on_ranks`, a subclass of `parallel.axis.AxisOnRanks`). An installed package registers its own when it is
imported (docs/howto/extend.md); its degree is then a key of `parallel`.
"""

from collections.abc import Iterator, Mapping
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
"""What ranks divide among them: a step's micro-batches; stored parameters, gathered for use; the tokens of a sequence;
heads, and rows or columns of weights; blocks."""

BUILT_IN = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost first: neighbours in rank share a tensor-parallel group, stages lie farthest apart.

A node then holds whole TP groups, which talk most, and pipeline stages, which talk least, lie across nodes (Narayanan
et al. 2021, arXiv 2104.04473, section 3; Megatron-LM's order "tp-cp-dp-pp")."""


class MeshAxis:
    """Base class of mesh axes. Its ranks share nothing but what `cuts` names; a subclass overrides what differs."""

    name: ClassVar[str]
    """Of the axis, of its degree in `Degrees`, and of its key in `parallel`."""
    description: ClassVar[str] = ""
    """Of that key."""
    cuts: ClassVar[tuple[Dimension, ...]] = ()
    on_ranks: ClassVar[str] = "lightning_llm.parallel.axis:AxisOnRanks"
    """Module and class of torch's side."""
    in_every_mesh: ClassVar[bool] = False
    """Whether the mesh has the axis even where it is one rank."""

    def layout_problems(self, config: Config, degrees: "Degrees", fits: bool) -> Iterator[Problem]:
        """Yield why the layout, the batch and the machines allow no such degree.

        `fits`: whether `degrees` multiply to the world; otherwise they are those given, 1 for those that are null.
        """
        return iter(())

    def machine_problems(self, config: Config, degrees: "Degrees") -> Iterator[Problem]:
        """Yield why a group of the axis does not fit the machines, where their ranks are known."""
        return iter(())

    def sharding_problems(self, config: Config, degrees: "Degrees") -> Iterator[Problem]:
        """Yield what of the model and its sequences the ranks of the axis do not divide."""
        return iter(())

    def cut_operands(
        self, operand: str, linears: list[LinearSpec], config: Config, degrees: "Degrees"
    ) -> Iterator[tuple[int, "ShardedAxis"]]:
        """Yield the dimensions of `operand` (x [M, K], w [N, K], dy [M, N]) of `linears` that ranks have parts of."""
        return iter(())

    def add_sent(self, sent: "Sent", step: "RankStep") -> None:
        """Add the bytes that a rank sends over the axis in a step."""

    def order_problem(self, degrees: "Degrees") -> str | None:
        """Return why a degree above 1 trains to other bits than one rank; None where it does not."""
        return None


class MeshAxes(Mapping[str, MeshAxis]):
    """The registered axes by name, outermost first."""

    def __init__(self, built_in: tuple[str, ...]):
        self._axes: dict[str, MeshAxis] = {}
        self._cutting: dict[tuple[Dimension, ...], tuple[str, ...]] = {}
        self._built_in, self._loaded = built_in, False

    def register(self, axis: MeshAxis, outside: str | None = None) -> None:
        """Add `axis` next to the axis called `outside`, around it; None: innermost. `parallel` takes its degree.

        Raises:
            ValueError: another axis has that name, or none is called `outside`.
        """
        if axis.name in self._all():
            raise ValueError(f"axis '{axis.name}' is {type(self[axis.name]).__qualname__} already")
        names = list(self._axes)
        if outside is not None and outside not in names:
            raise ValueError(f"no axis is called '{outside}', outside of which '{axis.name}' was to lie")
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
            self._axes = {name: import_module(f"{__package__}.{name}").AXIS for name in self._built_in}
        return self._axes


AXES = MeshAxes(BUILT_IN)
