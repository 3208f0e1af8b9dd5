"""Gradient reduction: the gradients of a step's micro-batches become one sum on every rank that needs it."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.tensor import is_tp_shard
from lightning_llm.parallel.tree import TreeReduceScatter, TreeSum, tree_all_reduce_
from lightning_llm.plan.buffers import REPLICA_BUCKET_BYTES
from lightning_llm.plan.units import reduces_once


class GradientSync:
    """Around each backward pass of one step. What FSDP2 reduces by itself it is told here; the rest is summed here.

    One for each pipeline stage of the rank: `model` is the stage, or the whole model where there is no pipeline.
    """

    def __init__(self, model: Decoder, layout: Layout, scatters: list[TreeReduceScatter]):
        """`scatters`: what `shard_decoder` returned, empty where nothing is sharded."""
        self.model = model
        self.parameters = list(model.parameters())
        roles = model.roles()
        self._roles = {id(p): roles[name.rpartition(".")[0]] for name, p in model.named_parameters()}
        self.layout = layout
        self.scatters = scatters
        self.root: FSDPModule | None = model if isinstance(model, FSDPModule) else None
        # ZeRO-1 reduces once per step; everywhere else .grad holds a (shard of a) sum after every backward.
        self.once = reduces_once(layout.config, layout.degrees)
        self._sum = TreeSum()

    def before_backward(self, micro_batch: int, last: bool) -> None:
        """Set up for the backward pass of the rank's micro-batch number `micro_batch`, from 0; they come in order."""
        if self.root is None:
            return
        # FSDP2 reduces on a stream of its own, and waits for it at the end of a backward pass it takes for the last.
        read_next = self.layout.tree and not self.once and micro_batch % 2 == 1  # by `after_backward`
        self.root.set_is_last_backward(last or read_next)
        if self.layout.config.zero_stage < 3:
            self.root.set_reshard_after_backward(last)  # what is gathered stays so until the step ends
        if self.once:
            hold = self.layout.tree and micro_batch % 2 == 1 and not last
            self.root.set_requires_gradient_sync(last or hold)
            for scatter in self.scatters:
                scatter.hold = hold
        elif not self.layout.tree:
            self.root.set_requires_all_reduce(last)

    def after_backward(self, micro_batch: int, last: bool) -> None:
        """Keep or sum what the backward pass of micro-batch `micro_batch` left in `.grad`."""
        if not self.layout.tree or (self.once and last):
            return
        if self.once:
            self._drop()  # zeros: the scatter holds the sum back
        elif last:
            self._sum.close(self._gradients())
        elif micro_batch % 2 == 1:  # autograd has added this micro-batch to the even one before it: a node of two
            self._sum.push(self._gradients(), level=1)
            self._drop()

    def finish(self) -> None:
        """Sum over replicas, after the last backward of the step; shards then hold the gradient of all micro-batches.

        FSDP2 does so itself, within the backward pass, where parallel.reduction is native. Ranks that share a sequence
        have each a part of every gradient, which FSDP2 has summed where it shards; those of a tensor-parallel group
        have a part of what they all hold whole, where each saw its own tokens or heads. Where each saw all, they take
        the first's: kernels that sum in no fixed order would let the copies drift apart.
        """
        layout = self.layout
        if (group := layout.group("tp")) is not None:
            whole = [parameter for parameter in self.parameters if not is_tp_shard(parameter)]
            partial_roles = {"per_head", "replicate", "row"} if layout.config.sequence_parallel else {"per_head"}
            parts = [p for p in whole if self._roles[id(p)] in partial_roles]
            alike = [p for p in whole if self._roles[id(p)] not in partial_roles]
            _reduce_buckets(self._gradients(parts), partial(dist.all_reduce, group=group))
            _reduce_buckets(self._gradients(alike), partial(dist.broadcast, group=group, group_src=0))
        if not layout.shards and (group := layout.group("cp")) is not None:
            _reduce_buckets(self._gradients(), partial(dist.all_reduce, group=group))
        if layout.tree and (group := layout.group("dp_replicate")) is not None:
            _reduce_buckets(self._gradients(), partial(tree_all_reduce_, group=group))

    def _gradients(self, parameters: list[nn.Parameter] | None = None) -> list[Tensor]:
        among = self.parameters if parameters is None else parameters
        return [local(parameter.grad) for parameter in among if parameter.grad is not None]

    def _drop(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that lies on this rank: a view of a DTensor's shard, a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _reduce_buckets(gradients: list[Tensor], reduce: Callable[[Tensor], Any]) -> None:
    """Replace `gradients` by what ranks agree on; `reduce` takes a flat tensor to it (mostly a sum), in place."""
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        reduce(flat)
        parts = flat.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(bucket, [part.view_as(old) for part, old in zip(parts, bucket, strict=True)])


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > REPLICA_BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
