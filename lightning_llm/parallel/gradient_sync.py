"""Gradient reduction: the gradients of a step's micro-batches become one sum on every rank that needs it.

Gradients that FSDP2 does not sum are reduced in buckets that overlap with the backward pass. A bucket starts as soon as
its last gradient is ready and goes through a few consecutive collectives. When a bucket starts, every bucket in
progress advances to its next collective. So all ranks issue collectives in the same order, and few buckets are in
memory at a time. Buckets follow the order of the backward pass (Li et al. 2020, arXiv 2006.15704, section 3.2.3).
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function

from lightning_llm.linalg import local
from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.axis import AxisOnRanks, Reduction, Works, axes_on_ranks
from lightning_llm.parallel.dp_shard import sharded_modules
from lightning_llm.parallel.ep import close_sums, divided_experts
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.tree import TreeReduceScatter, TreeSum
from lightning_llm.plan.memory.buffers import REPLICA_BUCKET_BYTES
from lightning_llm.plan.memory.units import reduces_once, sums_senders_apart

BEGIN, END = "BucketReductions.begin", "BucketReductions.end"
"""Names of the two phases in a profiler trace."""


class Bucket:
    """Parameters with gradients that are summed over micro-batches and reduced together."""

    def __init__(self, parameters: Sequence[nn.Parameter], reductions: Sequence[Reduction], multiple: int):
        """`reductions`: applied in turn; empty if no other rank shares the gradients.

        `multiple`: the number of elements they take must be a multiple of this.
        """
        self.parameters, self.reductions, self.multiple = parameters, reductions, multiple
        self.sums = TreeSum()
        self.awaited: set[int] = set()
        """Ids of the parameters still without a gradient in the backward pass in progress."""

    def gradients(self) -> list[Tensor]:
        """Return this rank's shard of the gradient of each parameter that has one."""
        return [local(parameter.grad) for parameter in self.parameters if parameter.grad is not None]

    def push(self) -> None:
        """Move the gradients, which are the sum of two micro-batches, into the tree sum; `.grad` becomes None."""
        if gradients := self.gradients():
            self.sums.push(gradients, level=1)
            for parameter in self.parameters:
                parameter.grad = None

    def close(self) -> None:
        """Add the tree sum of earlier micro-batches to `.grad`, the gradients of the step's last micro-batch."""
        if gradients := self.gradients():
            self.sums.close(gradients)

    def reduced(self) -> Works:
        """Replace the gradients by their reduction over ranks, if there are any; yields each collective."""
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
    """Return `parameters` in buckets. Parameters and buckets are in the order in which a backward pass finishes them.

    The parameters of a bucket have the same dtype and the same `reductions_of`.
    """
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    alike: dict[object, list[list[nn.Parameter]]] = {}
    for parameter in parameters:
        shares = alike.setdefault((parameter.dtype, tuple(reductions_of(parameter))), [[]])
        if shares[-1] and sum(map(_bytes, shares[-1])) + _bytes(parameter) > REPLICA_BUCKET_BYTES:
            shares.append([])
        shares[-1].append(parameter)
    filled = [share for shares in alike.values() for share in shares]
    filled.sort(key=lambda share: places[id(share[-1])])  # by the time of the last gradient
    return [Bucket(share, reductions_of(share[0]), multiple) for share in filled]


def _bytes(parameter: nn.Parameter) -> int:
    return local(parameter).nbytes


