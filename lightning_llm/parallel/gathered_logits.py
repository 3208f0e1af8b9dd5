"""Logits of the whole decoder for sampling, on every rank, when ranks hold parts of its weights or tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.collectives import GroupRef, gathered
from lightning_llm.parallel.cp import SequenceSharder, positions_of
from lightning_llm.parallel.layout import Layout


def window(tokens: Tensor, longest: int, multiple: int) -> tuple[Tensor, int]:
    """Return (the last tokens of `tokens` `[B, T]`, padded to a multiple of `multiple`; their number without padding).

    There are at most `longest` tokens including padding, so the first ones may be dropped. Padding follows the tokens,
    so causal attention does not see it.
    """
    tokens = tokens[:, -(longest // multiple * multiple) :]
    return F.pad(tokens, (0, -tokens.shape[1] % multiple)), tokens.shape[1]


def whole_vocabulary(logits: Tensor, layout: Layout) -> Tensor:
    """Gather `logits` `[B, T, V / R]` of R tensor-parallel ranks; return those of the whole vocabulary `[B, T, V]`."""
    group = layout.group("width")
    if group is None:
        return logits
    by_rank = gathered(logits.flatten(0, 1)[None], GroupRef.from_group(group))[0]  # [R B T, V / R]
    return torch.cat(list(by_rank.unflatten(0, (group.size(), *logits.shape[:2]))), dim=-1)


class GatheredLogits(nn.Module):
    """Logits of the whole model for any number of tokens, which are padded if all ranks must hold equally many."""

    def __init__(self, model: Decoder, layout: Layout):
        super().__init__()
        self.model, self.layout, self.config = model, layout, model.config
        chunks = 2 * layout.degrees.sequence if layout.degrees.sequence > 1 else 1
        self.multiple = chunks * model.token_shards
        self.train(model.training)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[B, 1, V]` of the last position of `tokens` `[B, T]`, the same on every rank."""
        padded, length = window(tokens, self.config.max_sequence_length, self.multiple)
        own, _, positions, _ = SequenceSharder(self.layout)(padded, padded, None)
        logits = self._at(length - 1, self.model(own, positions), padded.shape[1])  # [B, 1, V / R]
        return whole_vocabulary(logits, self.layout)

    def _at(self, position: int, logits: Tensor, length: int) -> Tensor:
        """Return `[B, 1, ..]`, the logits at `position` of `length`, from those of this rank `[B, length / C, ..]`."""
        group, ranks = self.layout.group("sequence"), self.layout.degrees.sequence
        if group is None:
            return logits[:, position : position + 1]
        held = torch.stack([positions_of(rank, ranks, length) for rank in range(ranks)])  # [C, length / C]
        holder, index = (held == position).nonzero()[0].tolist()
        return gathered(logits[:, index : index + 1], GroupRef.from_group(group))[:, holder : holder + 1]
