"""Base of optimizers with a special rule for matrices and AdamW for all other parameters."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from lightning_llm.config.schema.optim import Role
from lightning_llm.linalg import local
from lightning_llm.linalg.grouped import stacked
from lightning_llm.optim.kinds import AdamWFields
from lightning_llm.optim.optimizer import AdamW, WeightRounding, adamw, groups_of, initialise_state, role_of


class OnWhole(Protocol):
    """Protocol of functions that apply a function to whole matrices under any layout, for update rules that need
    them."""

    def __call__(
        self,
        parameters: Sequence[nn.Parameter],
        part_of: Callable[[nn.Parameter], Tensor],
        function: Callable[[Tensor], Tensor],
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each of `parameters` and this rank's part of `function` of the whole matrix, in any order.

        `part_of` returns this rank's part of the matrix that belongs to a parameter, sharded as that is. `function`
        takes whole matrices [rows, columns], which it may write to, to others of their shape and dtype, and is run for
        each on one of the ranks that share it. Of a parameter that stacks several (`linalg.grouped.stacked`), such as
        the weights of experts, it takes each. Collective: every rank must give the same parameters in the same order.
        """
        ...


def on_one_rank(
    parameters: Sequence[nn.Parameter],
    part_of: Callable[[nn.Parameter], Tensor],
    function: Callable[[Tensor], Tensor],
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """`OnWhole` without sharding: yield each parameter and `function` of its matrix."""
    for parameter in parameters:
        part = part_of(parameter)
        yield parameter, on_each(function, part, stacked(parameter) * len(part) // len(parameter))  # whole experts


def on_each(function: Callable[[Tensor], Tensor], matrices: Tensor, count: int) -> Tensor:
    """Apply `function` to each of the `count` matrices that are stacked as rows of `matrices`; return them stacked."""
    if count == 1:
        return function(matrices)
    return torch.cat([function(matrix) for matrix in matrices.chunk(count)])


def matrix_shape(parameter: nn.Parameter) -> tuple[int, int]:
    """Return (rows, columns) of one matrix of `parameter`, which may stack several (experts)."""
    rows, columns = parameter.shape
    return rows // stacked(parameter), columns


class MatrixOptimizer(torch.optim.Optimizer):
    """Base class of optimizers with their own update rule for matrices of certain roles, and AdamW for the rest.

    The entry `matrices` of a parameter group tells which of the two it uses. A subclass implements `initial_state` and
    `update`, which calls `write`.
    """

    rounding: WeightRounding | None = None
    """Method that rounds updated weights; None: to nearest."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], config: AdamWFields, roles: tuple[Role, ...]):
        """Divide named `parameters` into groups; `roles`: roles of the matrices that the rule updates, never
        "vector"."""
        named = list(parameters)
        mine = [(name, each) for name, each in named if role_of(name, each.ndim) in roles]
        names = {name for name, _ in mine}
        rest = [(name, each) for name, each in named if name not in names]
        self._adamw: torch.optim.AdamW | None = None
        self._adamw = adamw(rest, config, getattr(config, "adamw_learning_rate", None)) if rest else None
        groups = [{**group, "lr": config.learning_rate, "matrices": True} for group in groups_of(mine, config)]
        if self._adamw is not None:
            groups += [{**group, "matrices": False} for group in self._adamw.param_groups]
        super().__init__(groups, {})

    def with_rounding(self, rounding: WeightRounding) -> Self:
        """Let this optimizer write weights by `rounding` from now on; return it."""
        self.rounding = rounding
        if isinstance(self._adamw, AdamW):
            self._adamw = self._adamw.with_rounding(rounding)
        return self

    def write(self, parameter: nn.Parameter, change: Callable[[Tensor, slice], Tensor]) -> None:
        """Replace this rank's part of a matrix by the results of `change`, see `WeightRounding.update`."""
        if self.rounding is not None:
            self.rounding.update(parameter, self.state[parameter], change)
            return
        weight = local(parameter)
        weight.copy_(change(weight.float(), slice(None)))

    def initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state tensors of a matrix before the first step, by name, sharded as the parameter is."""
        raise NotImplementedError

    def update(self, group: dict[str, Any]) -> None:
        """Make one step on the matrices of the parameter group `group`, in place; all of them have state."""
        raise NotImplementedError

    @torch.no_grad()
    def initialise_state(self) -> None:
        """Initialize the state of every parameter before the first step."""
        for group in self.param_groups:
            if group["matrices"]:
                self._add_missing_state(group["params"])
        if self._adamw is not None:
            initialise_state(self._rest(self._adamw))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["matrices"]:
                self._add_missing_state(group["params"])
                self.update(group)
        if self._adamw is not None:
            self._rest(self._adamw).step()
        return loss

    def _rest(self, optimizer: torch.optim.AdamW) -> torch.optim.AdamW:
        """Return AdamW over the groups and the state of this optimizer, which loading a checkpoint replaces."""
        optimizer.param_groups = [group for group in self.param_groups if not group["matrices"]]
        optimizer.state = self.state
        return optimizer

    def _add_missing_state(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter].update(self.initial_state(parameter))
                if self.rounding is not None:
                    self.state[parameter].update(self.rounding.initial_state(parameter))


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of the gradient of `parameter`. Raises ValueError if it has none."""
    if parameter.grad is None:
        raise ValueError("the parameter has no gradient")
    return local(parameter.grad)
