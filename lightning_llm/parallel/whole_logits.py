"""The whole decoder as sampling sees it, on every rank at once, where each holds a part of its weights or tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.collectives import gathered
from lightning_llm.parallel.context import SequenceCut, positions_of
from lightning_llm.parallel.layout import Layout


def whole_vocabulary(logits: Tensor, layout: Layout) -> Tensor:
    """Return `[B, T, V]`, the logits of every rank's token ids, from this rank's `[B, T, V / R]`."""
    group = layout.group("tp")
    if group is None:
        return logits
    by_rank = gathered(logits.flatten(0, 1)[None], group)[0]  # [R B T, V / R]
    return torch.cat(list(by_rank.unflatten(0, (group.size(), *logits.shape[:2]))), dim=-1)


class WholeLogits(nn.Module):
    """Gives the logits of any number of tokens: they are padded, where ranks must have equally many."""

    def __init__(self, model: Decoder, layout: Layout):
        super().__init__()
        self.model, self.layout, self.config = model, layout, model.config
        chunks = 2 * layout.degrees.cp if layout.degrees.cp > 1 else 1
        self.multiple = chunks * model.token_shards
        self.train(model.training)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[B, T, V]` of `tokens` `[B, T]`, the same on every rank; what pads them comes last.

        The longest window is a multiple of what ranks share out: of more tokens, the first are left out, so the result
        may have fewer than T.
        """
        longest = self.config.max_sequence_length // self.multiple * self.multiple
        tokens = tokens[:, -longest:]
        length = tokens.shape[1]
        padded = F.pad(tokens, (0, -length % self.multiple))  # causal attention does not look at what comes last
        own, _, positions, _ = SequenceCut(self.layout)(padded, padded, None)
        logits = whole_vocabulary(self.model(own, positions), self.layout)  # [B, T / R, V]
        group, ranks = self.layout.group("cp"), self.layout.degrees.cp
        if group is not None:
            order = torch.cat([positions_of(place, ranks, padded.shape[1]) for place in range(ranks)])
            logits = gathered(logits, group)[:, order.argsort().to(logits.device)]
        return logits[:, :length]
