"""Time to a target (`--target`): when a run first reached a value, and a recipe's time relative to the baseline's.

Such times are censored on both sides. Leaving out pairs in which one run never arrived would flatter: runs that would
arrive late are the ones that do not arrive. Here such a pair gives bounds on the ratio. If only the recipe misses, its
time over the baseline's is above its budget over the baseline's time; if only the baseline misses, it is below the
recipe's time over the baseline's budget; if both miss, it is unknown. The medians over the pairs of the lower and the
upper bounds bound the median ratio. The median of the times, with a miss as infinite, is the Kaplan-Meier estimate if
all runs have the same budget (E. L. Kaplan and P. Meier, J. Am. Stat. Assoc. 53 (1958) 457-481).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from scipy import special  # and not stats, which takes a second to import

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.compare.runs.pairing import Pair
from lightning_llm.tracking.reading import Run

KEY = "--target"


@dataclass(frozen=True)
class Targets:
    """Values of the metric that runs must reach (--target).

    `by_setting`: (setting as text, target) of single settings; `for_all`: the target of every other setting, None for
    no target.
    """

    for_all: float | None = None
    by_setting: tuple[tuple[str, float], ...] = ()

    def of(self, setting: str) -> float | None:
        """Return the target of a setting, given as text; None without one."""
        return dict(self.by_setting).get(setting, self.for_all)

    @property
    def arguments(self) -> list[str]:
        """The targets as arguments of --target, which `read_targets` reads."""
        own = [f"{setting}:{value!r}" for setting, value in self.by_setting]
        return own if self.for_all is None else [repr(self.for_all), *own]

    def check(self, settings: Sequence[str]) -> list[Problem]:
        """Return a problem for each target of an unknown setting, and for each of `settings` without a target."""
        found: list[Problem] = []
        alone = list(settings) in ([""], ["all"])
        for name, value in self.by_setting:
            if name not in settings and alone:
                text = f"'{name}:{value:g}' names a setting, but these runs have only one, which needs no name"
                found.append(Problem(KEY, f"{text}: --target {value:g}."))
            elif name not in settings:
                known = ", ".join(f"'{each}'" for each in settings)
                text = f"'{name}' is no setting of these runs. Allowed: {known}.{did_you_mean(name, settings)}"
                found.append(Problem(KEY, text))
        if alone:
            if not found and self.of(settings[0]) is None:
                found.append(Problem(KEY, "no target is given. Use --target VALUE."))
            return found
        missing = [each for each in settings if self.of(each) is None]
        found += [Problem(KEY, f"no target is given for '{each}'. Use --target '{each}:VALUE'.") for each in missing]
        return found


NO_TARGETS = Targets()


def read_targets(arguments: Sequence[str]) -> Targets:
    """Return the targets that --target names: "4.4" for all settings, "model=llama_tiny:4.4" for one.

    A later target of the same setting replaces an earlier one.

    Raises:
        ConfigError: with all invalid targets.
    """
    problems, for_all, own = [], None, {}
    for word in arguments:
        setting, _, number = word.rpartition(":")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            text = "must be a number above 0 such as 4.4, or SETTING:NUMBER such as model=llama_tiny:4.4."
            problems.append(Problem(KEY, text, word))
        elif setting:
            own[setting.strip()] = value
        else:
            for_all = value
    if problems:
        raise ConfigError(problems)
    return Targets(for_all, tuple(sorted(own.items())))


@dataclass(frozen=True)
class Reached:
    """First time at which a run reached its target, infinite if it never did.

    As optimizer `steps`, `tokens`, and `seconds` of training without validations. `ended_tokens`: tokens at the run's
    last validation, up to which a run that missed the target was observed.
    """

    steps: float
    tokens: float
    seconds: float
    ended_tokens: float


def reached(run: Run, metric: str, target: float, *, higher_is_better: bool) -> Reached:
    """Return the time of the first validation of `run` with `metric` at `target` or better, without interpolation."""
    values = run.validations.get(metric, {})
    ended = float(max((run.tokens.get(step, 0) for step in values), default=0))
    for step in sorted(values):
        at = values[step]
        if math.isfinite(at) and (at >= target if higher_is_better else at <= target):
            return Reached(step, run.tokens.get(step, math.nan), run.train_seconds.get(step, math.nan), ended)
    return Reached(math.inf, math.inf, math.inf, ended)


@dataclass(frozen=True)
class TimeToTarget:
    """Time of one recipe to `target`, in tokens, over its pairs by seed.

    `arrived`, `baseline_arrived`: runs that reached it; `tokens`, `baseline_tokens`: medians, infinite if half or more
    missed; `low`, `high`: bounds of the median ratio of a pair's tokens, equal without relevant censoring; `slower`,
    `faster`: pairs for which that is known; `p`: two-sided exact sign test of these; `interval`: order-statistics
    interval of the median ratio with at least `confidence`, None for too few pairs.
    """

    target: float
    pairs: int
    arrived: int
    baseline_arrived: int
    tokens: float
    baseline_tokens: float
    low: float
    high: float
    slower: int
    faster: int
    p: float
    interval: tuple[float, float] | None
    confidence: float

    @property
    def text(self) -> str:
        """The ratio of tokens as text, or the bounds that are known."""
        if not self.pairs:
            return "-"
        if self.low == self.high:
            return f"{self.low:.2f}x" if math.isfinite(self.low) else "never"
        if math.isinf(self.high):
            return f">= {self.low:.2f}x" if self.low > 0 else "unknown"
        return f"<= {self.high:.2f}x" if self.low == 0 else f"{self.low:.2f} to {self.high:.2f}x"

    def as_data(self) -> dict[str, Any]:
        """Return the entry "time_to_target" of `compare.json`; infinite bounds are null."""
        return {
            "target": self.target,
            "pairs": self.pairs,
            "arrived": self.arrived,
            "baseline_arrived": self.baseline_arrived,
            "tokens": self.tokens,
            "baseline_tokens": self.baseline_tokens,
            "tokens_ratio_bounds": [self.low, self.high],
            "slower": self.slower,
            "faster": self.faster,
            "p": self.p,
            "tokens_ratio_ci": list(self.interval) if self.interval else None,
            "confidence": self.confidence,
        }


def time_to_target(
    pairs: Sequence[Pair], metric: str, target: float, confidence: float, *, higher_is_better: bool = False
) -> TimeToTarget:
    """Return the time of the runs of `pairs` to `target` relative to the baseline's.

    A run that diverged before the target never arrives: it counts as observed for as long as the other run.
    """
    times = []
    for pair in pairs:
        ours, theirs = (
            reached(run, metric, target, higher_is_better=higher_is_better) for run in (pair.run, pair.baseline)
        )
        longest = max(ours.ended_tokens, theirs.ended_tokens)
        if pair.run.diverged:
            ours = replace(ours, ended_tokens=longest)
        if pair.baseline.diverged:
            theirs = replace(theirs, ended_tokens=longest)
        times.append((ours, theirs))
    return of_times(times, target, confidence)


def of_times(times: Sequence[tuple[Reached, Reached]], target: float, confidence: float) -> TimeToTarget:
    """Return the same as `time_to_target`, from pairs (time of the recipe's run, time of the baseline's)."""
    bounds = [_ratio(ours, theirs) for ours, theirs in times]
    slower, faster = sum(low > 1 for low, _ in bounds), sum(high < 1 for _, high in bounds)
    decided = slower + faster
    tail = float(special.bdtr(min(slower, faster), decided, 0.5)) if decided else 1.0
    lows, highs = sorted(low for low, _ in bounds), sorted(high for _, high in bounds)
    return TimeToTarget(
        target=target,
        pairs=len(times),
        arrived=sum(math.isfinite(ours.tokens) for ours, _ in times),
        baseline_arrived=sum(math.isfinite(theirs.tokens) for _, theirs in times),
        tokens=median(ours.tokens for ours, _ in times) if times else math.nan,
        baseline_tokens=median(theirs.tokens for _, theirs in times) if times else math.nan,
        low=median(lows) if times else 0.0,
        high=median(highs) if times else math.inf,
        slower=slower,
        faster=faster,
        p=min(1.0, 2 * tail),
        interval=_median_interval(lows, highs, confidence),
        confidence=confidence,
    )


def _ratio(ours: Reached, theirs: Reached) -> tuple[float, float]:
    """Return the bounds of the recipe's tokens over the baseline's."""
    if math.isfinite(ours.tokens) and math.isfinite(theirs.tokens):
        return (ours.tokens / theirs.tokens,) * 2 if theirs.tokens else (0.0, math.inf)
    if math.isfinite(theirs.tokens):
        return (ours.ended_tokens / theirs.tokens if theirs.tokens else 0.0), math.inf
    if math.isfinite(ours.tokens):
        return 0.0, ours.tokens / theirs.ended_tokens if theirs.ended_tokens else math.inf
    return 0.0, math.inf


def _median_interval(lows: Sequence[float], highs: Sequence[float], confidence: float) -> tuple[float, float] | None:
    """Return the order-statistics interval of the median: the k-th lower end from below, the k-th upper from above.

    Exact for any continuous distribution (W. R. Thompson, Ann. Math. Stat. 7 (1936) 122-128), and wider where pairs are
    censored. None where even the extremes contain less than `confidence`: below 6 pairs at 95 %.
    """
    count = len(lows)
    fitting = [k for k in range(1, count // 2 + 1) if 1 - 2 * special.bdtr(k - 1, count, 0.5) >= confidence]
    if not fitting:
        return None
    return lows[max(fitting) - 1], highs[count - max(fitting)]
