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
    """Distillation objective of the training step: teachers' logits, and the student's loss against them.

    Each rank has whole teachers, so it works with data parallelism only.
    """

    config: DistilConfig
    teachers: nn.Module
    """One teacher or an `Ensemble`, called like a `Decoder`."""
    vocab_size: int
    """Number of token ids that are compared, without padding."""
    _divergences: list[Tensor] = field(default_factory=list, init=False)

    def begin_step(self) -> None:
        """Forget the divergences of the previous step."""
        self._divergences.clear()

    @torch.no_grad()
    def targets(self, tokens: Tensor, document_ids: Tensor | None) -> Tensor:
        """Return the teachers' logits for `tokens` [B, T]: [B, T, vocab_size], fp32."""
        with without_blocks():  # the student's blocks may be compiled, the teachers' are not
            logits: Tensor = self.teachers(tokens, None, document_ids)[..., : self.vocab_size].float()
        return logits

    def loss(self, loss: Tensor, logits: Tensor, teachers: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
        """Return the objective of a micro-batch: the weighted sum of its cross-entropy and its divergence from
        teachers.

        Args:
            loss: cross-entropy of the micro-batch, divided by the step's number of target tokens.
            logits: the student's, [B, T, V].
            teachers: the teachers', the result of `targets`.
            labels: [B, T].
            targets: number of target tokens of the step.
        """
        divergence = divergence_sum(logits, teachers, labels, self.config.temperature) / targets
        self._divergences.append(divergence.detach())
        weight = self.config.weight
        return divergence if weight == 1 else (1 - weight) * loss + weight * divergence

    def divergences(self) -> Tensor:
        """Return each micro-batch's share of the step's divergence, fp32 [micro-batches of this rank]."""
        return torch.stack(self._divergences)
