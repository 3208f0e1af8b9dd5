"""Simulate sweeps and judge them as `compare` does: how often a verdict is wrong.

Records tables of docs/reference/error_rates.md.

`python docs/internals/simulate_verdicts.py` takes some minutes (2,000 sweeps per cell);
`tests/compare/test_stability.py` checks the same bounds with fewer.

Model: K recipes and a baseline at S seeds. The loss of a run is the sum of a seed effect, which pairs cancel, a run
effect, and the mean of the last validations, autocorrelated within the run. Any run may diverge, at a given rate.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from simulated import record

from lightning_llm.compare.estimate import Measured, VerdictInputs, judge_all
from lightning_llm.compare.statistics.all_pairs import pairwise_intervals
from lightning_llm.compare.statistics.intervals import simultaneous_intervals
from lightning_llm.compare.statistics.seeds import seeds_needed
from lightning_llm.compare.terms import Terms

TERMS = Terms()
RECIPES, TAIL = 4, 5
"""Recipes of a family, and validations of the tail."""
TRIALS = 2000


@dataclass(frozen=True)
class Scenario:
    """`pair_sd`: of a pair's difference, nats; `correlation`: of the noise from validation to validation; `rate`: at
    which every run diverges; `catastrophe`: nats added to one recipe's loss at one seed; `tails`: degrees of freedom of
    the noise between runs, infinite for normal noise."""

    name: str
    pair_sd: float = 0.004
    correlation: float = 0.8
    rate: float = 0.0
    catastrophe: float = 0.0
    tails: float = np.inf


SCENARIOS = (
    Scenario("nothing goes wrong"),
    Scenario("every run diverges at 2 %", rate=0.02),
    Scenario("every run diverges at 5 %", rate=0.05),
    Scenario("every run diverges at 20 %", rate=0.2),
    Scenario("one recipe has a catastrophe at one seed", catastrophe=2.0),
    Scenario("curves wander (AR 0.9), 5 % diverge", correlation=0.9, rate=0.05),
    Scenario("heavy tails (t with 3 df), 5 % diverge", rate=0.05, tails=3),
    Scenario("loud (SD of a pair 0.05), 5 % diverge", pair_sd=0.05, rate=0.05),
)


def autocorrelated(rng: np.random.Generator, shape: tuple[int, ...], steps: int, correlation: float) -> NDArray:
    """Return stationary AR(1) noise of unit variance, [*shape, steps]."""
    noise = rng.standard_normal((*shape, steps))
    for step in range(1, steps):
        noise[..., step] = correlation * noise[..., step - 1] + (1 - correlation**2) ** 0.5 * noise[..., step]
    return noise


def sweeps(scenario: Scenario, seeds: int, gap: float, trials: int, seed: int = 0) -> Iterator[list[Measured]]:
    """Yield the measured recipes of each simulated sweep, all of true gap `gap`."""
    rng = np.random.default_rng(seed)
    shape = (trials, RECIPES + 1, seeds)
    between = rng.standard_normal(shape) if np.isinf(scenario.tails) else rng.standard_t(scenario.tails, shape) / 3**0.5
    within = autocorrelated(rng, shape, TAIL, scenario.correlation).mean(-1)
    losses = scenario.pair_sd / 2**0.5 * (between + 0.5 * within) / 1.25**0.5  # [trials, 1 + K, S]
    differences = losses[:, 1:] - losses[:, :1] + gap
    differences[:, 0, 0] += scenario.catastrophe
    diverged = rng.random(shape) < scenario.rate
    for trial in range(trials):
        base = diverged[trial, 0]
        yield [
            Measured(
                f"recipe {place}",
                differences={s: float(differences[trial, place, s]) for s in range(seeds) if not (lost[s] or base[s])},
                diverged_seeds=[s for s in range(seeds) if lost[s]],
                baseline_diverged_seeds=[s for s in range(seeds) if base[s]],
            )
            for place, lost in enumerate(diverged[trial, 1:])
        ]


def judged(scenario: Scenario, seeds: int, gap: float, trials: int) -> Iterator[list[VerdictInputs]]:
    """Yield the verdicts of each simulated sweep."""
    for recipes in sweeps(scenario, seeds, gap, trials):
        yield judge_all(recipes, None, TERMS)


def false_lossy(scenario: Scenario, seeds: int, trials: int = TRIALS) -> float:
    """Return how often any of the recipes is called lossy though none differs from the baseline."""
    return float(np.mean([any(r.decision == "lossy" for r in found) for found in judged(scenario, seeds, 0.0, trials)]))


def false_lossless(scenario: Scenario, seeds: int, trials: int = TRIALS) -> float:
    """Return how often any of the recipes is called lossless though each has a gap just above the margin."""
    gap = 1.001 * TERMS.margin
    found = judged(scenario, seeds, gap, trials)
    return float(np.mean([any(r.decision == "lossless" for r in recipes) for recipes in found]))


def false_lossless_over_looks(last: int, trials: int = 10 * TRIALS) -> float:
    """Return how often one recipe at the margin is called lossless at any look from 2 to `last` seeds."""
    differences = np.random.default_rng(0).normal(TERMS.margin, 0.005, (trials, 1, last))
    looks = [simultaneous_intervals(differences[..., :seeds]).high[:, 0] < TERMS.margin for seeds in range(2, last + 1)]
    return float(np.any(looks, axis=0).mean())


def decided_as_planned(recipes: int, first: int, pair_sd: float, gap: float, trials: int) -> float:
    """Return how often a verdict that is open after `first` seeds is right after as many more as were advised."""
    rng = np.random.default_rng(1)

    def pairs(count: int) -> NDArray:
        runs = rng.normal(0, pair_sd / 2**0.5, (recipes + 1, count))
        return runs[1:] - runs[:1] + gap

    right = []
    for _ in range(trials):
        seen = pairs(first)
        found = simultaneous_intervals(seen)
        if found.high[0] < TERMS.margin or found.low[0] > TERMS.margin:
            continue
        pool = int(found.members.sum()) if found.pooled[0] else 1
        needed = seeds_needed(gap, float(found.pool_sd[0]), TERMS.margin, recipes, pool, df=float(found.df[0]))
        if needed is None:
            continue
        then = simultaneous_intervals(np.concatenate([seen, pairs(max(needed - first, 1))], axis=1))
        right.append(then.high[0] < TERMS.margin if gap < TERMS.margin else then.low[0] > TERMS.margin)
    return float(np.mean(right))


SPREADS = (
    ("one recipe", (1, 1)),
    ("two alike", (1, 1, 1)),
    ("four alike", (1, 1, 1, 1, 1)),
    ("the baseline 3 times as loud as eight recipes", (3, *[1] * 8)),
    ("the baseline 5 times as loud as four recipes", (5, 1, 1, 1, 1)),
    ("one of four recipes 5 times as loud", (1, 1, 1, 1, 5)),
    ("one of four recipes 10 times as loud", (1, 1, 1, 1, 10)),
    ("recipes of 0.5, 1, 3 and 6 times the baseline's", (1, 0.5, 1, 3, 6)),
)
"""SD of the baseline's runs, and of the recipes', with effects between seeds that pairs cancel."""


def runs_of(spreads: tuple[float, ...], seeds: int, trials: int) -> NDArray:
    """Return losses of runs without gaps, [trials, 1 + K, seeds], the baseline first."""
    return np.random.default_rng(2).standard_normal((trials, len(spreads), seeds)) * np.array(spreads)[:, None]


def coverage(spreads: tuple[float, ...], seeds: int, trials: int) -> float:
    """Return how often the intervals of all recipes hold together."""
    runs = runs_of(spreads, seeds, trials)
    found = simultaneous_intervals(runs[:, 1:] - runs[:, :1])
    return float(((found.low <= 0) & (found.high >= 0)).all(-1).mean())


def all_pairs_coverage(spreads: tuple[float, ...], seeds: int, trials: int) -> float:
    """Return how often the intervals of all pairs hold together (`compare --all-pairs`)."""
    _, low, high, _ = pairwise_intervals(runs_of(spreads, seeds, trials))
    return float(((low <= 0) & (high >= 0)).all(-1).mean())


def coverage_table(trials: int) -> list[str]:
    """Return the rows of the table of intervals' coverage, of ten times as many trials: they cost nothing."""
    rows = ["| spreads | against the baseline: 2, 3, 5 pairs | all pairs: 2, 3, 5 pairs |", "|---|---|---|"]
    for name, spreads in SPREADS:
        cells = [
            " / ".join(f"{100 * each(spreads, seeds, 10 * trials):.1f}" for seeds in (2, 3, 5))
            for each in (coverage, all_pairs_coverage)
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return rows


PLANS = ((1, 3, 0.01, 0.0), (1, 3, 0.02, 0.03), (1, 5, 0.03, 0.0), (4, 3, 0.01, 0.0), (4, 5, 0.01, 0.0))
"""Recipes, first seeds, SD of a pair, true gap."""


def error_table(trials: int) -> list[str]:
    """Return the rows of the table of errors."""
    rows = [
        "| any of 4 recipes, in % of sweeps | lossy without a gap: 3, 5, 10 seeds | lossless at the margin |",
        "|---|---|---|",
    ]
    for scenario in SCENARIOS:
        cells = [
            " / ".join(f"{100 * rate(scenario, seeds, trials):.1f}" for seeds in (3, 5, 10))
            for rate in (false_lossy, false_lossless)
        ]
        rows.append(f"| {scenario.name} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return rows


def plan_table(trials: int) -> list[str]:
    """Return the rows of the table of how often the planned number of seeds decides."""
    rows = ["| recipes | first seeds | SD of a pair | true gap | decided rightly, in % |", "|---|---|---|---|---|"]
    for plan in PLANS:
        rows.append(f"| {' | '.join(f'{each:g}' for each in plan)} | {100 * decided_as_planned(*plan, trials):.0f} |")
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    record(
        {"coverage": coverage_table, "errors": error_table, "plans": lambda trials: plan_table(trials // 5)},
        TRIALS,
    )
