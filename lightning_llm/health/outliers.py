"""Ranks that are slower than the others: a test with a known rate of false alarms, whatever the noise looks like.

In each of `rounds` rounds every rank does the same work. A rank counts as slow in a round if it takes more than
1 + `least_slowdown` times the median of the others. Were it slower by no more than that, it would be so in at most half
of the rounds: where the times of one round are exchangeable but for that factor, each order of them is as likely, and
half of the orders, or fewer, put it behind the (upper) median of the rest. So the rounds in which it counts are at most
binomial(rounds, 1/2), however the times are distributed and whatever slows all ranks at once. It is an outlier where
so many are less likely than `ALPHA`, shared out over all tests of a check (Bonferroni).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

ALPHA = 0.001
"""The most that the rate of checks may be which name any rank that is not slow: one in a thousand."""
LEAST_SLOWDOWN = 0.1
"""The share by which a rank is slower that matters. Devices of one kind differ in GEMM speed by some 8 % as they are
(Sinha et al., Not All GPUs Are Created Equal, SC22: arXiv 2208.11035)."""
SHARE_MISSED = 0.1
"""Of the rounds: how many a slow rank may be as fast as the others in, and is still found."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that takes `factor` times what the others do for `work`: in `slow_rounds` of `rounds` beyond the limit."""

    rank: int
    work: str
    factor: float
    slow_rounds: int
    rounds: int
    p_value: float


def rounds_for(tests: int) -> int:
    """Return the fewest rounds in which `tests` tests name a rank that is slow in all but `SHARE_MISSED` of them."""
    rounds = 1
    while tail(rounds, rounds - int(SHARE_MISSED * rounds)) > ALPHA / tests:
        rounds += 1
    return rounds


def tail(rounds: int, successes: int) -> float:
    """Return the chance of `successes` or more in `rounds` tosses of a fair coin."""
    return sum(comb(rounds, each) for each in range(successes, rounds + 1)) / 2**rounds


def medians_of_others(values: Sequence[float]) -> list[float]:
    """Return for each of two values or more the (upper) median of all but itself."""
    order = sorted(range(len(values)), key=values.__getitem__)
    middle = (len(values) - 1) // 2
    found = [values[order[middle]]] * len(values)
    for place in range(middle + 1):  # without one of these the others move down by one
        found[order[place]] = values[order[middle + 1]]
    return found


def slow_ranks(
    work: str, seconds: Sequence[Sequence[float]], tests: int, least_slowdown: float = LEAST_SLOWDOWN
) -> list[SlowRank]:
    """Return the ranks that are slow at `work`, the slowest first.

    Args:
        work: what they did, for the reader.
        seconds: [rounds][ranks]: what each took.
        tests: how many ranks and kinds of work are judged in all, which share `ALPHA`.
        least_slowdown: the share by which a rank must be slower.
    """
    found, world = [], len(seconds[0])
    usual = [medians_of_others(each) for each in seconds] if world > 1 else []
    for rank in range(world if world > 1 else 0):
        ratios = [each[rank] / others[rank] for each, others in zip(seconds, usual, strict=True)]
        slow_rounds = sum(ratio > 1 + least_slowdown for ratio in ratios)
        if (p_value := tail(len(seconds), slow_rounds)) <= ALPHA / tests:
            found.append(SlowRank(rank, work, median(ratios), slow_rounds, len(seconds), p_value))
    return sorted(found, key=lambda each: -each.factor)
