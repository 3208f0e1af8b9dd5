"""Distillation: teachers' predictions for a micro-batch, and the student's loss against them."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_llm.config.schema.run import DistilConfig
from lightning_llm.model.attention.kernel_choice import without_blocks
from lightning_llm.model.loss import divergence_sum

RECORD = "distil_kl"
"""Key of a step's record: mean KL(teachers || student) per target token, in nats, times the temperature squared."""


@dataclass
class Distillation:
    """Distillation from `teachers`, called like a decoder. Each rank holds them whole, so only data parallelism
    works."""

    config: DistilConfig
    teachers: nn.Module
    vocab_size: int
    _divergences: list[Tensor] = field(default_factory=list, init=False)

    def begin_step(self) -> None:
        """Start a step."""
        self._divergences.clear()

    @torch.no_grad()
    def targets(self, tokens: Tensor, document_ids: Tensor | None) -> Tensor:
        """Return the teachers' logits for `tokens` [B, T]: [B, T, vocab_size], fp32."""
        with without_blocks():  # the student's blocks may be compiled, the teachers' are not
            logits: Tensor = self.teachers(tokens, None, document_ids)[..., : self.vocab_size].float()
        return logits

    def loss(self, loss: Tensor, logits: Tensor, teachers: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
        """Return the objective of a micro-batch. `loss`: its share of the step's cross-entropy.

        `teachers`: result of `targets`. `targets`: number of target tokens of the step.
        """
        divergence = divergence_sum(logits, teachers, labels, self.config.temperature) / targets
        self._divergences.append(divergence.detach())
        weight = self.config.weight
        return divergence if weight == 1 else (1 - weight) * loss + weight * divergence

    def divergences(self) -> Tensor:
        """Return the contribution of each micro-batch of this rank to the step's divergence, [A], fp32."""
        return torch.stack(self._divergences)
