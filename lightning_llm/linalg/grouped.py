"""Products of groups of rows, each with its own matrix: the linears of a mixture of experts, one 2-D weight per kind.

The weights of E experts are stacked as the rows of one matrix `[E N, K]`: expert e owns rows e N to (e + 1) N. Rows of
the operand are sorted by expert. On a CPU each expert is one product; on CUDA 16-bit operands take one grouped GEMM
(`torch.nn.functional.grouped_mm`, SM80 and later). Both give the same bits on a CPU (`tests/linalg/test_grouped.py`).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from lightning_llm.linalg.cast_linear import CastOnUse
from lightning_llm.linalg.gemm import fp32_product, linear, product
from lightning_llm.linalg.local_part import local

ALIGNED_BYTES = 16
"""A grouped GEMM needs strides of a multiple of this."""


@dataclass(frozen=True)
class Groups:
    """Consecutive groups of `total` rows. `sizes`: rows of each group, int64 `[E]`, on the device of the operands."""

    sizes: Tensor
    total: int

    @cached_property
    def counts(self) -> list[int]:
        """Rows of each group on the host, which waits for the device. Without values they are as equal as possible."""
        if not has_values(self.sizes):
            each, more = divmod(self.total, len(self.sizes))
            return [each + (index < more) for index in range(len(self.sizes))]
        counts: list[int] = self.sizes.tolist()
        return counts

    @cached_property
    def ends(self) -> Tensor:
        """The end of each group's rows, int32 `[E]`."""
        return self.sizes.cumsum(0).to(torch.int32)


def has_values(tensor: Tensor) -> bool:
    """Return whether `tensor` has values: it is neither on the meta device nor a fake tensor of a dry run."""
    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)


def takes_grouped_mm(x: Tensor, columns: int) -> bool:
    """Return whether the device has a grouped GEMM for `x` `[M, K]` and matrices `[N, K]` of N `columns`."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device) < (8, 0):
        return False
    return all(size * x.element_size() % ALIGNED_BYTES == 0 for size in (x.shape[1], columns))


def grouped_mm(x: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    """Return the products `[M, N]` of `x` `[M, K]` with each group's `weights` `[E, N, K]` by one grouped GEMM."""
    y: Tensor = F.grouped_mm(x, weights.transpose(1, 2), offs=groups.ends)
    return y


class _ByGroup(torch.autograd.Function):
    """One product per group, forward and backward; a group without rows has a zero gradient.

    `weight` `[E N, K]` is in the dtype of X `[M, K]`, or an fp32 master that each product casts: then the gradient of
    the weight is the fp32 sum, not rounded (`CastOnUse.rounds_wgrad`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups = groups
        parts = zip(x.split(groups.counts), weight.chunk(len(groups.counts)), strict=True)
        return torch.cat([linear(rows, weight.to(x.dtype)) for rows, weight in parts])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, whole = ctx.saved_tensors
        counts, dy = ctx.groups.counts, dy.contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            parts = zip(dy.split(counts), whole.chunk(len(counts)), strict=True)
            dx = torch.cat([product(rows, weight.to(x.dtype)) for rows, weight in parts])
        if ctx.needs_input_grad[1]:
            multiply = product if whole.dtype == x.dtype else fp32_product
            dw = torch.empty_like(whole)
            for of_weight, left, right in zip(dw.chunk(len(counts)), dy.split(counts), x.split(counts), strict=True):
                of_weight.copy_(multiply(left.t(), right) if len(left) else torch.zeros_like(of_weight))
        return dx, dw, None


STACKED = "stacked_matrices"
"""Attribute of a parameter: how many matrices its rows are, one below another."""


def mark_stacks(model: nn.Module) -> None:
    """Mark the weights of grouped linears, in their final form, for rules of whole matrices (`stacked`)."""
    for module in model.modules():
        if isinstance(module, GroupedLinear):
            setattr(module.weight, STACKED, module.groups)


def stacked(parameter: Tensor) -> int:
    """Return how many matrices the rows of `parameter` are: 1 unless it is marked."""
    return getattr(parameter, STACKED, 1)


class GroupedLinear(CastOnUse):
    """The linears of `groups` experts without biases: `y = x W_e^T` for the rows of expert e.

    `weight` `[E N, K]` has the rows of one expert after those of another. Ranks of a tensor-parallel group hold whole
    experts, so that a local weight has fewer of them. `row_multiple`: rows of each group must be a multiple of this.
    """

    row_multiple = 1

    def __init__(self, groups: int, in_features: int, out_features: int):
        super().__init__()
        self.groups, self.in_features, self.out_features = groups, in_features, out_features
        self.weight = nn.Parameter(torch.empty(groups * out_features, in_features))

    def forward(
        self, x: Tensor, groups: Groups, first: int = 0, weight: Tensor | None = None, sender: int = 0
    ) -> Tensor:
        """Return `[M, N]` in the dtype of `x` `[M, K]`, rows sorted by expert as `groups` divides them.

        `first`: number of the first expert on this rank, and `sender`: whose micro-batch the rows are from, for
        subclasses. `weight`: this rank's part of the weight; None: that of the parameter.
        """
        weight = local(self.weight) if weight is None else weight
        if self.rounds_wgrad:
            weight = weight.to(x.dtype)
        if self.rounds_wgrad and takes_grouped_mm(x, self.out_features):
            return grouped_mm(x, weight.view(-1, self.out_features, self.in_features), groups)
        y: Tensor = _ByGroup.apply(x, weight, groups)
        return y

    def dtype_on_use(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which `forward` takes the weight for operands of `dtype`."""
        return dtype if self.rounds_wgrad else self.weight.dtype

    def of_group(self, x: Tensor, group: int) -> Tensor:
        """Return `[M, N]` of `x` `[M, K]` by the weight of local expert `group` alone."""
        rows = local(self.weight).narrow(0, group * self.out_features, self.out_features)  # [N, K]
        return self.multiply(x, rows)

    def extra_repr(self) -> str:
        return f"groups={self.groups}, in_features={self.in_features}, out_features={self.out_features}"
