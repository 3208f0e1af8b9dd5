"""Figures of a run's curve: the tail of its validation loss, and whether it diverged or learned anything."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_llm.tracking.reading import Run

TAIL_SHARE = 0.1
"""The tail: all validations in the last tenth of the steps, at least the last one. Their unweighted mean has less noise
from step to step than the last alone; the remaining noise is part of the spread between seeds, which the intervals
measure."""
LEARNED_SHARE = 0.9
"""Share of ln(vocabulary) below which a loss must be to count as learned, if the entropy of the token frequencies is
not recorded."""
LOSS = "val_loss"
LEARNED_BELOW = "learned_below"
"""Summary key of a run of another trainer: the loss below which its log must have fallen to count as learned."""


@dataclass(frozen=True)
class Tail:
    """The validations at the end of runs over which `metric` is averaged: their `steps`, ascending.

    `metric`: its key in `metrics.jsonl`; `higher_is_better`: as for an accuracy.
    """

    metric: str
    steps: tuple[int, ...]
    higher_is_better: bool = False

    def of(self, run: Run) -> float:
        """Return the mean of the run's metric over the tail (losses: nats per token), so that lower is better.

        Not finite if the run diverged. Negative if higher is better for the metric.
        """
        return -self.level_of(run) if self.higher_is_better else self.level_of(run)

    def level_of(self, run: Run) -> float:
        """Return the mean of the run's metric over the tail, with its sign as recorded."""
        values = run.validations.get(self.metric, {})
        return math.fsum(values.get(step, math.nan) for step in self.steps) / len(self.steps)


def tail_of(runs: Sequence[Run], metric: str, share: float = TAIL_SHARE) -> Tail | None:
    """Return the tail of `runs`: the validations in the last `share` of the steps that all of them have.

    At least the last common validation; None without any. For branches `share` refers to the steps after the branching,
    because near it they hardly differ.
    """
    if not runs:
        return None
    common = set.intersection(*(set(run.validations.get(metric, {})) for run in runs))
    if not common:
        return None
    last, begun = max(common), min(run.branch_step for run in runs)
    steps = tuple(sorted(step for step in common if step == last or step > last - share * (last - begun)))
    return Tail(metric, steps, any(metric in run.higher_is_better for run in runs))


def guessing_loss(run: Run, metric: str) -> float:
    """Return ln(vocabulary), the loss of guessing, in nats; infinite for another metric or an unknown vocabulary."""
    size = run.config.get("model.vocab_size")
    return math.log(size) if isinstance(size, int) and metric.startswith(LOSS) else math.inf


def learned_below(run: Run, metric: str) -> float:
    """Return the loss, in nats, below which a run has learned something that a recipe could damage.

    The entropy of the validation tokens' frequencies, which a model without context reaches; if that was not recorded,
    or is of other tokens than the metric's, `LEARNED_SHARE` of guessing. For a run of another trainer, the beginning of
    its log less the margin.
    """
    if (logged := run.figure(LEARNED_BELOW)) is not None:
        return logged
    entropy = run.figure("validation_unigram_nats")
    below = LEARNED_SHARE * guessing_loss(run, metric)
    return min(entropy, below) if entropy is not None and metric == LOSS else below


def has_learned(run: Run, tail: Tail | None) -> bool:
    """Return whether the run's loss over the tail is below the loss that needs no context (`learned_below`)."""
    return tail is not None and not run.diverged and tail.of(run) < learned_below(run, tail.metric)


def diverged(run: Run, tail: Tail | None, *, learnable: bool) -> bool:
    """Return whether the run diverged: its loss is not finite, or finally worse than guessing.

    The latter counts only if other runs learned something (`learnable`).
    """
    if run.diverged or tail is None:
        return run.diverged
    loss = tail.of(run)
    return not math.isfinite(loss) or (learnable and loss > guessing_loss(run, tail.metric))
