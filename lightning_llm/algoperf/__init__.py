"""AlgoPerf's score of runs: time to a target, performance profiles and their integral.

A submission is a level of the factor, a workload a setting, a study a seed, and a trial a value of the tuned key: the
runs of one seed at all values are the trials of a study.

Dahl et al. 2023, "Benchmarking Neural Network Training Algorithms", arXiv 2306.07179, section 4, after Dolan and More,
Math. Program. 91 (2002) 201-213. Submission s on workload w is run in several studies, each of several trials that
differ in tuned values: t[s, w] is the median over studies of the smallest time of a trial, infinite for a trial that
misses the target. With r[s, w] = t[s, w] / min over s', the profile of s is

    rho_s(tau) = share of workloads with r[s, w] <= tau

and its score the mean of that over 1 <= tau <= 4: 1 for the fastest everywhere, 0 if never within a factor of 4.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.compare.runs.differences import validation_differences
from lightning_llm.compare.runs.factor import Factor, choose_factor, varying_keys
from lightning_llm.compare.runs.pairing import ComparisonGroup, Pair, name_settings, setting_keys, setting_of
from lightning_llm.compare.runs.usable import unfinished_problems
from lightning_llm.compare.time_to_target import KEY, Reached, Targets, reached
from lightning_llm.tracking.reading import Run

LARGEST_RATIO, POINTS = 4.0, 100
"""r_max, and the number of equally spaced values of tau for the trapezoidal integral: as in the scoring of mlcommons
(`scoring/score_submissions.py`)."""
CLOCKS = ("steps", "tokens", "seconds")
USUAL_TRIALS = "optim.learning_rate"
Times = Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]]
"""{submission: {workload: {study: time of each trial}}}; infinite for a trial that missed its target."""


@dataclass
class Benchmark:
    """Times and scores of a benchmark (see the module for submission, workload, study and trial).

    `trial_keys`: config keys by which trials of a study differ. `targets`: {workload: value of `metric` to reach}.
    `times`: {clock: {submission: {workload: {study: times of its trials}}}}, with the clocks "steps", "tokens" and
    "seconds". `shared_machine`: runs shared a machine, so seconds are noisy. `problems`: reasons why the table is
    incomplete.
    """

    factor: Factor
    trial_keys: tuple[str, ...]
    metric: str
    targets: dict[str, float]
    times: dict[str, dict[str, dict[str, dict[int, list[float]]]]]
    shared_machine: bool
    problems: list[Problem] = field(default_factory=list)

    @property
    def submissions(self) -> list[str]:
        """Names of the submissions, the baseline first."""
        return list(self.times["steps"])

    def medians(self, clock: str) -> dict[str, dict[str, float]]:
        """Return {submission: {workload: median over studies of the best trial's time}} by `clock`; inf for a miss.

        `clock`: "steps", "tokens" or "seconds".
        """
        return median_times(self.times[clock])

    def scores(self, clock: str) -> dict[str, float]:
        """Return {submission: score from 0 to 1} by `clock`: "steps", "tokens" or "seconds"."""
        return scores(self.medians(clock))

    def as_data(self) -> dict[str, Any]:
        """Return the content of `time_to_target.json`; an infinite time is null."""
        tau, _ = profiles(ratios(self.medians("steps")))
        return {
            "factor": self.factor.name,
            "submissions": self.submissions,
            "targets": self.targets,
            "metric": self.metric,
            "trial_keys": list(self.trial_keys),
            "largest_ratio": LARGEST_RATIO,
            "times": self.times,
            "medians": {clock: self.medians(clock) for clock in CLOCKS},
            "scores": {clock: self.scores(clock) for clock in CLOCKS},
            "tau": list(tau),
            "profiles": {
                clock: {name: list(rho) for name, rho in profiles(ratios(self.medians(clock)))[1].items()}
                for clock in CLOCKS
            },
            "problems": [{"key": each.key, "text": each.text} for each in self.problems],
            "notes": self.notes(),
        }

    def _arrivals(self) -> str:
        """Return the number of studies, one per workload and seed, in which each submission reached the target."""
        counts = []
        for name, workloads in self.times["steps"].items():
            studies = [trials for own in workloads.values() for trials in own.values()]
            counts.append(f"by {name} in {sum(math.isfinite(min(trials)) for trials in studies)} of {len(studies)}")
        return f"{', '.join(counts)} studies"

    def notes(self) -> list[str]:
        """Return sentences that explain the table: how times and scores are computed, and their limits."""
        found = [
            "Time is that of the first validation at the target or better: the smallest of a study's trials, the "
            f"median over studies. A miss counts as infinite, as does more than {LARGEST_RATIO:g} times the fastest. "
            "A score is the mean share of workloads within tau times the fastest, 1 <= tau <= 4 (AlgoPerf, arXiv "
            "2306.07179)."
        ]
        if not any(self.scores("steps").values()):
            found.append(
                f"All scores are 0: the median study must reach the target. It was reached {self._arrivals()}."
            )
        if self.shared_machine:
            found.append(
                "Seconds are noisy: the runs shared a machine (launcher.at_once) or a CPU with other work. Steps and "
                "tokens are not affected."
            )
        return found


def score_runs(
    runs: Sequence[Run], metric: str, targets: Targets, baseline: str | None, trial_keys: Sequence[str]
) -> Benchmark:
    """Return the benchmark over `runs`; a diverged run is a trial that missed its target.

    Args:
        metric: the validation metric that must reach a target.
        targets: a target per workload, or one for all.
        baseline: the submission to list first, as "group=level"; None for the default.
        trial_keys: config keys by which the trials of a study differ; none: the learning rate, if it varies.

    Raises:
        ConfigError: a workload has no target, a target no workload, a trial key does not vary, or there is only one
            submission.
    """
    usable = [run for run in runs if run.finished or run.diverged]
    problems = unfinished_problems([run for run in runs if run not in usable], "No trial")
    if not usable:
        raise ConfigError([*problems, Problem("RUN", "there is no finished run.")])
    if not any(metric in run.validations for run in usable):
        raise ConfigError([*problems, Problem("--metric", f"no run has a validation of '{metric}'.")])
    keys = _trial_keys(usable, trial_keys)
    shown = [replace(run, config={k: v for k, v in run.config.items() if k not in keys}) for run in usable]
    factor = choose_factor(shown, baseline)
    workloads = _workloads(shown, factor, metric)
    names = list(dict.fromkeys(workloads))
    higher = any(metric in run.higher_is_better for run in usable)
    _check_targets(targets, names, usable, workloads, metric, higher=higher)
    times: dict[str, dict[str, dict[str, dict[int, list[float]]]]] = {clock: {} for clock in CLOCKS}
    levels = sorted(factor.labels, key=lambda level: level != factor.baseline)
    first: dict[str, Run] = {}
    for level in levels:
        for run, workload in zip(shown, workloads, strict=True):
            if factor.level(run) != level:
                continue
            problems += _unlike(first.setdefault(workload, run), run, metric)
            at = reached(run, metric, targets.of(workload) or 0.0, higher_is_better=higher)
            _enter(times, factor.labels[level], workload, run.seed, at)
    problems += _unequal(times["steps"])
    shared = any(run.at_once > 1 or run.figure("device_memory_peak_bytes") is None for run in usable)
    found = {name: float(targets.of(name) or 0.0) for name in names}
    return Benchmark(factor, keys, metric, found, times, shared, problems)


def _trial_keys(runs: Sequence[Run], asked: Sequence[str]) -> tuple[str, ...]:
    """Return the keys that define trials; by default the learning rate if it varies."""
    varying = varying_keys(runs)
    if not asked:
        return (USUAL_TRIALS,) if USUAL_TRIALS in varying and len(varying) > 1 else ()
    problems = [
        Problem("--trials", f"'{key}' does not vary over these runs.{did_you_mean(key, varying)}")
        for key in asked
        if key not in varying
    ]
    if problems:
        raise ConfigError(problems)
    return tuple(asked)


def _workloads(runs: Sequence[Run], factor: Factor, metric: str) -> list[str]:
    """Return the workload of each run as text: everything that varies besides factor, trials and seed."""
    keys = setting_keys(runs, factor, metric)
    families: dict[Any, ComparisonGroup] = {}
    for run in runs:
        setting = {key: run.config.get(key) for key in keys}
        families.setdefault(setting_of(run, keys), ComparisonGroup(setting, recipes={"": [Pair(run, run, {})]}))
    name_settings(list(families.values()))
    return [families[setting_of(run, keys)].text or "all" for run in runs]


def _check_targets(
    targets: Targets, names: Sequence[str], runs: Sequence[Run], workloads: Sequence[str], metric: str, *, higher: bool
) -> None:
    """Raise ConfigError if a workload has no target (with the losses reached) or a target no workload."""
    if problems := targets.check(names):
        best = []
        for name in names:
            ends = [
                (max if higher else min)(values)
                for run, workload in zip(runs, workloads, strict=True)
                if workload == name
                and (values := [each for each in run.validations.get(metric, {}).values() if math.isfinite(each)])
            ]
            if ends:
                best.append(f"{name} from {min(ends):.4g} to {max(ends):.4g}, half of them {median(ends):.4g}")
        reach = f"The runs' best {metric}: {'; '.join(best)}. Choose a target before looking at the ranking."
        raise ConfigError([*problems, Problem(KEY, reach)])


def _unlike(first: Run, run: Run, metric: str) -> list[Problem]:
    unlike = validation_differences(first, run, metric)
    if not unlike:
        return []
    text = f"its {metric} is not comparable with that of {first.folder}: they differ in {', '.join(unlike)}."
    return [Problem(str(run.folder), text)]


def _enter(times: dict[str, Any], submission: str, workload: str, study: int, at: Reached) -> None:
    for clock in CLOCKS:
        studies = times[clock].setdefault(submission, {}).setdefault(workload, {})
        studies.setdefault(study, []).append(getattr(at, clock))


def _unequal(times: dict[str, dict[str, dict[int, list[float]]]]) -> list[Problem]:
    """Return problems of unequal comparisons: different workloads, studies, or numbers of trials."""
    counts = {
        name: {(w, s): len(trials) for w, studies in own.items() for s, trials in studies.items()}
        for name, own in times.items()
    }
    every = {key: max(each.get(key, 0) for each in counts.values()) for each in counts.values() for key in each}
    found = []
    for name, own in counts.items():
        short = [
            f"{w} at seed {s}: {own.get((w, s), 0)} of {most}"
            for (w, s), most in every.items()
            if own.get((w, s), 0) < most
        ]
        if short:
            cases = f"{'; '.join(short[:3])}{' ...' * (len(short) > 3)}"
            text = f"has fewer trials than others, {cases}: the scores are not comparable."
            found.append(Problem(name, text))
    return found


def median_times(times: Times) -> dict[str, dict[str, float]]:
    """Return {submission: {workload: median over studies of the best trial's time}}; infinite for a miss.

    For an even number of studies the median is the mean of the middle two, so it is infinite if one of them is.
    """
    return {
        submission: {workload: _median_of_best(studies) for workload, studies in workloads.items()}
        for submission, workloads in times.items()
    }


def _median_of_best(studies: Mapping[int, Sequence[float]]) -> float:
    return float(median(min(trials, default=math.inf) for trials in studies.values())) if studies else math.inf


def ratios(medians: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return {submission: {workload: its time over the fastest submission's}}, r[s, w] in the module's formulas.

    Infinite for a miss or a ratio above `LARGEST_RATIO`; infinite for all if no submission reached the target.
    """
    workloads = sorted({workload for each in medians.values() for workload in each})
    best = {workload: min(each.get(workload, math.inf) for each in medians.values()) for workload in workloads}
    found: dict[str, dict[str, float]] = {}
    for submission, own in medians.items():
        found[submission] = {}
        for workload in workloads:
            time = own.get(workload, math.inf)
            near = math.isfinite(time) and time <= LARGEST_RATIO * best[workload]
            one = time == best[workload]  # 0 / 0, too: there before the first step
            found[submission][workload] = 1.0 if near and one else time / best[workload] if near else math.inf
    return found


def profiles(relative: Mapping[str, Mapping[str, float]]) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """Return (tau, {submission: its performance profile rho(tau)}), arrays [100], from the result of `ratios`."""
    tau = np.linspace(1.0, LARGEST_RATIO, POINTS)
    shares = {
        submission: (np.array(list(own.values()))[:, None] <= tau).mean(0) for submission, own in relative.items()
    }
    return tau, shares


def scores(medians: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return {submission: score}: the mean of its performance profile, from 0 to 1 (fastest everywhere)."""
    tau, shares = profiles(ratios(medians))
    return {submission: float(np.trapezoid(share, tau) / (LARGEST_RATIO - 1)) for submission, share in shares.items()}
