"""What crosses a tensor-parallel group in a forward pass and, the other way round, in the backward pass.

Megatron's conjugate pairs: f (identity forward, all-reduce backward) and g (all-reduce forward, identity backward) of
Shoeybi et al. 2019 (arXiv 1909.08053, section 3); with sequence parallelism all-gather and reduce-scatter, either of
which is the other's backward pass (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2). Tokens are axis 1 of
`[B, T, ...]`. The bytes sent are the same; without sequence parallelism every rank holds all tokens between blocks.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_llm.parallel.tree import all_gather

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13

Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `[B, R T, ...]`, the tokens of all R ranks in their order, from this rank's `[B, T, ...]`."""
    ranks = group.size()
    parts = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    all_gather(parts, x.contiguous(), group=group)
    return parts.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)


def reduce_scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `[B, T / R, ...]`, this rank's tokens of the sum over the group, from `[B, T, ...]`."""
    by_rank = x.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()  # [R, B, T / R, ...]
    part = torch.empty_like(by_rank[0])
    reduce_scatter(part, by_rank.flatten(0, 1), group=group)
    return part


def all_reduced(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of `x` over the group, a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


class _Conjugate(torch.autograd.Function):
    """One collective forward and its partner backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, there: Collective, back: Collective) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad, ctx.group), None, None, None


@torch.compiler.disable  # a compiled block breaks here: collectives run between its graphs
def _conjugate(x: Tensor, group: dist.ProcessGroup, there: Collective, back: Collective) -> Tensor:
    result: Tensor = _Conjugate.apply(x, group, there, back)
    return result


def gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `gathered`; the backward pass sums gradients over the group and keeps this rank's tokens'."""
    return _conjugate(x, group, gathered, reduce_scattered)


def reduce_scatter_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `reduce_scattered`; the backward pass gathers the gradients of all tokens."""
    return _conjugate(x, group, reduce_scattered, gathered)


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x`; the backward pass sums its gradient over the group."""
    return _conjugate(x, group, _same, all_reduced)


def reduce_from_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of `x` over the group; the backward pass takes the gradient as it is."""
    return _conjugate(x, group, all_reduced, _same)
