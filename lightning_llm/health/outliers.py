"""Test for ranks that are slower than the others, with a bounded rate of false alarms under any noise.

In each of `rounds` rounds every rank does the same work. A rank is slow in a round if it takes more than
1 + `least_slowdown` times the median of the others. A rank that is slower by at most this factor is slow in at most
half of the rounds: if the times of one round, up to the factor, are exchangeable, all orders are equally likely, and at
most half of them place it after the (upper) median of the others. So its number of slow rounds is at most
binomial(rounds, 1/2), for any distribution of times and any disturbance of all ranks at once. It is an outlier if the
probability of its number is below `ALPHA`, divided by the number of tests of a check (Bonferroni).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

ALPHA = 0.001
"""Upper bound of the share of checks that name a rank which is not slow: one in a thousand."""
LEAST_SLOWDOWN = 0.1
"""Slowdown that matters. GEMM speeds of healthy devices of one kind differ by about 8 %
(Sinha et al., Not All GPUs Are Created Equal, SC22: arXiv 2208.11035)."""
SHARE_MISSED = 0.1
"""A slow rank is still found if it is as fast as the others in this share of the rounds."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that was found to be slower than the others at one kind of work."""

    rank: int
    work: str
    """Kind of work, for messages, such as "bf16 GEMM"."""
    factor: float
    """Median over rounds of the rank's seconds divided by the median seconds of the others."""
    slow_rounds: int
    """Number of rounds in which the rank was slow."""
    rounds: int
    """Number of all rounds."""
    p_value: float
    """Probability of so many slow rounds for a rank that is not slow, at most."""


def rounds_for(tests: int) -> int:
    """Return the number of rounds to measure: the fewest that suffice to find a slow rank with `tests` tests.

    A rank that is slow in all rounds but a share of `SHARE_MISSED` is found.
    """
    rounds = 1
    while tail(rounds, rounds - int(SHARE_MISSED * rounds)) > ALPHA / tests:
        rounds += 1
    return rounds


def tail(rounds: int, successes: int) -> float:
    """Return the probability of at least `successes` heads in `rounds` tosses of a fair coin."""
    return sum(comb(rounds, each) for each in range(successes, rounds + 1)) / 2**rounds


def medians_of_others(values: Sequence[float]) -> list[float]:
    """Return for each of two or more values the median of all other values, the upper one of two middle values."""
    order = sorted(range(len(values)), key=values.__getitem__)
    middle = (len(values) - 1) // 2
    found = [values[order[middle]]] * len(values)
    for place in range(middle + 1):  # without one of these, the others move down by one
        found[order[place]] = values[order[middle + 1]]
    return found


def slow_ranks(
    work: str, seconds: Sequence[Sequence[float]], tests: int, least_slowdown: float = LEAST_SLOWDOWN
) -> list[SlowRank]:
    """Return the ranks that are slower than the others at `work`, the slowest first; [] if none is.

    Args:
        work: kind of work, for messages.
        seconds: seconds of the work, [round][rank].
        tests: total number of tests of the check (ranks times kinds of work), which share `ALPHA`.
        least_slowdown: the share by which a rank must be slower in a round to count as slow there.
    """
    found, world = [], len(seconds[0])
    usual = [medians_of_others(each) for each in seconds] if world > 1 else []
    for rank in range(world if world > 1 else 0):
        ratios = [each[rank] / others[rank] for each, others in zip(seconds, usual, strict=True)]
        slow_rounds = sum(ratio > 1 + least_slowdown for ratio in ratios)
        if (p_value := tail(len(seconds), slow_rounds)) <= ALPHA / tests:
            found.append(SlowRank(rank, work, median(ratios), slow_rounds, len(seconds), p_value))
    return sorted(found, key=lambda each: -each.factor)