class BucketReductions:
    """The bucket reductions in progress; on CUDA on a separate stream, so that computation does not wait for them."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[Works, dist.Work]] = deque()
        self._stream: torch.cuda.Stream | None = None

    def begin(self, bucket: Bucket) -> None:
        """Begin to reduce `bucket`, after the current stream has computed its gradients; do not use them before `end`.

        Collective, like `end`: all ranks call it with the same buckets in the same order.
        """
        if self._stream is None and bucket.parameters[0].is_cuda:
            self._stream = torch.cuda.Stream(priority=-1)
        bucket.close()
        with record_function(BEGIN), self._beside():
            self._move_on()
            self._follow(bucket.reduced())

    def end(self) -> None:
        """Make the current stream wait until all buckets are reduced."""
        with record_function(END), self._beside():
            while self._under_way:
                self._move_on()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _move_on(self) -> None:
        """Wait for the current collective of each bucket and begin its next one, oldest bucket first."""
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


class GradientSync:
    """Gradient reduction around each backward pass of a step: sets FSDP2's switches and sums the remaining gradients.

    One per pipeline stage of the rank: `model` is the stage, or the whole model without a pipeline.
    """

    def __init__(self, model: Decoder, layout: Layout, scatters: list[TreeReduceScatter]):
        """`scatters`: the result of `shard_decoder`, empty if nothing is sharded."""
        self.model = model
        self.parameters = list(model.parameters())
        self.layout = layout
        self.scatters = scatters
        self.root: FSDPModule | None = model if isinstance(model, FSDPModule) else None
        # ZeRO-1 reduces once per step; otherwise .grad is a (shard of a) sum after every backward pass.
        self.once = reduces_once(layout.config, layout.degrees)
        axes = axes_on_ranks(layout)
        multiple = math.prod(axis.multiple for axis in axes)
        self._experts = divided_experts(model)
        self._sums_senders_apart = sums_senders_apart(layout.config, layout.degrees)
        self._buckets = buckets_of(_backward_order(model), reductions_over_ranks(model, axes), multiple)
        self._reducing, self._waiting = BucketReductions(), deque[Bucket]()
        """Buckets that the step's last backward pass has not started to reduce yet."""
        for bucket in self._buckets:
            if bucket.reductions:
                for parameter in bucket.parameters:
                    parameter.register_post_accumulate_grad_hook(partial(self._take, bucket))

    def before_backward(self, micro_batch: int, last: bool) -> None:
        """Prepare the backward pass of this rank's micro-batch `micro_batch`, from 0, in order; `last`: of the step."""
        close_sums(self._experts, last or not self._sums_senders_apart)
        if last:
            self._waiting = deque(bucket for bucket in self._buckets if bucket.reductions)
            for bucket in self._waiting:
                bucket.awaited = {id(parameter) for parameter in bucket.parameters}
        if self.root is None:
            return
        # FSDP2 reduces on a separate stream and waits for it at the end of a backward pass that is marked as the last.
        read_next = self.layout.tree and not self.once and micro_batch % 2 == 1  # by `after_backward`
        self.root.set_is_last_backward(last or read_next)
        if self.layout.config.zero_stage < 3:
            self.root.set_reshard_after_backward(last)  # gathered parameters are kept until the step ends
        if self.once:
            hold = self.layout.tree and micro_batch % 2 == 1 and not last
            self.root.set_requires_gradient_sync(last or hold)
            for scatter in self.scatters:
                scatter.hold = hold
        elif not self.layout.tree:
            self.root.set_requires_all_reduce(last)

    def after_backward(self, micro_batch: int, last: bool) -> None:
        """Leave the gradients of micro-batch `micro_batch` in `.grad`, or move them into the tree sum."""
        if last:
            while self._waiting:  # some parameters got no gradient
                self._reducing.begin(self._waiting.popleft())
            for bucket in self._buckets:
                bucket.awaited.clear()
                if not bucket.reductions:
                    bucket.close()
        elif not self.layout.tree:
            return
        elif self.once:
            self._drop()  # zeros: the scatter holds the sum back
        elif micro_batch % 2 == 1:  # autograd has added this micro-batch to the even one before it: a node of two
            for bucket in self._buckets:
                bucket.push()

    def finish(self) -> None:
        """Wait until gradients are summed over ranks; shards then hold the gradient of all micro-batches.

        Collective. The reductions were started during the step's last backward pass, bucket by bucket.
        """
        self._reducing.end()

    def _take(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        """Begin the buckets that have all their gradients, in the same order on all ranks: none overtakes another."""
        if id(parameter) in bucket.awaited:
            bucket.awaited.remove(id(parameter))
            while self._waiting and not self._waiting[0].awaited:
                self._reducing.begin(self._waiting.popleft())

    def _drop(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _backward_order(model: Decoder) -> list[nn.Parameter]:
    """Return trained parameters in the order of a backward pass: last first, those of FSDP2's root at the end."""
    groups: list[Any] = [each for each in sharded_modules(model) if each is not model]
    inner = {id(parameter) for group in groups for parameter in group.parameters()}
    ended = [parameter for parameter in model.parameters() if parameter.requires_grad][::-1]
    return sorted(ended, key=lambda parameter: id(parameter) not in inner)


def reductions_over_ranks(model: Decoder, axes: Sequence[AxisOnRanks]) -> Callable[[nn.Parameter], Sequence[Reduction]]:
    """Return a function: parameter -> reductions of its gradient, to apply in order. FSDP2's own sums are excluded.

    `axes`: innermost first, so that the sum over replicas comes last.
    """
    each = [axis.reductions(model) for axis in axes]
    return lambda parameter: tuple(reduction for of_axis in each for reduction in of_axis(parameter))
