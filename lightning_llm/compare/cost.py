"""Cost of a recipe relative to the baseline: time to a loss, speed, memory, spikes and skipped steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any

from lightning_llm.compare.runs.differences import LAYOUT, all_differences
from lightning_llm.compare.runs.losses import LOSS, Tail
from lightning_llm.compare.runs.pairing import Pair
from lightning_llm.config.config_hash import below
from lightning_llm.tracking.reading import Run

SPEED_KEYS = (
    *LAYOUT,
    "compiled",
    "precision.casts",
    "precision.backend",
    "precision.parameter_gather",
    "precision.keep_weight_casts",
    "data.micro_batch_size",
    "data.num_workers",
    "trainer.threads",
    "trainer.attention_kernel",
    "threads",
    "device",
    "backend",
    "checkpoint.every_steps",
    "checkpoint.asynchronous",
    "callbacks.",
)


@dataclass(frozen=True)
class TimeToLoss:
    """Time to a loss: `tokens` seen and `seconds` of training, of one run or as ratios of two runs."""

    tokens: float
    seconds: float


@dataclass(frozen=True)
class Cost:
    """Cost of one recipe relative to the baseline. Ratios are recipe over baseline; None if not known.

    `tokens_to_loss_ratio`, `seconds_to_loss_ratio`: time to a loss that both runs reached (`time_ratio`), geometric
    means over `timed_pairs` pairs; `tokens_per_second`: median over the recipe's runs; `skipped_steps`, `spikes`: sums
    over its runs; `speed_confounders`: keys whose differences make speed and memory incomparable.
    """

    timed_pairs: int
    tokens_to_loss_ratio: float | None
    seconds_to_loss_ratio: float | None
    tokens_per_second: float | None
    tokens_per_second_ratio: float | None
    peak_memory_bytes: float | None
    peak_memory_ratio: float | None
    skipped_steps: int
    spikes: int
    speed_confounders: tuple[str, ...]

    def as_data(self) -> dict[str, Any]:
        """Return the cost entries of a verdict in `compare.json`."""
        return {
            "time_to_loss": {
                "pairs": self.timed_pairs,
                "tokens_ratio": self.tokens_to_loss_ratio,
                "seconds_ratio": self.seconds_to_loss_ratio,
            },
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_ratio": self.tokens_per_second_ratio,
            "peak_memory_bytes": self.peak_memory_bytes,
            "peak_memory_ratio": self.peak_memory_ratio,
            "skipped_steps": self.skipped_steps,
            "spikes": self.spikes,
            "speed_confounders": list(self.speed_confounders),
        }


def cost_of(pairs: Sequence[Pair], tail: Tail | None) -> Cost:
    """Return the cost of a recipe from its `pairs` without failed runs; `tail` names the metric of times to a loss."""
    ratios = [found for pair in pairs if tail and (found := time_ratio(pair, tail.metric))]
    speeds = _ratios(pairs, "tokens_per_second_median")
    peaks = [run.peak_memory_bytes for run in (pair.run for pair in pairs) if run.peak_memory_bytes]
    base = [run.peak_memory_bytes for run in (pair.baseline for pair in pairs) if run.peak_memory_bytes]
    rates = [value for pair in pairs if (value := pair.run.figure("tokens_per_second_median"))]
    return Cost(
        timed_pairs=len(ratios),
        tokens_to_loss_ratio=_mean_ratio([each.tokens for each in ratios]),
        seconds_to_loss_ratio=_mean_ratio([each.seconds for each in ratios]),
        tokens_per_second=median(rates) if rates else None,
        tokens_per_second_ratio=geometric_mean(speeds) if speeds else None,
        peak_memory_bytes=max(peaks, default=None),
        peak_memory_ratio=max(peaks) / max(base) if peaks and base else None,
        skipped_steps=sum(pair.run.skipped_steps for pair in pairs),
        spikes=sum(pair.run.spikes for pair in pairs),
        speed_confounders=tuple(
            sorted(
                {key for pair in pairs for key in all_differences(pair.baseline, pair.run) if below(key, SPEED_KEYS)}
                | {key for pair in pairs for key in _other_surroundings(pair)}
            )
        ),
    )


def time_ratio(pair: Pair, metric: str) -> TimeToLoss | None:
    """Return the run's time over the baseline's to the lowest loss that both reached.

    This target, the higher of the two lowest losses, is symmetric: no pair is left out because one run never reached
    it, and if the two differ in noise alone the ratio is as often above 1 as below. (With the baseline's last loss as
    target it would be below 1 even without a difference, because runs that would arrive late do not arrive at all.)
    None if a run's records do not begin at the first step or contain no finite loss, and for metrics evaluated at
    chosen steps.
    """
    if not metric.startswith(LOSS) or pair.run.first_step > 1 or pair.baseline.first_step > 1:
        return None
    curves = [_finite(run.validations.get(metric, {})) for run in (pair.run, pair.baseline)]
    if not all(curves):
        return None
    target = max(min(curve.values()) for curve in curves)
    ours, theirs = _first_at(pair.run, curves[0], target), _first_at(pair.baseline, curves[1], target)
    return TimeToLoss(
        tokens=ours.tokens / theirs.tokens if theirs.tokens else math.nan,
        seconds=ours.seconds / theirs.seconds if theirs.seconds else math.nan,
    )


def _first_at(run: Run, losses: dict[int, float], target: float) -> TimeToLoss:
    """Return when the run first reached `target`, interpolated linearly between validations of `losses`."""
    before: int | None = None
    for step in sorted(losses):
        if losses[step] <= target:
            break
        before = step
    if before is None:
        return TimeToLoss(run.tokens[step], run.train_seconds[step])
    share = (losses[before] - target) / (losses[before] - losses[step])
    tokens, seconds = ((each[before], each[step]) for each in (run.tokens, run.train_seconds))
    return TimeToLoss(tokens[0] + share * (tokens[1] - tokens[0]), seconds[0] + share * (seconds[1] - seconds[0]))


def _finite(losses: dict[int, float]) -> dict[int, float]:
    return {step: loss for step, loss in losses.items() if math.isfinite(loss)}


def _mean_ratio(ratios: Sequence[float]) -> float | None:
    known = [each for each in ratios if math.isfinite(each) and each > 0]
    return geometric_mean(known) if known else None


def _other_surroundings(pair: Pair) -> set[str]:
    """Return the differences in environment (host, concurrent runs): they affect speed, not the loss."""
    hosts = {run.summary.get("host") for run in (pair.run, pair.baseline)}
    found = {"host"} if len(hosts) > 1 else set()
    return found | ({"launcher.at_once"} if pair.run.at_once != pair.baseline.at_once else set())


def _ratios(pairs: Sequence[Pair], key: str) -> list[float]:
    both = [(pair.run.figure(key), pair.baseline.figure(key)) for pair in pairs]
    return [ours / theirs for ours, theirs in both if ours and theirs]
