"""Log-probabilities of continuations, by a model that lies in this process or is shared out among ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ReduceOp

from lightning_llm.model.loss import IGNORED_LABEL
from lightning_llm.parallel.dp_shard import reshard
from lightning_llm.parallel.gathered_logits import whole_vocabulary
from lightning_llm.train.parallel_model import ParallelModel


@dataclass(frozen=True)
class Continuation:
    """`tokens` that a model may see at once, one more than it takes, of which the last `scored` are scored."""

    tokens: list[int]
    scored: int


@torch.no_grad()
def continuation_scores(
    parallel: ParallelModel, asked: Sequence[Continuation], batch_size: int, padding: int, device: torch.device
) -> list[tuple[float, bool]]:
    """Return of each the sum of its scored tokens' log-probabilities, and whether each was the likeliest.

    Batches of `batch_size` are those of one process, and dealt to the data-parallel ranks. Every rank asks for the
    same, and gets all. Collective.
    """
    layout = parallel.layout
    longest_first = sorted(range(len(asked)), key=lambda index: -len(asked[index].tokens))
    batches = [longest_first[start : start + batch_size] for start in range(0, len(asked), batch_size)]
    found = torch.zeros(len(asked), 2, dtype=torch.float64, device=device)  # log-probability; tokens not the likeliest
    for first in range(0, len(batches), layout.degrees.dp):
        own = first + layout.dp_rank
        # A rank that has no batch left takes part in gathering parameters all the same.
        batch = batches[min(own, len(batches) - 1)]
        scores = _batch_scores(parallel, [asked[index] for index in batch], padding, device)
        if scores is not None and own < len(batches):
            found[torch.tensor(batch, device=device)] = scores
    layout.reduce(found, ReduceOp.SUM, "dp", "cp", "pp")
    for sync in parallel.syncs:
        reshard(sync.model)  # forward passes without a backward leave parameters gathered
    return [(log_p, others == 0) for log_p, others in found.tolist()]


def _batch_scores(
    parallel: ParallelModel, batch: Sequence[Continuation], padding: int, device: torch.device
) -> Tensor | None:
    """Return `[B, 2]`, of this rank's tokens; None where it has no logits."""
    rows = [torch.tensor(each.tokens) for each in batch]
    tokens = nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True, padding_value=padding)  # [B, T]
    labels = torch.full_like(tokens, IGNORED_LABEL)  # [B, T]
    for row, each, its in zip(rows, batch, labels, strict=True):
        count = min(each.scored, len(row) - 1)
        its[len(row) - 1 - count : len(row) - 1] = row[len(row) - count :]
    room = -tokens.shape[1] % parallel.token_multiple
    tokens, labels = F.pad(tokens, (0, room), value=padding), F.pad(labels, (0, room), value=IGNORED_LABEL)
    sharded = parallel.sequence_sharder(tokens.to(device), labels.to(device), None)
    own, labels, positions, documents = sharded
    logits = parallel.logits(own, positions, documents)  # [B, T / C, V / R]
    if logits is None:
        return None
    scored = labels != IGNORED_LABEL  # [B, T / C], alike on ranks that share the vocabulary
    scores = torch.zeros(len(batch), 2, dtype=torch.float64, device=device)
    if not scored.any():
        return scores
    vocab_size = parallel.model.config.vocab_size
    picked = whole_vocabulary(logits[scored][None], parallel.layout)[0, :, :vocab_size].float()  # [N, vocab_size]
    counts, targets = scored.sum(-1).tolist(), labels[scored]  # [B], [N]
    for index, (its, wanted) in enumerate(zip(picked.split(counts), targets.split(counts), strict=True)):
        log_p = F.log_softmax(its, dim=-1).gather(-1, wanted[:, None])  # [count, 1]
        scores[index, 0] = log_p.sum().double()
        scores[index, 1] = (its.argmax(-1) != wanted).sum()
    return scores
