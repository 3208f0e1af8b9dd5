"""Figures of a run's curve: the tail of its validation loss, and whether it diverged or learned anything."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_llm.tracking.reading import Run

TAIL_SHARE = 0.1
"""The tail: every validation in the last tenth of the steps, the last one at least. Their mean, each with equal weight,
has less of the loss's fluctuation from step to step than the last alone; how much of it is left does not matter to the
intervals, which take the spread from seed to seed as they find it."""
LEARNED_SHARE = 0.9
"""Of ln(vocabulary): what a run has to be below that has learned more than to guess, where the entropy of the tokens'
frequencies is not recorded."""
LOSS = "val_loss"


@dataclass(frozen=True)
class Tail:
    """The steps whose validations count, ascending; `metric` is their key in `metrics.jsonl`."""

    metric: str
    steps: tuple[int, ...]
    higher_is_better: bool = False

    def of(self, run: Run) -> float:
        """Return the mean of the run's losses over the tail, in nats per token; not finite where it diverged.

        Of a metric that is better the higher it is, its negative: what is less is better throughout.
        """
        return -self.level_of(run) if self.higher_is_better else self.level_of(run)

    def level_of(self, run: Run) -> float:
        """Return the mean of the metric over the tail, as it was recorded."""
        values = run.validations.get(self.metric, {})
        return math.fsum(values.get(step, math.nan) for step in self.steps) / len(self.steps)


def tail_of(runs: Sequence[Run], metric: str, share: float = TAIL_SHARE) -> Tail | None:
    """Return the tail over the validations that all of `runs` have; None where they have none in common.

    Of branches off a trunk `share` is of their own steps: near the first they have hardly begun to differ.
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
    """Return ln(vocabulary), the loss of guessing, in nats; infinite for another metric, or an unknown vocabulary."""
    size = run.config.get("model.vocab_size")
    return math.log(size) if isinstance(size, int) and metric.startswith(LOSS) else math.inf


def learned_below(run: Run, metric: str) -> float:
    """Return the loss, in nats, that a run has to be below to have learned anything that a recipe could damage.

    The entropy of the validation tokens' frequencies, which a model reaches that looks at no context; where it was not
    recorded, or is of other tokens than the metric's, `LEARNED_SHARE` of guessing.
    """
    entropy = run.figure("validation_unigram_nats")
    below = LEARNED_SHARE * guessing_loss(run, metric)
    return min(entropy, below) if entropy is not None and metric == LOSS else below


def has_learned(run: Run, tail: Tail | None) -> bool:
    """Whether the run's tail is below what takes no context to reach."""
    return tail is not None and not run.diverged and tail.of(run) < learned_below(run, tail.metric)


def diverged(run: Run, tail: Tail | None, *, learnable: bool) -> bool:
    """Whether the run lost its loss: not finite, or in the end worse than guessing where others learn (`learnable`)."""
    if run.diverged or tail is None:
        return run.diverged
    loss = tail.of(run)
    return not math.isfinite(loss) or (learnable and loss > guessing_loss(run, tail.metric))
