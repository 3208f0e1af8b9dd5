"""Several models that predict as one: the mean of their probabilities, or of their logits."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_llm.config.schema.model import ModelConfig

Combine = Literal["probabilities", "logits"]
COMBINATIONS: tuple[Combine, ...] = ("probabilities", "logits")


class Ensemble(nn.Module):
    """Ensemble of models. Its logits give the mean of the members' probabilities, or are the mean of their logits.

    The mean of logits gives the normalized geometric mean of probabilities.
    """

    def __init__(self, members: Sequence[nn.Module], combine: Combine):
        super().__init__()
        self.members = nn.ModuleList(members)
        self.combine = combine
        shapes: list[Any] = [member.config for member in members]
        self.config: ModelConfig = min(shapes, key=lambda shape: shape.max_sequence_length)
        self.vocab_size = self.config.vocab_size

    @classmethod
    def from_members(cls, members: Sequence[nn.Module], combine: Combine) -> nn.Module:
        """Return an ensemble of `members`, or the member itself if there is only one."""
        return members[0] if len(members) == 1 else cls(members, combine)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
        """Return logits `[B, T, V]` of real ids, fp32; see `Decoder.forward`."""
        total = None
        for count, member in enumerate(self.members):
            logits = member(tokens, positions, document_ids)[..., : self.vocab_size].float()  # [B, T, vocab_size]
            if self.combine == "logits":
                total = logits if total is None else total + (logits - total) / (count + 1)
            else:
                log_p = F.log_softmax(logits, dim=-1)  # [B, T, vocab_size]
                total = log_p if total is None else torch.logaddexp(total, log_p)
        if total is None:
            raise ValueError("an ensemble must have at least one member")
        return total if self.combine == "logits" else total - math.log(len(self.members))
