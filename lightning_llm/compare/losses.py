"""What a pair's curves come to: the tail of the validation loss, and how soon the baseline's final loss is reached."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any

from lightning_llm.compare.differences import LAYOUT, all_differences
from lightning_llm.compare.pairing import Pair
from lightning_llm.compare.reading import Run
from lightning_llm.identity import below

TAIL_SHARE = 0.1
"""The tail: every validation in the last tenth of the steps, the last one at least. Their mean, each with equal weight,
has less of the loss's fluctuation from step to step than the last alone; how much of it is left does not matter to the
intervals, which take the spread from seed to seed as they find it."""

SPEED_KEYS = (
    *LAYOUT,
    "parallel.compile",
    "precision.casts",
    "precision.backend",
    "data.micro_batch_size",
    "data.num_workers",
    "trainer.threads",
    "threads",
    "device",
    "backend",
    "checkpoint.every_steps",
    "callbacks.",
)


@dataclass(frozen=True)
class Tail:
    """The steps whose validations count, ascending; `metric` is their key in `metrics.jsonl`."""

    metric: str
    steps: tuple[int, ...]

    def of(self, run: Run) -> float:
        """Return the mean of the run's losses over the tail, in nats per token; not finite where it diverged."""
        losses = run.validations.get(self.metric, {})
        return math.fsum(losses.get(step, math.nan) for step in self.steps) / len(self.steps)


def tail_of(runs: Sequence[Run], metric: str, share: float = TAIL_SHARE) -> Tail | None:
    """Return the tail over the validations that all of `runs` have; None where they have none in common."""
    common = set.intersection(*(set(run.validations.get(metric, {})) for run in runs))
    if not common:
        return None
    last = max(common)
    return Tail(metric, tuple(sorted(step for step in common if step == last or step > (1 - share) * last)))


def diverged(run: Run, tail: Tail | None, baseline: Run | None = None) -> bool:
    """Whether the run lost its loss: not finite, or in the end worse than guessing, where the baseline is not."""
    if run.lost_its_loss or tail is None:
        return run.lost_its_loss
    guessing = run.config.get("model.vocab_size")
    limit = math.log(guessing) if isinstance(guessing, int) else math.inf
    loss, other = tail.of(run), -math.inf if baseline is None else tail.of(baseline)
    return not math.isfinite(loss) or loss > limit >= other


def time_to_loss(pair: Pair, tail: Tail) -> dict[str, float] | None:
    """Return when the run's validation loss first was the baseline's last one; None where it never was.

    `seconds` of training (validations left out) and `tokens`, straight lines between validations, and the ratio of each
    to the baseline's own. Validations that are not finite are passed over. The run may have gone on for longer than the
    baseline. None, too, where the records of one of the two do not begin at the first step.
    """
    if pair.run.first_step > 1 or pair.baseline.first_step > 1:
        return None
    last = tail.steps[-1]
    target = pair.baseline.validations[tail.metric][last]
    losses = {step: loss for step, loss in pair.run.validations[tail.metric].items() if math.isfinite(loss)}
    before: int | None = None
    for step in sorted(losses):
        if losses[step] <= target:
            break
        before = step
    else:
        return None
    share = 1.0 if before is None else (losses[before] - target) / (losses[before] - losses[step])
    found = {}
    for key, theirs, base in (
        ("seconds", pair.run.train_seconds, pair.baseline.train_seconds),
        ("tokens", pair.run.tokens, pair.baseline.tokens),
    ):
        start = theirs[step] if before is None else theirs[before]
        found[key] = start + share * (theirs[step] - start)
        if base[last]:
            found[f"{key}_ratio"] = found[key] / base[last]
    return found


def cost_of(pairs: Sequence[Pair], tail: Tail | None) -> dict[str, Any]:
    """Return what the recipe costs beside the baseline, time, speed and memory, and what went wrong on the way.

    Ratios are the recipe's over the baseline's, geometric means over pairs; `time_to_loss` has medians over the pairs
    that got there, `reached` of them.
    """
    times = [found for pair in pairs if tail and (found := time_to_loss(pair, tail))]
    keys = sorted({key for each in times for key in each})
    speeds = _ratios(pairs, "tokens_per_second_median")
    peaks = [run.peak_memory_bytes for run in (pair.run for pair in pairs) if run.peak_memory_bytes]
    base = [run.peak_memory_bytes for run in (pair.baseline for pair in pairs) if run.peak_memory_bytes]
    seconds = [value for pair in pairs if (value := pair.run.figure("tokens_per_second_median"))]
    return {
        "time_to_loss": {
            "reached": len(times),
            **{key: median(each[key] for each in times if key in each) for key in keys},
        },
        "tokens_per_second": median(seconds) if seconds else None,
        "tokens_per_second_ratio": geometric_mean(speeds) if speeds else None,
        "peak_memory_bytes": max(peaks, default=None),
        "peak_memory_ratio": max(peaks) / max(base) if peaks and base else None,
        "skipped_steps": sum(pair.run.skipped_steps for pair in pairs),
        "spikes": sum(pair.run.spikes for pair in pairs),
        "speed_confounders": sorted(
            {key for pair in pairs for key in all_differences(pair.baseline, pair.run) if below(key, SPEED_KEYS)}
            | {key for pair in pairs for key in _other_surroundings(pair)}
        ),
    }


def _other_surroundings(pair: Pair) -> set[str]:
    """Return what differs in where the two ran: speed depends on it, the loss does not."""
    hosts = {run.summary.get("host") for run in (pair.run, pair.baseline)}
    found = {"host"} if len(hosts) > 1 else set()
    return found | ({"launcher.at_once"} if pair.run.at_once != pair.baseline.at_once else set())


def _ratios(pairs: Sequence[Pair], key: str) -> list[float]:
    both = [(pair.run.figure(key), pair.baseline.figure(key)) for pair in pairs]
    return [ours / theirs for ours, theirs in both if ours and theirs]
