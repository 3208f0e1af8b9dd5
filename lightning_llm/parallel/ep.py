"""Expert parallelism: ranks hold whole experts of every block, tokens travel to them and their outputs back.

A rank sorts its rows by expert (`model.experts.dispatch`), so that those for each rank lie together, and one all-to-all
with splits sends them; a second one returns the outputs in the same order, and the backward pass sends gradients the
other way. The ranks of a group are neighbors among the data-parallel ranks, and each has its own micro-batch.

A rank computes its experts on the rows of one sender after another, as that sender would alone: rows, scales, amaxes
and random bits are then those of one rank, and each sender's gradient of a weight is a leaf of the tree of sums
(`tree`). Where gradients are reduced once per step (DDP, ZeRO-1), a rank's micro-batches follow one another in the
tree, so that the gradients of each sender are summed over the step first, and then over senders.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from lightning_llm.linalg import local
from lightning_llm.linalg.grouped import GroupedLinear, Groups, has_values
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.experts.moe import Experts
from lightning_llm.parallel.axis import AxisOnRanks
from lightning_llm.parallel.tp import shard_parameter
from lightning_llm.parallel.tree import TreeSum


class ExpertParallel(AxisOnRanks):
    """Cuts the experts of a stage. Gradients need no sum over the axis: each rank has those of all senders."""

    def cut(self, stage: Decoder) -> None:
        mesh = self.layout.expert_mesh
        if mesh is None:
            raise ValueError("a group has a mesh")
        for module in stage.modules():
            if not isinstance(module, Experts):
                continue
            for linear in module.children():
                weight: Any = linear.weight
                sharded = shard_parameter(weight, mesh["ep"], 0)
                linear.register_parameter("weight", nn.Parameter(sharded, requires_grad=weight.requires_grad))
            module.__class__ = DividedExperts
            divided: Any = module
            divided.divide(self.group)


def divided_experts(model: nn.Module) -> list["DividedExperts"]:
    """Return the experts of `model` that ranks divide."""
    return [module for module in model.modules() if isinstance(module, DividedExperts)]


def is_ep_shard(parameter: Tensor) -> bool:
    """Return whether the ranks of an expert-parallel group hold different parts of `parameter`."""
    return isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())


class Splits(NamedTuple):
    """Rows that a rank sends to each rank, and rows of each of its experts that it gets from each: `[S][E / S]`."""

    sent: list[int]
    received: list[list[int]]


class DividedExperts(Experts):
    """Experts of which each rank of `group` holds as many, in order, whole."""

    group: dist.ProcessGroup
    closes: bool
    """Whether the next backward pass leaves the sum over senders in `.grad`; otherwise it keeps the senders' sums."""

    def divide(self, group: dist.ProcessGroup) -> None:
        """Set the group of ranks, once the weights are cut."""
        self.group, self.closes = group, True
        self.first = group.rank() * self.local_count
        self._sums = {name: SenderSums(group.size()) for name, _ in self.named_children()}

    @property
    def held(self) -> tuple[int, int]:
        """Number of the first expert that rows are sorted for, and their count: all, wherever they are."""
        return 0, self.count

    def outputs_of(self, rows: Tensor, groups: Groups) -> Tensor:
        """Return `[R, D]` of `rows` `[R, D]`, sorted by expert as `groups` says; all ranks of the group take part."""
        sizes, splits = self._splits(groups)
        from_each = [sum(counts) for counts in splits.received]
        taken: Tensor = _Exchange.apply(rows, self.group, splits.sent, from_each)
        shares = [self._shares(linear, name, rows.dtype) for name, linear in self._linears()]
        made = []
        for sender, part in enumerate(taken.split(from_each)):
            here = Groups(sizes[sender], len(part))
            vars(here)["counts"] = splits.received[sender]  # known already: the host need not wait again
            gate, up, down = (
                _Given(linear, share[sender], here, self.first, sender)
                for (_, linear), share in zip(self._linears(), shares, strict=True)
            )
            made.append(down(F.silu(gate(part)) * up(part)))
        outputs: Tensor = _Exchange.apply(torch.cat(made), self.group, from_each, splits.sent)
        return outputs

    def _linears(self) -> Iterator[tuple[str, GroupedLinear]]:
        yield from (("gate_proj", self.gate_proj), ("up_proj", self.up_proj), ("down_proj", self.down_proj))

    def _shares(self, linear: GroupedLinear, name: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        shares: tuple[Tensor, ...] = _Shares.apply(
            linear.weight, linear.dtype_on_use(dtype), self.group.size(), self._sums[name], self
        )
        return shares

    @torch.no_grad()
    def _splits(self, groups: Groups) -> tuple[Tensor, Splits]:
        """Return the sizes of groups `[S, E / S]` that this rank gets rows of, and `Splits`. The host waits once."""
        ranks = self.group.size()
        received = torch.empty_like(groups.sizes)
        dist.all_to_all_single(received, groups.sizes, group=self.group)
        if has_values(received):
            own, other = torch.stack([groups.sizes, received]).view(2, ranks, -1).tolist()
        else:  # a dry run: all ranks send alike
            each = self.count // ranks
            own = [groups.counts[start : start + each] for start in range(0, self.count, each)]
            other = [own[self.group.rank()]] * ranks
        return received.view(ranks, -1), Splits([sum(counts) for counts in own], other)


class _Given(NamedTuple):
    """A linear with everything but its rows."""

    linear: GroupedLinear
    weight: Tensor
    groups: Groups
    first: int
    sender: int

    def __call__(self, rows: Tensor) -> Tensor:
        y: Tensor = self.linear(rows, self.groups, self.first, self.weight, self.sender)
        return y


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows, `sent[r]` to rank r and `received[r]` from it; backward the same the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _exchanged(rows, group, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradient, ctx.group, ctx.received, ctx.sent), None, None, None


def _exchanged(rows: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
    taken = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(taken, rows.contiguous(), received, sent, group=group)
    return taken


class SenderSums:
    """The gradients of one weight `[E N, K]` in progress, a tree sum over micro-batches for each sender."""

    def __init__(self, senders: int) -> None:
        self._sums = [TreeSum() for _ in range(senders)]

    def add(self, gradients: Iterable[Tensor], closes: bool) -> Tensor | None:
        """Add a micro-batch's gradient from each sender; return the sum over senders, in tree order, if it `closes`."""
        own = list(gradients)
        for sums, gradient in zip(self._sums, own, strict=True):
            if closes:
                sums.close([gradient])
            else:
                sums.push([gradient], level=0)
        return sum_neighbors(own) if closes else None


def sum_neighbors(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tree sum of tensors of one shape, which may be written to: of neighbors, then of their sums."""
    while len(tensors) > 1:
        pairs = [left.add_(right) for left, right in zip(tensors[::2], tensors[1::2], strict=False)]
        tensors = [*pairs, *tensors[len(pairs) * 2 :]]
    return tensors[0]


class _Shares(torch.autograd.Function):
    """A weight once for each sender, local and in `dtype`; the gradients are summed in the dtype of the weight."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, dtype: torch.dtype, senders: int, sums: SenderSums, experts: DividedExperts
    ) -> tuple[Tensor, ...]:
        ctx.weight, ctx.sums, ctx.experts = weight, sums, experts
        own = local(weight).to(dtype)
        return tuple(own.view_as(own) for _ in range(senders))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        weight = ctx.weight
        leaves = (each.to(weight.dtype, copy=True) for each in gradients)
        total = ctx.sums.add(leaves, ctx.experts.closes)
        if total is not None and isinstance(weight, DTensor):
            mesh, placements, shape = weight.device_mesh, weight.placements, weight.shape
            total = DTensor.from_local(total, mesh, placements, run_check=False, shape=shape, stride=weight.stride())
        return total, None, None, None, None


def close_sums(experts: Iterable[DividedExperts], closes: bool) -> None:
    """Set whether the next backward pass of `experts` sums over senders (`DividedExperts.closes`)."""
    for each in experts:
        each.closes = closes
