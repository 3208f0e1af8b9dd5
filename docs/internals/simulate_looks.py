"""Simulate sweeps with declared looks and judge them as `compare` does, for docs/reference/error_rates.md.

`python docs/internals/simulate_looks.py` takes some minutes (2,000 sweeps per cell); `tests/compare/test_sequential.py`
checks the same bounds with fewer. Sweeps are modeled as in simulate_verdicts.py. A recipe that is decided gets no more
seeds; the sweep ends when all are decided or after the last look.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from simulated import record

from lightning_llm.compare.estimate import Measured, VerdictInputs
from lightning_llm.compare.looks import SPENDINGS, Design, Spending, declare
from lightning_llm.compare.sequential_verdicts import SequentialState, replay
from lightning_llm.compare.terms import Terms
from lightning_llm.config.schema.sweep import SweepConfig

TERMS = Terms()
LOOKS, SPENDING = SweepConfig().looks, SweepConfig().spending
TAIL, TRIALS = 5, 2000


@dataclass(frozen=True)
class Scenario:
    """`pair_sd`: of a pair's difference, nats, one or one per recipe; `baseline`: how many times as noisy it is;
    `correlation`: of the noise from validation to validation; `rate`: at which every run diverges; `tails`: degrees of
    freedom of the noise between runs, infinite for normal noise."""

    name: str
    pair_sd: float | tuple[float, ...] = 0.005
    baseline: float = 1.0
    correlation: float = 0.8
    rate: float = 0.0
    tails: float = np.inf
    recipes: int = 3


SCENARIOS = (
    Scenario("normal, one recipe", recipes=1),
    Scenario("normal"),
    Scenario("heavy tails (t with 3 df)", tails=3),
    Scenario("curves wander (AR 0.95)", correlation=0.95),
    Scenario("recipes of unlike spread (0.002, 0.005, 0.02)", pair_sd=(0.002, 0.005, 0.02)),
    Scenario("the baseline 3 times as noisy", baseline=3.0),
    Scenario("every run diverges at 2 %", rate=0.02),
    Scenario("every run diverges at 5 %", rate=0.05),
    Scenario("loud (SD of a pair 0.02), heavy tails, 5 % diverge", pair_sd=0.02, tails=3, rate=0.05),
)


@lru_cache
def design_of(recipes: int, spending: Spending = SPENDING, looks: tuple[int, ...] = LOOKS) -> Design:
    """Return the declared design of a sweep of so many recipes."""
    return declare(looks, tuple(range(looks[-1])), TERMS, spending, recipes, None)


def losses(scenario: Scenario, seeds: int, trials: int, seed: int) -> NDArray:
    """Return differences to the baseline's tail losses, [trials, K, seeds], without a gap."""
    rng = np.random.default_rng(seed)
    shape = (trials, scenario.recipes + 1, seeds)
    between = rng.standard_normal(shape) if np.isinf(scenario.tails) else rng.standard_t(scenario.tails, shape) / 3**0.5
    noise = rng.standard_normal((*shape, TAIL))
    for step in range(1, TAIL):
        now = (1 - scenario.correlation**2) ** 0.5 * noise[..., step]
        noise[..., step] = scenario.correlation * noise[..., step - 1] + now
    runs = (between + 0.5 * noise.mean(-1)) / 1.25**0.5 / 2**0.5
    spread = np.broadcast_to(scenario.pair_sd, scenario.recipes)
    spread = np.array([scenario.baseline * spread.min(), *spread])
    runs = runs * spread[:, None]
    return runs[:, 1:] - runs[:, :1]


