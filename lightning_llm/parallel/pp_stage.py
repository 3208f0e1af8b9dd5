"""One pipeline stage on its rank: random keys and gradient sums around each pass, and its sends and receives.

torch's stages keep a receive buffer for every micro-batch of a step, in both directions. Its schedules GPipe and
interleaved 1F1B also keep all sent tensors until the step ends. Here a buffer is allocated when its receive is posted
and freed after the pass that uses it; a sent tensor is freed as soon as it is known to have arrived.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from lightning_llm.config.schema import DataConfig
from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.gradient_sync import GradientSync
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.torch_private import check_overridden, private

BeginMicroBatch = Callable[[nn.Module, int], None]
META = torch.device("meta")


class Sent:
    """Sends in progress. Their works keep the sent tensors alive until the tensors have arrived."""

    def __init__(self, posted: list[dist.P2POp]):
        """Send `posted` with the same torch function as the schedules' receives, so that NCCL uses one communicator."""
        self._works: list[dist.Work] = private(schedules, "_batch_p2p")(posted)

    def wait(self) -> None:
        """Wait until all sent tensors have arrived, and free them."""
        for work in self._works:
            work.wait()
        self._works = []


class GradientsSent:
    """The gradients that a rank is sending back, from any of its stages, for one micro-batch at a time.

    Waiting for them before the next send cannot deadlock: torch orders the actions of all ranks globally, and a receive
    is posted as soon as its send is, without waiting. Later actions may wait for both.
    """

    def __init__(self) -> None:
        self._last: Sent | None = None

    def wait(self) -> None:
        """Wait until the gradients sent last have arrived."""
        if self._last is not None:
            self._last.wait()
            self._last = None

    def send(self, posted: list[dist.P2POp]) -> None:
        """Send the next gradients, once the previous ones have arrived."""
        self.wait()
        self._last = Sent(posted)


class _Plain(nn.Module):
    """Wrapper that hides an FSDPModule from torch's stages.

    They would otherwise set FSDP2's switches and reduce once per step under every ZeRO stage.
    """

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Return hidden states [B, T, D] or logits [B, T, V] of tokens [B, T] or hidden states [B, T, D]."""
        hidden: Tensor = self.decoder(x, document_ids=document_ids)
        return hidden


class TrainStage(PipelineStage):
    """A stage that sets random keys before each forward pass and sums gradients around each backward pass.

    Shapes are given, so that torch runs no extra passes to infer them. Extra passes would affect the amaxes of delayed
    scaling and the loss.
    """

    begin_micro_batch: BeginMicroBatch
    loss_scale = 1.0

    def __init__(
        self,
        sync: GradientSync,
        index: int,
        layout: Layout,
        data: DataConfig,
        device: torch.device,
        sent: GradientsSent | None,
    ):
        """`sent`: shared by the stages of the rank; None if the schedule itself sends, as 1F1B does."""
        _check_torch()
        self.decoder, self.sync = sync.model, sync
        self._gradients_sent, self._outputs_sent = sent, dict[int, Sent]()
        size = data.micro_batch_size, data.sequence_length
        config, dtype = self.decoder.config, self.decoder.compute_dtype
        hidden = torch.empty(*hidden_shape(self.decoder, size), dtype=dtype, device=META, requires_grad=True)
        logits = torch.empty(
            *size, config.padded_vocab_size // layout.degrees.width, dtype=dtype, device=META, requires_grad=True
        )
        tokens = torch.empty(*size, dtype=torch.int64, device=META)
        count = layout.degrees.pp * layout.config.virtual_stages
        super().__init__(
            _Plain(self.decoder),
            index,
            count,
            device,
            input_args=tokens if index == 0 else hidden,
            output_args=logits if index == count - 1 else hidden,
            group=layout.group("pp"),
        )

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        self.begin_micro_batch(self.decoder, fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        _make_buffers(self.args_recv_info[fwd_chunk_id], META)  # the stage keeps the input until its backward pass
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not full_backward:
            raise NotImplementedError("zero-bubble schedules would run a custom autograd function's backward twice")
        if output := self._outputs_sent.pop(bwd_chunk_id, None):
            output.wait()  # returns at once: its gradient has come back, so it has arrived
        self.sync.before_backward(bwd_chunk_id, last_backward)
        scaled = None if loss is None else loss * self.loss_scale
        super().backward_one_chunk(bwd_chunk_id, scaled, full_backward, last_backward)
        _make_buffers(self.grad_recv_info[bwd_chunk_id], META)
        self.sync.after_backward(bwd_chunk_id, last_backward)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        _make_buffers(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        _make_buffers(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        posted = super().get_fwd_send_ops(fwd_chunk_id)
        if self._gradients_sent is None or not posted:
            return posted
        self._outputs_sent[fwd_chunk_id] = Sent(posted)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        posted = super().get_bwd_send_ops(bwd_chunk_id)
        if self._gradients_sent is None or not posted:
            return posted
        self._gradients_sent.send(posted)
        return []

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._making_none():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._making_none():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _making_none(self) -> Iterator[None]:
        """Make torch allocate its buffers on the meta device, without memory."""
        device, self.device = self.device, META
        try:
            yield
        finally:
            self.device = device


def hidden_shape(decoder: Decoder, tokens: Sequence[int]) -> tuple[int, int, int]:
    """Return the shape of the hidden states sent to the next stage for tokens of shape `tokens`, (B, T).

    With sequence parallelism it is the shape of this rank's part.
    """
    return tokens[0], tokens[1] // decoder.token_shards, decoder.config.hidden_size


def _make_buffers(received: tuple[Any, ...], device: torch.device) -> None:
    """Replace the buffers of one micro-batch by new ones on `device`; META frees the received tensors."""
    for each in received:
        buffer: Tensor | None = getattr(each, "buffer", None)  # tokens have none
        if buffer is not None:
            each.buffer = torch.empty_like(buffer, device=device, requires_grad=buffer.requires_grad)


def _check_torch() -> None:
    for method in ("forward_one_chunk", "backward_one_chunk", "get_fwd_recv_ops", "get_bwd_recv_ops"):
        check_overridden(TrainStage, method)
    for method in ("get_fwd_send_ops", "get_bwd_send_ops"):
        check_overridden(TrainStage, method)
    for method in ("_prepare_forward_infra", "_prepare_backward_infra"):
        private(PipelineStage, method)
    private(schedules, "_batch_p2p")
