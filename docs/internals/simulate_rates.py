"""Simulate grids of learning rates and judge them as `compare --best-of` does: how often it errs.

`python docs/internals/simulate_rates.py` takes a minute (2,000 grids per cell) and records a table of
docs/reference/error_rates.md;
`tests/compare/test_tuned.py` checks the same bounds with fewer.

Model: K recipes and a baseline, each at R rates and S seeds. The loss is a valley over the logarithm of the rate, with
its minimum between two rates of the grid and at another place for each recipe, plus a seed effect and noise. The true
gap is that of the smallest losses over the grid. The first seed chooses the rate; the others judge.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from simulated import record

from lightning_llm.compare.statistics.intervals import simultaneous_intervals
from lightning_llm.compare.tuned import grid_bounds

MARGIN, TRIALS = 0.01, 2000
RATES = 5


@dataclass(frozen=True)
class Scenario:
    """A simulated grid.

    Attributes:
        pair_sd: SD of a pair's difference in nats, without extra noise.
        curvature: nats by which the loss rises one step of the grid from the minimum.
        recipe_noise, baseline_noise: factors of the noise.
        tails: degrees of freedom of the noise.
    """

    name: str
    pair_sd: float = 0.004
    curvature: float = 0.02
    recipe_noise: float = 1.0
    baseline_noise: float = 1.0
    tails: float = np.inf
    recipes: int = 2


SCENARIOS = (
    Scenario("normal noise, SD of a pair 0.004"),
    Scenario("a flat valley (0.002 per step)", curvature=0.002),
    Scenario("loud, SD 0.02", pair_sd=0.02),
    Scenario("heavy tails (t with 3 df)", tails=3),
    Scenario("recipes 5 times as loud as the baseline", recipe_noise=5),
    Scenario("the baseline 5 times as loud as the recipes", baseline_noise=5),
    Scenario("recipes 5 times as loud, in a steep valley (0.1)", recipe_noise=5, curvature=0.1),
)


def grids(scenario: Scenario, seeds: int, gap: float, trials: int, seed: int = 0) -> NDArray[np.float64]:
    """Return losses [trials, 1 + K, R, seeds], the baseline first, of true gap `gap` at the best rates of the grid."""
    rng = np.random.default_rng(seed)
    arms = 1 + scenario.recipes
    bottom = RATES // 2 + rng.uniform(-0.7, 0.7, (trials, arms, 1))
    mean = scenario.curvature * (np.arange(RATES) - bottom) ** 2  # [trials, arms, R]
    mean = mean - mean.min(-1, keepdims=True)
    mean[:, 1:] += gap
    shape = (trials, arms, RATES, seeds)
    noise = rng.standard_normal(shape) if np.isinf(scenario.tails) else rng.standard_t(scenario.tails, shape) / 3**0.5
    loud = np.array([scenario.baseline_noise, *[scenario.recipe_noise] * scenario.recipes])[:, None, None]
    return (
        mean[..., None] + 0.05 * rng.standard_normal((trials, 1, 1, seeds)) + scenario.pair_sd / 2**0.5 * loud * noise
    )


def errors(scenario: Scenario, seeds: int, gap: float, trials: int) -> dict[str, float]:
    """Return how often any recipe of a sweep is called lossy, and lossless, by three ways to judge.

    "split": as `compare --best-of`; "all": with `--choose-by all`, where all seeds choose and judge; "chosen": as
    "split", at the chosen rates alone, without the rest of the grid.
    """
    losses = grids(scenario, seeds, gap, trials)
    found = {}
    for way in ("split", "all", "chosen"):
        choosing = losses if way == "all" else losses[..., :1]
        judging = losses if way == "all" else losses[..., 1:]
        chosen = choosing.mean(-1).argmin(-1)
        best = np.take_along_axis(judging, chosen[..., None, None], -2)[..., 0, :]
        intervals = simultaneous_intervals(best[:, 1:] - best[:, :1])
        lossy, lossless = intervals.low > MARGIN, intervals.high < MARGIN
        inside = (chosen > 0) & (chosen < RATES - 1)  # a best at the end of the grid is refused
        if way != "chosen":
            bounds = grid_bounds(judging, chosen)
            lossy, lossless = lossy & bounds.lossy(MARGIN), lossless & bounds.lossless(MARGIN)
        both = inside[:, 1:] & inside[:, :1]
        found[f"{way} lossy"], found[f"{way} lossless"] = (
            float((each & both).any(-1).mean()) for each in (lossy, lossless)
        )
    return found


def table(trials: int) -> list[str]:
    """Return the rows of the table."""
    rows = [
        "| any of 2 recipes, in % of sweeps at 3 / 5 seeds | lossy at equal best losses | lossless at the margin | "
        "lossless at equal best losses |",
        "|---|---|---|---|",
    ]
    for scenario in SCENARIOS:
        cells = []
        for gap, what in ((0.0, "lossy"), (1.001 * MARGIN, "lossless"), (0.0, "lossless")):
            found = [errors(scenario, seeds, gap, trials) for seeds in (3, 5)]
            ways = ("split", "all", "chosen")
            cells.append("; ".join(" / ".join(f"{100 * each[f'{way} {what}']:.1f}" for each in found) for way in ways))
        rows.append(f"| {scenario.name} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    record({"rates": table}, TRIALS)
