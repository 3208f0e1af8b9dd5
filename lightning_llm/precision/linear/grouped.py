"""The linears of experts with quantized operands: each expert's three GEMMs have their own six casts.

Scales, amaxes, random bits and cached casts are those of a separate layer per expert, named by the expert's number in
the whole model, so they do not depend on which rank holds it. An expert's rows are filled up with zeros to whole
blocks, as Megatron-LM pads them for FP8 (`get_align_size_for_quantization`): zeros change neither amaxes nor dW.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.linalg import local
from lightning_llm.linalg.grouped import GroupedLinear, Groups
from lightning_llm.precision.linear.module import QuantizedLinear
from lightning_llm.precision.linear.plan import LinearPlan
from lightning_llm.precision.module_rules import expert_place


class QuantizedGroupedLinear(GroupedLinear):
    """Quantized `GroupedLinear`: the operands of each expert's GEMMs are cast by `plan`.

    `experts`: one `QuantizedLinear` per expert, without a weight; each call passes them a part of this module's weight.
    A tensor-parallel rank, which holds some experts, has the layers of all, so that state has the same names on every
    rank.
    """

    def __init__(self, name: str, linear: GroupedLinear, plans: Sequence[LinearPlan], multiple: int):
        """`plans`: of each expert. `multiple`: see `row_multiple`."""
        with torch.device("meta"):
            super().__init__(linear.groups, linear.in_features, linear.out_features)
            shape = nn.Linear(linear.in_features, linear.out_features, bias=False)
        self.weight, self.training, self.row_multiple = linear.weight, linear.training, multiple
        self.experts = tuple(self._expert(f"{name}.{number}", shape, plan) for number, plan in enumerate(plans))
        for number, expert in enumerate(self.experts):
            expert.place = expert_place(name, number)

    def _expert(self, name: str, shape: nn.Linear, plan: LinearPlan) -> QuantizedLinear:
        return QuantizedLinear(name, shape, plan)

    def forward(
        self, x: Tensor, groups: Groups, first: int = 0, weight: Tensor | None = None, sender: int = 0
    ) -> Tensor:
        """Return `[M, N]` in the dtype of `x` `[M, K]`: each group of rows times the weight of its expert.

        `groups`: rows of each local expert. `first`: number of the first local expert. `sender`: index of the
        micro-batch that the rows are from, among those that ranks run at once. `weight`: see `GroupedLinear.forward`.
        """
        counts = groups.counts
        self._materialise_state(x.device)
        weights = (local(self.weight) if weight is None else weight).chunk(len(counts))
        made = []
        for number, (rows, weight) in enumerate(zip(x.split(counts), weights, strict=True), start=first):
            if len(rows):
                expert = self._in_mode(number)
                with expert.keys_of(sender):
                    made.append(expert(rows, partial(_multiplied, weight=weight)))
        # Without rows, too, a backward pass reaches x, which other ranks may have sent, and makes a gradient of zeros.
        return torch.cat(made) if made else F.linear(x, weights[0].to(x.dtype))

    def dtype_on_use(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the weight, which each cast rounds to `dtype` itself."""
        return self.weight.dtype

    def of_group(self, x: Tensor, group: int) -> Tensor:
        """Return `[M, N]`, the product of `x` `[M, K]` and the weight of local expert `group`."""
        self._materialise_state(x.device)
        weight = local(self.weight).narrow(0, group * self.out_features, self.out_features)
        y: Tensor = self._in_mode(group)(x, partial(_multiplied, weight=weight))
        return y

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode of this module and of `experts`, which are not registered as submodules."""
        for expert in self.experts:
            expert.train(mode)
        return super().train(mode)

    def _in_mode(self, number: int) -> QuantizedLinear:
        """Return the layer of expert `number`, in training mode if this module is.

        Lightning restores the mode after a validation by the attribute of each registered module, not by `train`.
        """
        expert = self.experts[number]
        expert.training = self.training
        return expert

    def _materialise_state(self, device: torch.device) -> None:
        """Start the delayed scales of all experts: every rank reduces the same amaxes, with or without tokens."""
        for expert in self.experts:
            if expert.plan.delayed_casts():
                expert.materialise_state(device)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.experts[0].casts_text()}"


def _multiplied(multiply: Any, x: Tensor, _: Tensor, bias: None, weight: Tensor) -> Tensor:
    """Return the product with an expert's own `weight`: the form in which a linear takes it (`Reduce`)."""
    y: Tensor = multiply(x, weight, bias)
    return y


def row_multiple(sets: Iterable[Mapping[str, CastConfig]]) -> int:
    """Return the least common multiple of the rows that blocks and rotations of x and dy need, in all `sets`.

    `sets`: sets of six casts by slot.
    """
    sizes = [1]
    for slot, cast in (pair for casts in sets for pair in casts.items()):
        if slot.endswith(".w") or not cast.quantizes:
            continue
        summed = slot.startswith("wgrad")
        if cast.block_size is not None:
            across, along = cast.block_size
            sizes.append((along or 1) if summed else across)  # a row is whole, whatever its length
        if summed and cast.hadamard is not None:
            sizes.append(cast.hadamard.size)
    return math.lcm(*sizes)
