"""Buckets of gradients that are reduced beside a backward pass, each begun as soon as its last gradient is there.

Every bucket goes through the same few collectives, one behind the other. When one begins, those under way move on by
one: so ranks issue their collectives in one order, whatever they wait for, and few buckets are held at a time. Buckets
in the order of the backward pass are those of Li et al. 2020 (arXiv 2006.15704, section 3.2.3).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from lightning_llm.linalg.local_part import local
from lightning_llm.parallel.tree import TreeSum
from lightning_llm.plan.memory.buffers import REPLICA_BUCKET_BYTES

Works = Iterator[dist.Work]
"""Collectives one behind the other: each is begun when it is asked for, which is once the one before has ended."""
Reduction = Callable[[Tensor], Works]
"""Takes a flat tensor to what ranks agree on (mostly a sum), in place."""
BEGIN, END = "BucketReductions.begin", "BucketReductions.end"
"""What a profiler's trace calls the two."""


class Bucket:
    """Parameters whose gradients are summed over micro-batches, and then reduced, together."""

    def __init__(self, parameters: Sequence[nn.Parameter], reductions: Sequence[Reduction], multiple: int):
        """`reductions`: over ranks, in turn; empty where the gradients are no other rank's.

        `multiple`: what they take a multiple of, in elements.
        """
        self.parameters, self.reductions, self.multiple = parameters, reductions, multiple
        self.sums = TreeSum()
        self.awaited: set[int] = set()
        """Ids of parameters whose gradients the backward pass in progress has yet to give."""

    def gradients(self) -> list[Tensor]:
        """Return this rank's part of those gradients that there are."""
        return [local(parameter.grad) for parameter in self.parameters if parameter.grad is not None]

    def push(self) -> None:
        """Keep the gradients as a node of two micro-batches; there are none after it."""
        if gradients := self.gradients():
            self.sums.push(gradients, level=1)
            for parameter in self.parameters:
                parameter.grad = None

    def close(self) -> None:
        """Add what was kept to the gradients of the step's last micro-batch."""
        if gradients := self.gradients():
            self.sums.close(gradients)

    def reduced(self) -> Works:
        """Replace the gradients by what ranks agree on; without a collective where there is nothing to reduce."""
        gradients = self.gradients()
        if not (gradients and self.reductions):
            return
        sizes = [gradient.numel() for gradient in gradients]
        padding = -sum(sizes) % self.multiple
        pieces = [gradient.flatten() for gradient in gradients]
        flat = torch.cat([*pieces, pieces[0].new_zeros(padding)] if padding else pieces)
        for reduction in self.reductions:
            yield from reduction(flat)
        parts = flat.split([*sizes, padding])
        torch._foreach_copy_(gradients, [part.view_as(old) for part, old in zip(parts, gradients, strict=False)])


def buckets_of(
    parameters: Sequence[nn.Parameter],
    reductions_of: Callable[[nn.Parameter], Sequence[Reduction]],
    multiple: int = 1,
) -> list[Bucket]:
    """Return `parameters` in buckets. They come, and buckets go, as a backward pass is done with them.

    Those of one bucket have a dtype and `reductions_of` them in common.
    """
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    alike: dict[object, list[list[nn.Parameter]]] = {}
    for parameter in parameters:
        shares = alike.setdefault((parameter.dtype, tuple(reductions_of(parameter))), [[]])
        if shares[-1] and sum(map(_bytes, shares[-1])) + _bytes(parameter) > REPLICA_BUCKET_BYTES:
            shares.append([])
        shares[-1].append(parameter)
    filled = [share for shares in alike.values() for share in shares]
    filled.sort(key=lambda share: places[id(share[-1])])  # when its last gradient is there
    return [Bucket(share, reductions_of(share[0]), multiple) for share in filled]


def _bytes(parameter: nn.Parameter) -> int:
    return local(parameter).nbytes


class BucketReductions:
    """Buckets that are being reduced; on CUDA on a stream of its own, so that no other computation waits for it."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[Works, dist.Work]] = deque()
        self._stream: torch.cuda.Stream | None = None

    def begin(self, bucket: Bucket) -> None:
        """Begin to reduce `bucket`, whose gradients the current stream gives; nobody touches them before `end`.

        Collective, as `end` is: in the same order on all ranks.
        """
        if self._stream is None and bucket.parameters[0].is_cuda:
            self._stream = torch.cuda.Stream(priority=-1)
        bucket.close()
        with record_function(BEGIN), self._beside():
            self._move_on()
            self._follow(bucket.reduced())

    def end(self) -> None:
        """Return once all buckets are reduced, as the current stream sees it."""
        with record_function(END), self._beside():
            while self._under_way:
                self._move_on()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _move_on(self) -> None:
        """Wait for the collective that each bucket is in, and begin its next: the oldest bucket first."""
        for _ in range(len(self._under_way)):
            works, work = self._under_way.popleft()
            work.wait()
            self._follow(works)

    def _follow(self, works: Works) -> None:
        if (work := next(works, None)) is not None:
            self._under_way.append((works, work))

    @contextmanager
    def _beside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
