"""AlgoPerf's score of training algorithms: time to a target, performance profiles, their integral. Pure functions.

Dahl et al. 2023, "Benchmarking Neural Network Training Algorithms", arXiv 2306.07179, section 4, after Dolan and More,
Math. Program. 91 (2002) 201-213. Submission s on workload w is run in several studies, each of several trials that
differ in tuned values: t[s, w] is the median over studies of the least time of a trial, a trial that misses the target
taking for ever. With r[s, w] = t[s, w] / min over s', the profile of s is

    rho_s(tau) = share of workloads with r[s, w] <= tau

and its score the mean of that over 1 <= tau <= 4: 1 for the fastest everywhere, 0 for who is never within 4 times.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

LARGEST_RATIO, POINTS = 4.0, 100
"""r_max, and the equally spaced values of tau that the integral is taken at, by trapezoids: as mlcommons' scoring does
(`scoring/score_submissions.py`)."""

Times = Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]]
"""{submission: {workload: {study: time of each trial}}}, infinite where a trial missed its target."""


def median_times(times: Times) -> dict[str, dict[str, float]]:
    """Return {submission: {workload: median over studies of the least time of a trial}}; infinite for a miss.

    Of an even number of studies the mean of the two in the middle, so infinite where one of these is.
    """
    return {
        submission: {workload: _median_of_best(studies) for workload, studies in workloads.items()}
        for submission, workloads in times.items()
    }


def _median_of_best(studies: Mapping[int, Sequence[float]]) -> float:
    return float(median(min(trials, default=math.inf) for trials in studies.values())) if studies else math.inf


def ratios(medians: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return r[s, w], infinite for a miss or above `LARGEST_RATIO`; for all, where none reached the target."""
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
    """Return the values of tau, [100], and {submission: rho at each} of `ratios`."""
    tau = np.linspace(1.0, LARGEST_RATIO, POINTS)
    shares = {
        submission: (np.array(list(own.values()))[:, None] <= tau).mean(0) for submission, own in relative.items()
    }
    return tau, shares


def scores(medians: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return each submission's score, from 0 to 1."""
    tau, shares = profiles(ratios(medians))
    return {submission: float(np.trapezoid(share, tau) / (LARGEST_RATIO - 1)) for submission, share in shares.items()}
