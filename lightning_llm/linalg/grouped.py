"""Grouped matrix products for a mixture of experts: each group of rows is multiplied by its own expert's matrix.

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

from lightning_llm.linalg import local
from lightning_llm.linalg.gemm import CastOnUse, fp32_product, linear, product

ALIGNED_BYTES = 16
"""A grouped GEMM needs strides of a multiple of this."""


@dataclass(frozen=True)
class Groups:
    """Division of the rows of a matrix into E consecutive groups, one for each expert."""

    sizes: Tensor
    """Number of rows of each group, int64 `[E]`, on the device of the operands."""
    total: int
    """Number of all rows, the sum of `sizes`."""

    @cached_property
    def counts(self) -> list[int]:
        """Number of rows of each group as Python integers; reading them makes the host wait for the device.

        Fake and meta tensors have no values (`has_values`): then all groups are as equal as possible.
        """
        if not has_values(self.sizes):
            each, more = divmod(self.total, len(self.sizes))
            return [each + (index < more) for index in range(len(self.sizes))]
        counts: list[int] = self.sizes.tolist()
        return counts

    @cached_property
    def ends(self) -> Tensor:
        """Index of the row after the last one of each group, int32 `[E]`."""
        return self.sizes.cumsum(0).to(torch.int32)


def has_values(tensor: Tensor) -> bool:
    """Return whether `tensor` has values, that is, is neither on the meta device nor a fake tensor of a dry run."""
    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)


def takes_grouped_mm(x: Tensor, columns: int) -> bool:
    """Return whether one grouped GEMM can multiply groups of rows of `x` `[M, K]` by matrices `[columns, K]`.

    It needs bf16 on CUDA with compute capability 8.0 or later, and rows of a multiple of 16 bytes.
    """
    if not x.is_cuda or x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device) < (8, 0):
        return False
    return all(size * x.element_size() % ALIGNED_BYTES == 0 for size in (x.shape[1], columns))


def grouped_mm(x: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    """Return `[M, N]`: the rows of `x` `[M, K]` in group e times `weights[e]^T`, of `weights` `[E, N, K]`.

    By one grouped GEMM; see `takes_grouped_mm` for its conditions.
    """
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
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
            for of_x, rows, weight in zip(dx.split(counts), dy.split(counts), whole.chunk(len(counts)), strict=True):
                product(rows, weight.to(x.dtype), out=of_x)
        if ctx.needs_input_grad[1]:
            dw = torch.empty_like(whole)
            for of_weight, left, right in zip(dw.chunk(len(counts)), dy.split(counts), x.split(counts), strict=True):
                if not len(left):
                    of_weight.zero_()
                elif whole.dtype == x.dtype:
                    product(left.t(), right, out=of_weight)
                else:
                    of_weight.copy_(fp32_product(left.t(), right))
        return dx, dw, None


STACKED = "stacked_matrices"
"""Attribute of a parameter: the number of matrices that are stacked as its rows."""


def mark_stacks(model: nn.Module) -> None:
    """Record on each weight of a `GroupedLinear` in `model` how many matrices it stacks, for optimizers (`stacked`).

    Call it after the parameters have been sharded, because sharding replaces them.
    """
    for module in model.modules():
        if isinstance(module, GroupedLinear):
            setattr(module.weight, STACKED, module.groups)


def stacked(parameter: Tensor) -> int:
    """Return the number of matrices that are stacked as the rows of `parameter`; 1 without a mark of `mark_stacks`."""
    return getattr(parameter, STACKED, 1)


class GroupedLinear(CastOnUse):
    """Linear layers of `groups` experts as one module, without biases: `y = x W_e^T` for the rows of expert e.

    `weight` `[E N, K]` stacks the matrices `[N, K]` of all experts. Ranks of a tensor-parallel group hold whole
    experts, so a rank's part of the weight has fewer of them.
    """

    row_multiple = 1
    """The number of rows of each group must be a multiple of this."""

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
        """Return `[M, N]`: all rows of `x` `[M, K]` times the matrix of this rank's expert number `group`."""
        rows = local(self.weight).narrow(0, group * self.out_features, self.out_features)  # [N, K]
        return self.multiply(x, rows)

    def extra_repr(self) -> str:
        return f"groups={self.groups}, in_features={self.in_features}, out_features={self.out_features}"
