"""Differentiable collectives: the backward pass of each is its conjugate collective.

Megatron's conjugate pairs: f (identity forward, all-reduce backward) and g (all-reduce forward, identity backward) of
Shoeybi et al. 2019 (arXiv 1909.08053, section 3); with sequence parallelism all-gather and reduce-scatter, each the
backward pass of the other (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2). Tokens are axis 1 of
`[B, T, ...]`. Both variants send the same bytes, but without sequence parallelism every rank holds all tokens between
blocks.

`Region` applies them where hidden states enter and leave a part of a block that a tensor-parallel group shares.

They use torch's functional collectives, which can be compiled into a graph, so a block stays one graph.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_llm.parallel.torch_private import functional
from lightning_llm.parallel.waiting import waited

_all_gather, _reduce_scatter = functional("all_gather_into_tensor"), functional("reduce_scatter_tensor")
_all_reduce, _wait = functional("all_reduce"), functional("wait_tensor")


class GroupRef(NamedTuple):
    """Process group as constants of a compiled graph: its name in torch, number of ranks, index of this rank."""

    name: str
    size: int
    rank: int

    @classmethod
    def from_group(cls, group: dist.ProcessGroup) -> "GroupRef":
        """Return the reference of `group`, which this rank belongs to."""
        return cls(group.group_name, group.size(), group.rank())


def gathered(x: Tensor, group: GroupRef) -> Tensor:
    """Return `[B, R T, ...]`, the tokens of all R ranks in their order, from this rank's `[B, T, ...]`."""
    parts = _all_gather(x.contiguous(), group.size, group.name)  # [R B, T, ...]
    by_rank: Tensor = waited(_wait, parts).unflatten(0, (group.size, -1))
    return by_rank.transpose(0, 1).flatten(1, 2)


def reduce_scattered(x: Tensor, group: GroupRef) -> Tensor:
    """Sum `x` `[B, T, ...]` over the R ranks of `group`; return this rank's tokens of the sum, `[B, T / R, ...]`."""
    by_rank = x.unflatten(1, (group.size, -1)).transpose(0, 1).flatten(0, 1).contiguous()  # [R B, T / R, ...]
    part = _reduce_scatter(by_rank, "sum", group.size, group.name)
    own: Tensor = waited(_wait, part)
    return own


def all_reduced(x: Tensor, group: GroupRef) -> Tensor:
    """Return the sum of `x` over the group, a new tensor."""
    total: Tensor = waited(_wait, _all_reduce(x.contiguous(), "sum", group.name))
    return total


def _same(x: Tensor, group: GroupRef) -> Tensor:
    return x.view_as(x)


_WAYS = {"gathered": gathered, "reduce_scattered": reduce_scattered, "all_reduced": all_reduced, "same": _same}


class _Conjugate(torch.autograd.Function):
    """One of `_WAYS` forward and its opposite backward, given by name because a graph cannot hold functions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: GroupRef, there: str, back: str) -> Tensor:
        ctx.group, ctx.back = group, back
        return _WAYS[there](x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _WAYS[ctx.back](grad, ctx.group), None, None, None


def gather_tokens(x: Tensor, group: GroupRef) -> Tensor:
    """Return `gathered`; the backward pass sums gradients over the group and keeps those of this rank's tokens."""
    tokens: Tensor = _Conjugate.apply(x, group, "gathered", "reduce_scattered")
    return tokens


def reduce_scatter_tokens(x: Tensor, group: GroupRef) -> Tensor:
    """Return `reduce_scattered`; the backward pass gathers the gradients of all tokens."""
    tokens: Tensor = _Conjugate.apply(x, group, "reduce_scattered", "gathered")
    return tokens


def copy_to_group(x: Tensor, group: GroupRef) -> Tensor:
    """Return `x` unchanged; the backward pass sums the gradient of `x` over the group."""
    same: Tensor = _Conjugate.apply(x, group, "same", "all_reduced")
    return same


def reduce_from_group(x: Tensor, group: GroupRef) -> Tensor:
    """Return the sum of `x` over the group; the backward pass passes the gradient through unchanged."""
    total: Tensor = _Conjugate.apply(x, group, "all_reduced", "same")
    return total


class Region:
    """Communication at the input and output of a cut part.

    `shares`: within the part, each of R ranks computes 1/R of the gradient of replicated tensors. Then the sum over
    ranks is the gradient of a replicated parameter, and an auxiliary loss counts once, because each rank adds 1/R of
    it. This covers the part's input, where gradients are summed over the group, and the output of its row-parallel
    linear, where they are not. `shares` is not needed with sequence parallelism, where no two ranks hold the same
    tokens between parts.
    """

    def __init__(self, group: dist.ProcessGroup, sequence: bool, shares: bool = False):
        self.group, self.sequence, self.shares = GroupRef.from_group(group), sequence, shares

    def enter(self, x: Tensor) -> Tensor:
        """Return the part's input with all tokens `[B, T, D]`, gathered from the group with sequence parallelism."""
        return (gather_tokens if self.sequence else copy_to_group)(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Return the part's output `x` summed over the group; with sequence parallelism, only this rank's tokens."""
        return (reduce_scatter_tokens if self.sequence else reduce_from_group)(x, self.group)

    def share(self, y: Tensor) -> Tensor:
        """Return the output `y` of a part; with `shares`, its gradient is divided by the number of ranks R."""
        return self._scaled(y, 1 / self.group.size) if self.shares else y

    def unshare(self, y: Tensor) -> Tensor:
        """Return `y`, computed from cut tensors; with `shares`, its gradient is multiplied by R (undoes `share`)."""
        return self._scaled(y, float(self.group.size)) if self.shares else y

    def _scaled(self, y: Tensor, factor: float) -> Tensor:
        same: Tensor = _ScaledGradient.apply(y, factor)
        return same

    def own(self, positions: Tensor) -> Tensor:
        """Return the positions `[..., T]` of the tokens that this rank holds between parts."""
        if not self.sequence:
            return positions
        length = positions.shape[-1] // self.group.size
        return positions.narrow(-1, self.group.rank * length, length)


class _ScaledGradient(torch.autograd.Function):
    """Identity; the backward pass multiplies the gradient by a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None
