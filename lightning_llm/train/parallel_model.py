"""This rank's part of the model, with what it takes to run it: made once, and shared by the step and the validation."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.context import SequenceSharder
from lightning_llm.parallel.gradient_sync import GradientSync
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.pipeline import Pipeline
from lightning_llm.train.quantisation import Quantisation


@dataclass
class ParallelModel:
    """What forward and backward passes need under a layout. Attributes may be replaced, to observe or to disturb."""

    model: Decoder
    """This rank's part of it."""
    layout: Layout
    syncs: list[GradientSync]
    """One for each pipeline stage of this rank, or of the whole model."""
    pipeline: Pipeline | None
    sequence_sharder: SequenceSharder
    loss_sum: Callable[[Tensor, Tensor], Tensor]
    """The fp32 sum of the losses of this rank's logits [B, T, V] over labels [B, T]."""
    quantisation: Quantisation

    @property
    def copied_parameters(self) -> list[torch.nn.Parameter]:
        """Parameters of this rank that another pipeline stage holds, too, and counts."""
        return self.pipeline.copies if self.pipeline else []
