"""This rank's part of the model and everything needed to run it under a layout, for training step and validation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_llm.config.schema import Config, ParallelConfig
from lightning_llm.linalg import DTYPES
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.parallel.apply import Fill, InitialSlice, apply_parallel, materialise
from lightning_llm.parallel.cp import SequenceSharder
from lightning_llm.parallel.gathered_logits import GatheredLogits
from lightning_llm.parallel.gradient_sync import GradientSync
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.pp import Pipeline, PipelinedDecoder, check_auxiliary_losses
from lightning_llm.parallel.tp import loss_sum_of
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.memory.buffers import keeping_blocks
from lightning_llm.plan.memory.units import micro_batches_per_rank
from lightning_llm.train.quantization import Quantization


@dataclass
class ParallelModel:
    """This rank's part of a model, and what its forward and backward passes need under a layout.

    Tests may replace attributes.
    """

    model: Decoder
    """This rank's part of the model: all blocks, or those of its pipeline stages."""
    layout: Layout
    syncs: list[GradientSync]
    """One per pipeline stage of this rank, or one for the whole model."""
    pipeline: Pipeline | None
    """None without pipeline parallelism."""
    sequence_sharder: SequenceSharder
    loss_sum: Callable[[Tensor, Tensor], Tensor]
    """(logits [B, T, V] of this rank, labels [B, T]) -> sum of losses, fp32."""
    quantization: Quantization

    @classmethod
    def build(
        cls,
        config: Config,
        layout: Layout,
        device: torch.device,
        quantization: Quantization,
        initial: InitialSlice | None = None,
        fill: Fill = materialise,
    ) -> "ParallelModel":
        """Build this rank's part of the decoder of `config` on `device`: quantized linears, shards, initial weights.

        `initial`: source of the initial weights; None: they are drawn from the seed. `fill`: function that allocates
        and fills the parameters, which the dry run replaces. Collective.
        """
        precision, length = config.precision, config.data.sequence_length
        layout = layout.summing(config.chosen_algorithm)
        with torch.device("meta"):
            model = Decoder(config.model, compute_dtype=DTYPES[precision.compute_dtype])
        if layout.degrees.pp > 1:
            check_auxiliary_losses(model, length)
        quantization.swap(model, config.model.num_layers, device.type, layout.shards)
        syncs = apply_parallel(model, layout, precision, config.seed, length, device, initial, fill)
        micro_batches = micro_batches_per_rank(config, layout.degrees)
        native = quantization.decision.runs == "native"
        quantization.keep_weight_casts(model, keeping_blocks(config, layout.degrees, micro_batches, native))
        pipeline = None
        if layout.degrees.pp > 1:
            pipeline = Pipeline(syncs, layout, config.data, micro_batches, device)
        loss_sum = loss_sum_of(layout, device, config.model.output_z_loss or 0.0)
        return cls(model, layout, syncs, pipeline, SequenceSharder(layout), loss_sum, quantization)

    @classmethod
    def in_this_process(cls, model: Any, quantization: Any = None) -> "ParallelModel":
        """Return a `ParallelModel` of one rank without sharding; `model`: a decoder, or a function called like one."""
        layout = Layout(ParallelConfig(name="single"), Degrees())
        return cls(model, layout, [], None, SequenceSharder(layout), next_token_loss_sum, quantization)

    def logits(self, tokens: Tensor, positions: Tensor | None, document_ids: Tensor | None) -> Tensor | None:
        """Return logits [B, T, V] of this rank's `tokens` [B, T]; None on pipeline stages before the last.
        Collective."""
        forward = self.pipeline.forward if self.pipeline else self.model
        logits: Tensor | None = forward(tokens, positions, document_ids)
        return logits

    @property
    def decoders(self) -> list[Decoder]:
        """This rank's stages, or the whole model."""
        return [stage.decoder for stage in self.pipeline.stages] if self.pipeline else [self.model]

    @property
    def token_multiple(self) -> int:
        """Number that sequence lengths must be a multiple of, so that ranks can split the tokens."""
        if self.layout.mesh is None:
            return 1
        sequence = self.layout.degrees.sequence
        return (2 * sequence if sequence > 1 else 1) * self.decoders[0].token_shards

    @property
    def whole(self) -> GatheredLogits | PipelinedDecoder:
        """Callable that returns the logits of all token ids on every rank, whatever part of the decoder each holds."""
        return GatheredLogits(self.model, self.layout) if self.pipeline is None else PipelinedDecoder(self.pipeline)

    @property
    def copied_parameters(self) -> list[torch.nn.Parameter]:
        """Parameters of this rank that another pipeline stage has, too, and counts in norms: tied embeddings."""
        return self.pipeline.copies if self.pipeline else []
