"""Sums in the order of one fixed binary tree over the micro-batches of a step, wherever these were computed.

Leaves are global micro-batches 0, 1, 2, ...; a node adds the two below it, one without a partner moves up as it is. A
sum of floats depends on its order, so this order is what makes gradients the same bits on 1, 2, 4 or 8 ranks. Local
nodes are kept like the digits of a binary counter: n micro-batches in a row need at most log2(n) buffers beside the
running one, where a plain running sum needs none.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_llm.parallel.torch_private import all_gather

Node = list[Tensor]


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

    def __init__(self) -> None:
        self.hold = False
        self._kept = TreeSum()

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor of `size`."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Write the sum over `group` of this rank's part of `input_tensor` [ranks * n] to `output_tensor` [n]."""
        if self.hold:
            if input_tensor.is_cuda:  # it is FSDP2's, which may give its memory away once this call is over
                input_tensor.record_stream(torch.cuda.current_stream())
            self._kept.push([input_tensor], level=1)
            output_tensor.zero_()
            return
        self._kept.close([input_tensor])
        output_tensor.copy_(tree_reduce_scatter(input_tensor, group))


def tree_reduce_scatter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part [n] of the tree sum over `group` of `tensor` [ranks * n]."""
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor, group=group)
    return sum_rows(received.view(group.size(), -1))


def tree_all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Iterator[dist.Work]:
    """Replace `tensor` [ranks * n] by its tree sum over `group`: a reduce-scatter and an all-gather, as a ring does it.

    Yields each of the two when it has begun, and goes on once it is waited for.
    """
    received = torch.empty_like(tensor)
    yield dist.all_to_all_single(received, tensor, group=group, async_op=True)
    part = sum_rows(received.view(group.size(), -1)).clone()
    del received  # not to be held while the next bucket is received
    yield all_gather(tensor, part, group=group, async_op=True)
