"""Sums in the order of one fixed binary tree over the micro-batches of a step, independent of the layout.

Leaves are global micro-batches 0, 1, 2, ...; a node is the sum of the two nodes below it, and a node without a partner
moves up unchanged. A float sum depends on its order, so this fixed order makes gradients bitwise equal on 1, 2, 4 or 8
ranks. A rank keeps its partial sums like the digits of a binary counter: n consecutive micro-batches need at most
log2(n) buffers in addition to the current one, where a plain running sum needs none.
"""

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_llm.parallel.torch_private import all_gather

Node = list[Tensor]
Scatter = Callable[[Tensor, dist.ProcessGroup], Generator[dist.Work, None, Tensor]]
"""Of a tensor [ranks * n], which may be written to: this rank's part [n] of its sum over the group.

Yields each collective after starting it; resume after waiting for it.
"""


class Subtrees(NamedTuple):
    """Groups of a two-level tree sum: first over the ranks of a machine, then over machines.

    `within`: consecutive ranks of one machine that form a node of the tree. `between`: the ranks with the same index on
    their machines, one per machine.
    """

    within: dist.ProcessGroup
    between: dist.ProcessGroup


class TreeSum:
    """A tree sum in progress, kept as a binary counter of partial sums. Pushed tensors are overwritten."""

    def __init__(self) -> None:
        self._nodes: list[tuple[int, Node]] = []

    def push(self, node: Node, level: int) -> None:
        """Add `node`, the sum of the next 2^`level` leaves."""
        while self._nodes and self._nodes[-1][0] == level:
            torch._foreach_add_(node, self._nodes.pop()[1])
            level += 1
        self._nodes.append((level, node))

    def close(self, node: Node) -> None:
        """Add all pushed nodes to `node`, the last one, in place, and empty the counter."""
        while self._nodes:
            torch._foreach_add_(node, self._nodes.pop()[1])


def sum_rows(rows: Tensor) -> Tensor:
    """Return the tree sum of `rows` [R, n] over R, as [n]; `rows` is written to."""
    while len(rows) > 1:
        pairs = len(rows) // 2
        summed = rows[0 : 2 * pairs : 2].add_(rows[1 : 2 * pairs : 2])
        rows = summed if len(rows) % 2 == 0 else torch.cat([summed, rows[-1:]])
    return rows[0]


class TreeReduceScatter:
    """Reduce-scatter for FSDP2: an all-to-all of shards and a local tree sum. Sends as many bytes as a ring.

    If `hold` is set, a call communicates nothing: it keeps its input, the sum of two micro-batches, and outputs zeros,
    which the caller drops (ZeRO-1 reduces once per step). The next call without `hold` adds all kept inputs to its own.
    """

    def __init__(self, scatter: Scatter) -> None:
        self.hold = False
        self._scatter = scatter
        self._kept = TreeSum()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor of `size`."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Write the sum over `group` of this rank's part of `input_tensor` [ranks * n] to `output_tensor` [n].

        The input is written to.
        """
        if self.hold:
            if input_tensor.is_cuda:  # FSDP2 owns it and may reuse its memory after this call
                input_tensor.record_stream(torch.cuda.current_stream())
            self._kept.push([input_tensor], level=1)
            output_tensor.zero_()
            return
        self._kept.close([input_tensor])
        output_tensor.copy_(_ended(self._scatter(input_tensor, group)))


def tree_reduce_scatter(
    tensor: Tensor, group: dist.ProcessGroup, subtrees: Subtrees | None
) -> Generator[dist.Work, None, Tensor]:
    """Return this rank's part [n] of the tree sum over `group` of `tensor` [ranks * n], which may be written to.

    Yields each collective after starting it; resume after waiting for it. With `subtrees`, the ranks of a machine first
    sum among themselves, each for the ranks with its own index on all machines, and then exchange these sums between
    machines. The tree is the same, but each machine sends one sum instead of one tensor per rank.
    """
    if subtrees is None:
        received = torch.empty_like(tensor)
        yield dist.all_to_all_single(received, tensor, group=group, async_op=True)
        return sum_rows(received.view(group.size(), -1))
    ranks, nodes = subtrees.within.size(), subtrees.between.size()
    by_place = tensor.view(nodes, ranks, -1).transpose(0, 1).flatten()
    yield dist.all_to_all_single(tensor, by_place, group=subtrees.within, async_op=True)
    del by_place
    summed = sum_rows(tensor.view(ranks, -1))  # [nodes * n], for this place on every machine
    received = torch.empty_like(summed)
    yield dist.all_to_all_single(received, summed, group=subtrees.between, async_op=True)
    return sum_rows(received.view(nodes, -1))


def all_reduce_by(tensor: Tensor, group: dist.ProcessGroup, scatter: Scatter) -> Generator[dist.Work, None, None]:
    """Replace `tensor` [ranks * n] by its sum over `group`: `scatter` and an all-gather, as a ring does it.

    Yields each collective after starting it; resume after waiting for it.
    """
    part = (yield from scatter(tensor, group)).to(tensor.dtype, copy=True)  # frees the receive buffer
    yield all_gather(tensor, part, group=group, async_op=True)


def _ended(works: Generator[dist.Work, None, Tensor]) -> Tensor:
    try:
        while True:
            next(works).wait()
    except StopIteration as end:
        result: Tensor = end.value
        return result