def sweeps(
    scenario: Scenario,
    gap: float,
    trials: int = TRIALS,
    spending: Spending = SPENDING,
    seed: int = 0,
) -> Iterator[list[tuple[VerdictInputs, SequentialState]]]:
    """Yield the outcome of each recipe of each simulated sweep at its last look."""
    design = design_of(scenario.recipes, spending)
    seeds = design.last.seeds
    differences = losses(scenario, seeds, trials, seed) + gap
    lost = np.random.default_rng(seed + 1).random((trials, scenario.recipes + 1, seeds)) < scenario.rate
    labels = [str(place) for place in range(scenario.recipes)]
    for each, (base, *fates) in zip(differences, lost, strict=True):

        def measured(
            label: str, at: Sequence[int], each: NDArray = each, base: NDArray = base, fates=fates
        ) -> Measured:
            own = fates[int(label)]
            return Measured(
                label,
                differences={s: float(each[int(label), s]) for s in at if not (own[s] or base[s])},
                diverged_seeds=[s for s in at if own[s]],
                baseline_diverged_seeds=[s for s in at if base[s]],
            )

        yield list(replay(labels, lambda *_: True, measured, lambda _: None, design).values())


@dataclass(frozen=True)
class Errors:
    """How often any recipe of a sweep, all of one gap, is ever called lossless or lossy, and all intervals hold."""

    lossless: float
    lossy: float
    coverage: float


def errors(scenario: Scenario, gap: float, trials: int = TRIALS, spending: Spending = SPENDING) -> Errors:
    """Return the outcomes of simulated sweeps in which all recipes have this true gap."""
    found = []
    for recipes in sweeps(scenario, gap, trials, spending):
        decisions = [judged.decision for judged, _ in recipes]
        ends = [judged.estimate for judged, _ in recipes]
        held = all(not (each.low > gap or each.high < gap) for each in ends)
        found.append(("lossless" in decisions, "lossy" in decisions, held))
    return Errors(*(float(share) for share in np.mean(found, axis=0)))


def seeds_used(sd: float, gap: float, recipes: int, spending: Spending, trials: int) -> tuple[float, float, float]:
    """Return the mean number of seeds of a recipe and of the baseline, and the share of recipes decided rightly."""
    own, base, right = [], [], []
    deserved = "lossless" if gap < TERMS.margin else "lossy"
    for found in sweeps(Scenario("", sd, recipes=recipes), gap, trials, spending, seed=5):
        taken = [state.look.seeds for _, state in found if state.look]
        own += taken
        base.append(max(taken))
        right += [judged.decision == deserved for judged, _ in found]
    return float(np.mean(own)), float(np.mean(base)), float(np.mean(right))


def error_table(trials: int) -> list[str]:
    """Return the rows of the table of errors under optional stopping."""
    head = ["any recipe, in % of sweeps", "lossless at the margin", "lossy at the margin", "lossy without a gap"]
    rows = [f"| {' | '.join([*head, 'intervals hold'])} |", "|---|---|---|---|---|"]
    for scenario in SCENARIOS:
        near, none = errors(scenario, TERMS.margin, trials), errors(scenario, 0.0, trials)
        cells = [near.lossless, near.lossy, none.lossy, near.coverage]
        rows.append(f"| {scenario.name} | {' | '.join(f'{100 * each:.1f}' for each in cells)} |")
        print(rows[-1], flush=True)
    return rows


SDS = (0.002, 0.003, 0.005, 0.008, 0.012)


def seed_table(trials: int) -> list[str]:
    """Return the rows of the table of expected seeds."""
    rows = [
        "| SD of a pair | recipes | true gap | seeds of a recipe: "
        + " / ".join(SPENDINGS)
        + " | decided rightly, in % |",
        "|---|---|---|---|---|",
    ]
    for sd in SDS:
        for recipes, gap in ((1, 0.0), (3, 0.0), (3, 0.03)):
            found = [seeds_used(sd, gap, recipes, spending, trials) for spending in SPENDINGS]
            used, right = (
                " / ".join(f"{each[i] * f:{w}}" for each in found) for i, f, w in ((0, 1, ".1f"), (2, 100, ".0f"))
            )
            rows.append(f"| {sd:g} | {recipes} | {gap:g} | {used} | {right} |")
            print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    record({"look-errors": error_table, "look-seeds": seed_table}, TRIALS)
