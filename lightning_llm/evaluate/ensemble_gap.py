"""What an ensemble gains over its members, with an interval over the sequences that are scored."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor

from lightning_llm.data.corpus import Corpus
from lightning_llm.evaluate.validation import Recipes, TrainedModel
from lightning_llm.model.ensemble import COMBINATIONS, Combine
from lightning_llm.model.loss import IGNORED_LABEL

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Gap:
    """`gap` of `val_loss`, nats per token, and its interval at 95 %: below 0 where the ensemble has less.

    The interval is about these models on other text like that scored: each sequence is one draw. It says nothing of
    other members.
    """

    gap: float
    low: float
    high: float

    @classmethod
    def of(cls, differences: np.ndarray, tokens: np.ndarray) -> "Gap":
        """Return it from the sum of differences and the number of target tokens of each sequence, both [sequences].

        A ratio of sums; its variance is that of the residuals (W. G. Cochran, Sampling Techniques, 1977, section 2.11).
        """
        gap, count = differences.sum() / tokens.sum(), len(tokens)
        if count < 2:
            return cls(float(gap), -math.inf, math.inf)
        spread = math.sqrt(count / (count - 1) * ((differences - gap * tokens) ** 2).sum()) / tokens.sum()
        half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, count - 1)) * spread
        return cls(float(gap), float(gap - half), float(gap + half))


@dataclass(frozen=True)
class EnsembleGain:
    """`val_loss` of each member alone, and by combination the gap to the best of them and to their mean."""

    members: list[float]
    to_best: dict[Combine, Gap]
    to_mean: dict[Combine, Gap]

    def as_data(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> "EnsembleGain":
        """Return what `as_data` described."""
        gaps = {key: {name: Gap(**each) for name, each in data[key].items()} for key in ("to_best", "to_mean")}
        return cls(data["members"], gaps["to_best"], gaps["to_mean"])

    def lines(self) -> list[str]:
        """Return what there is to say of it."""
        best = min(self.members)
        found = ["val_loss of each alone: " + ", ".join(f"{loss:.4f}" for loss in self.members)]
        for combine, gap in self.to_best.items():
            mean = self.to_mean[combine]
            found.append(
                f"mean of {combine}: {gap.gap:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}] against the best ({best:.4f}), "
                f"{mean.gap:+.4f} [{mean.low:+.4f}, {mean.high:+.4f}] against the mean of the members"
            )
        return [*found, f"(intervals at {CONFIDENCE:.0%} over the sequences scored, not over members)"]


@torch.no_grad()
def ensemble_gain(
    models: Sequence[TrainedModel],
    corpus: Corpus,
    watched: Collection[str],
    batch_size: int,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> EnsembleGain:
    """Return what the ensemble of `models` gains on the sequences that `val_loss` is of."""
    recipes, losses, tokens = Recipes(models), [], []
    trained = torch.tensor([name not in watched for name in corpus.names])
    batches = list(corpus.validation_batches(batch_size))
    for index, batch in enumerate(batches):
        recipes.begin_validation_batch(models[0].model, models[0].step, index)
        here = batch.to(device)
        logits = [each.model(here.tokens, None, here.document_ids) for each in models]
        labels = here.labels.masked_fill(~trained.to(device)[here.sources][:, None], IGNORED_LABEL)  # [B, T]
        losses.append(_sums([each[..., : models[0].model.config.vocab_size] for each in logits], labels))
        tokens.append((labels != IGNORED_LABEL).sum(-1))
        progress(index + 1, len(batches))
    counts = torch.cat(tokens).double().cpu().numpy()  # [sequences]
    sums = torch.cat(losses, dim=1).cpu().numpy()[:, counts > 0]  # [members + combinations, sequences]
    counts = counts[counts > 0]
    members, combined = sums[: len(models)], dict(zip(COMBINATIONS, sums[len(models) :], strict=True))
    alone = members.sum(1) / counts.sum()
    best, mean = members[alone.argmin()], members.mean(0)
    return EnsembleGain(
        alone.tolist(),
        {combine: Gap.of(each - best, counts) for combine, each in combined.items()},
        {combine: Gap.of(each - mean, counts) for combine, each in combined.items()},
    )


def _sums(logits: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Return the sums over each sequence of the losses of each model and of each combination, [M + 2, B], fp64."""

    def of(each: Tensor) -> Tensor:  # [B]
        chosen = F.cross_entropy(each.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none")
        return chosen.view_as(labels)  # [B, T]

    alone = torch.stack([of(each.float()) for each in logits])  # [M, B, T]
    probabilities = math.log(len(logits)) - torch.logsumexp(-alone, dim=0)  # [B, T]
    together = of(torch.stack([each.float() for each in logits]).mean(0))
    both = torch.stack([probabilities.masked_fill(labels == IGNORED_LABEL, 0.0), together])
    return torch.cat([alone, both]).double().sum(-1)
