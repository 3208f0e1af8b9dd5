"""Teachers beside the student: what they predict of a micro-batch, and what the student's loss makes of it."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_llm.config.schema.run import DistilConfig
from lightning_llm.model.attention.kernel_choice import without_blocks
from lightning_llm.model.loss import divergence_sum

RECORD = "distil_kl"
"""In a step's record: the mean of KL(teachers || student) per target token, nats, times the temperature squared."""


@dataclass
class Distillation:
    """`teachers` is called as a decoder is; whole on each rank, so data-parallel ranks alone have one."""

    config: DistilConfig
    teachers: nn.Module
    vocab_size: int
    _divergences: list[Tensor] = field(default_factory=list, init=False)

    def begin_step(self) -> None:
        """Forget the step before."""
        self._divergences.clear()

    @torch.no_grad()
    def targets(self, tokens: Tensor, document_ids: Tensor | None) -> Tensor:
        """Return what the teachers predict of `tokens` [B, T] as logits [B, T, vocab_size], fp32."""
        with without_blocks():  # the student's blocks may be compiled, teachers' are not
            logits: Tensor = self.teachers(tokens, None, document_ids)[..., : self.vocab_size].float()
        return logits

    def loss(self, loss: Tensor, logits: Tensor, teachers: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
        """Return what the step takes the gradient of: `loss` is that of the labels, its share of the step's.

        `teachers` is what `targets` returned, `targets` the number of target tokens of the step.
        """
        divergence = divergence_sum(logits, teachers, labels, self.config.temperature) / targets
        self._divergences.append(divergence.detach())
        weight = self.config.weight
        return divergence if weight == 1 else (1 - weight) * loss + weight * divergence

    def divergences(self) -> Tensor:
        """Return the share of each micro-batch of this rank in the step's divergence, [A], fp32."""
        return torch.stack(self._divergences)
