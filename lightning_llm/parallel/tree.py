"""Sums in the order of one fixed binary tree over the micro-batches of a step, wherever these were computed.

Leaves are global micro-batches 0, 1, 2, ...; a node adds the two below it, one without a partner moves up as it is. A
sum of floats depends on its order, so this order is what makes gradients the same bits on 1, 2, 4 or 8 ranks. Local
nodes are kept like the digits of a binary counter: n micro-batches in a row need at most log2(n) buffers beside the
running one, where a plain running sum needs none.
"""

from collections.abc import Generator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_llm.parallel.torch_private import all_gather

Node = list[Tensor]


class Subtrees(NamedTuple):
    """The groups by which ranks are summed in two stages: `within` those neighbours whose sum is a node of the tree,
    which lie on one machine, and `between` machines, over ranks of the same place in theirs."""

    within: dist.ProcessGroup
    between: dist.ProcessGroup


class TreeSum:
    """A binary counter of partial sums. Tensors that are pushed become its own, and are written to."""

    def __init__(self) -> None:
        self._nodes: list[tuple[int, Node]] = []

    def push(self, node: Node, level: int) -> None:
        """Take the next node of `level`, the sum of 2^level leaves."""
        while self._nodes and self._nodes[-1][0] == level:
            torch._foreach_add_(node, self._nodes.pop()[1])
            level += 1
        self._nodes.append((level, node))

    def close(self, node: Node) -> None:
        """Add everything pushed to `node`, which comes last, in place; the counter is empty again."""
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
    """FSDP2's reduce-scatter as an all-to-all of shards and a local tree sum: the bytes of a ring, in a fixed order.

    With `hold` set, the next call keeps its input as a node of two micro-batches (ZeRO-1 reduces once per step) and
    reports zeros, which the caller drops; the call after it adds what was kept.
    """

    def __init__(self, subtrees: Subtrees | None = None) -> None:
        self.hold = False
        self.subtrees = subtrees
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
            if input_tensor.is_cuda:  # it is FSDP2's, which may give its memory away once this call is over
                input_tensor.record_stream(torch.cuda.current_stream())
            self._kept.push([input_tensor], level=1)
            output_tensor.zero_()
            return
        self._kept.close([input_tensor])
        output_tensor.copy_(_ended(tree_reduce_scatter(input_tensor, group, self.subtrees)))


def tree_reduce_scatter(
    tensor: Tensor, group: dist.ProcessGroup, subtrees: Subtrees | None
) -> Generator[dist.Work, None, Tensor]:
    """Return this rank's part [n] of the tree sum over `group` of `tensor` [ranks * n], which may be written to.

    Yields each collective when it has begun, and goes on once it is waited for. With `subtrees` a machine's ranks add
    first what they have for each place on every machine, and one of them sends the sum on: the same nodes of the tree,
    and what leaves a machine is one tensor, not one for each of its ranks.
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


def tree_all_reduce(
    tensor: Tensor, group: dist.ProcessGroup, subtrees: Subtrees | None
) -> Generator[dist.Work, None, None]:
    """Replace `tensor` [ranks * n] by its tree sum over `group`: a reduce-scatter and an all-gather, as a ring does it.

    Yields each collective when it has begun, and goes on once it is waited for.
    """
    part = (yield from tree_reduce_scatter(tensor, group, subtrees)).clone()  # what is received is let go
    yield all_gather(tensor, part, group=group, async_op=True)


def _ended(works: Generator[dist.Work, None, Tensor]) -> Tensor:
    try:
        while True:
            next(works).wait()
    except StopIteration as end:
        result: Tensor = end.value
        return result
