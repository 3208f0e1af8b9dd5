"""Pipeline parallelism: a rank's stages of one decoder, run by the schedules of torch.distributed.pipelining.

One call of the schedule runs all micro-batches of a step. FSDP2, gradient sums and random keys work as without a
pipeline. Every schedule here runs a stage's backward passes in the order of its micro-batches, as the tree sum of
`gradient_sync` requires.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from lightning_llm.base.errors import AgreedError, ConfigError
from lightning_llm.config.schema import DataConfig
from lightning_llm.linalg import local
from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.gathered_logits import whole_vocabulary, window
from lightning_llm.parallel.gradient_sync import GradientSync
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.pp_stage import BeginMicroBatch, GradientsSent, TrainStage, hidden_shape
from lightning_llm.plan.stages import INTERLEAVED, parts_of


def check_auxiliary_losses(model: Decoder, length: int) -> None:
    """Raise errors of auxiliary losses on every rank, instead of in one stage's first forward pass while others wait.

    `model` is whole and on the meta device: the forward pass of one block of each kind over `length` tokens computes
    nothing. Blocks that need values are left to their stage.

    Raises:
        AgreedError: a part sets an auxiliary loss that its config class does not declare.
    """
    one_of_each = {model.config.layer_name(int(index)): int(index) for index in model.layers}
    tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), torch.device("meta"):
            model.stage(sorted(one_of_each.values()), first=True, last=False)(tokens)
    except ConfigError as error:
        raise AgreedError(error.problems) from None
    except (RuntimeError, TypeError):  # what torch raises for values of a meta tensor
        return


def split_stages(model: Decoder, layout: Layout) -> list[Decoder]:
    """Return this rank's stages and remove all other modules from `model`, in place. Parameter names do not change.

    Without virtual stages the only stage is `model` itself; without a pipeline it stays whole.
    """
    if layout.degrees.pp == 1:
        return [model]
    parts = parts_of(model.config, layout.config, layout.degrees, layout.coordinates.pp)
    stages = [model.stage(part.layers, part.first, part.last) for part in parts]
    kept = [index for part in parts for index in part.layers]
    first, last = parts[0].first, parts[-1].last
    rest = model.stage(kept, first, last)
    model.embedding, model.position_embedding = rest.embedding, rest.position_embedding
    model.layers, model.norm, model.head = rest.layers, rest.norm, rest.head
    return stages if len(stages) > 1 else [model]


class Pipeline:
    """This rank's part of a pipeline: its `stages`, earliest first, and the schedule of a step's micro-batches."""

    def __init__(
        self, syncs: list[GradientSync], layout: Layout, data: DataConfig, micro_batches: int, device: torch.device
    ):
        """`syncs`: one for each stage of this rank. Collective."""
        pp, pp_rank = layout.degrees.pp, layout.coordinates.pp
        self.layout, self.data, self.device, self.micro_batches = layout, data, device, micro_batches
        self._sent = None if layout.config.schedule == "1f1b" else GradientsSent()  # 1F1B sends and receives together
        self.stages = [
            TrainStage(sync, pp_rank + chunk * pp, layout, data, device, self._sent) for chunk, sync in enumerate(syncs)
        ]
        self.has_first, self.has_last = pp_rank == 0, pp_rank == pp - 1
        self.group = layout.group("pp")
        self._next, self._previous = (pp_rank + 1) % pp, (pp_rank - 1) % pp
        self._loss_of: Callable[[Tensor, Tensor], Tensor] | None = None
        self.schedule = _schedule(layout.config.schedule, self.stages, micro_batches, self._loss)
        dist.barrier(self.group)  # NCCL needs all ranks in a group's first collective; schedules only send and receive

    def step(
        self,
        tokens: Tensor,
        labels: Tensor,
        document_ids: Tensor | None,
        begin_micro_batch: BeginMicroBatch,
        loss_of: Callable[[Tensor, Tensor], Tensor],
        loss_scale: float,
    ) -> Tensor:
        """Run forward and backward passes of A micro-batches [A, B, T]; return their losses, fp32 [A], on every rank.

        `begin_micro_batch(stage, micro_batch)` is called on each stage before the forward pass of micro-batch number
        0 .. A - 1. `loss_of(logits [B, T, V], labels [B, T])` returns a micro-batch's share of the step's loss; its
        gradient is multiplied by `loss_scale`.
        """
        for stage in self.stages:
            stage.begin_micro_batch, stage.loss_scale = begin_micro_batch, loss_scale
        self._loss_of = loss_of
        inputs = (tokens.flatten(0, 1),) if self.has_first else ()
        more = {} if document_ids is None else {"document_ids": document_ids.flatten(0, 1)}
        target = labels.flatten(0, 1) if self.has_last else None
        losses: list[Tensor] = []
        try:
            self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False, **more)
        except RuntimeError as error:  # torch wraps exceptions of a stage's forward pass
            if isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from None
            raise
        if self._sent is not None:
            self._sent.wait()
        return self._from_last(torch.stack(losses).detach() if self.has_last else None, (self.micro_batches,))

    def finish(self) -> None:
        """Add up the gradients of the two copies of a tied embedding, which the first and the last stage hold.

        Call it after each gradient is summed over micro-batches and replicas. Equal updates then keep the copies equal.
        """
        embedding = self.tied_embedding
        if embedding is None or embedding.grad is None:
            return
        mine = local(embedding.grad)
        other, peer = torch.empty_like(mine), self.layout.degrees.pp - 1 if self.has_first else 0
        exchange = [
            dist.P2POp(dist.isend, mine, group=self.group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        mine.add_(other)  # the same bits on both ranks, because a + b == b + a

    @property
    def tied_embedding(self) -> nn.Parameter | None:
        """The tied embedding on ranks with the first or last stage, else None."""
        decoder = self.stages[0 if self.has_first else -1].decoder
        if not (decoder.config.tie_embeddings and decoder.embedding is not None):
            return None
        weight: Any = decoder.embedding.weight  # torch declares it a plain tensor
        tied: nn.Parameter = weight
        return tied

    @property
    def copies(self) -> list[nn.Parameter]:
        """Parameters that another rank counts: the tied embedding of the last stage."""
        tied = self.tied_embedding
        return [tied] if tied is not None and self.has_last else []

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor | None:
        """Return the logits [B, T, V] of `tokens` [B, T] on ranks with the last stage, else None; without gradients.

        All ranks pass the same `tokens`; `positions` must be None, because stages take whole sequences. Each rank of a
        tensor-parallel group has its part of the hidden states and logits. A rank returns as soon as it has sent its
        hidden states to the next stage.
        """
        x = tokens
        with torch.no_grad():
            for stage in self.stages:
                decoder = stage.decoder
                if not stage.is_first:
                    shape = hidden_shape(decoder, tokens.shape)
                    x = torch.empty(shape, dtype=decoder.compute_dtype, device=self.device)
                    dist.recv(x, group=self.group, group_src=self._previous)
                x = decoder(x, positions, document_ids)
                if not stage.is_last:
                    dist.send(x.contiguous(), group=self.group, group_dst=self._next)
        return x if self.has_last else None

    def last_logits(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, 1, V] of the last position of `tokens` [B, T], on every rank, for sampling."""
        decoder = self.stages[0].decoder
        padded, length = window(tokens, decoder.config.max_sequence_length, decoder.token_shards)
        logits = self.forward(padded)
        shape = len(tokens), 1, decoder.config.padded_vocab_size // self.layout.degrees.width
        last = self._from_last(None if logits is None else logits[:, length - 1 : length], shape, decoder.compute_dtype)
        return whole_vocabulary(last, self.layout)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self._loss_of is None:
            raise RuntimeError("a schedule computes losses only within a step")
        return self._loss_of(logits, labels)

    def _from_last(self, value: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the last stage's `value` on every rank."""
        sent = torch.empty(shape, dtype=dtype, device=self.device) if value is None else value.contiguous()
        dist.broadcast(sent, group=self.group, group_src=self.layout.degrees.pp - 1)
        return sent


class PipelinedDecoder(nn.Module):
    """The whole decoder for sampling: all ranks of a pipeline call it together and get the same logits."""

    def __init__(self, pipeline: Pipeline):
        super().__init__()
        self.parts = nn.ModuleList(stage.decoder for stage in pipeline.stages)
        self.config = pipeline.stages[0].decoder.config
        self._logits = pipeline.last_logits

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [B, 1, V] of the last position of `tokens` [B, T]."""
        return self._logits(tokens)


def _schedule(name: str, stages: list[TrainStage], micro_batches: int, loss: Callable[..., Tensor]) -> Any:
    """Return torch's schedule. It does not scale gradients, because losses are already divided by the step's tokens."""
    if name == INTERLEAVED:
        several: list[Any] = list(stages)
        return ScheduleInterleaved1F1B(several, micro_batches, loss_fn=loss, scale_grads=False)
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name]
    return kind(stages[0], micro_batches, loss_fn=loss, scale_grads=False)
