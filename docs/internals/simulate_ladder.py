"""Simulate ladders and gaps in tokens: coverage of intervals, error rates of tests.

Records tables of docs/reference/error_rates.md.

`python docs/internals/simulate_ladder.py` takes a while (2,000 trials per cell, some 15 CPU minutes), and
`tests/ladder/test_coverage.py` holds fewer of the same to the same bounds, `make test-full` all of them.

The model of a ladder: the baseline's loss follows the law, every run has noise of its own and every pair has some, and
a recipe's gap has the three terms of the fit, without or with one that grows with tokens per parameter. What is
predicted is the recipe's gap a decade beyond in size and in tokens, where the truth is known.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special
from simulated import record

from lightning_llm.compare.effective_data import Curve, effective_data
from lightning_llm.ladder.fit import effect_at, fit_ladder
from lightning_llm.ladder.measured import Ladder, Rung
from lightning_llm.ladder.refusal import refusals

TRIALS = 2000
DRAWS = 200
SIZES, TOKENS = (240_000, 690_000, 1_100_000, 2_200_000), (33_000, 66_000, 131_000)
E, A, ALPHA, B, BETA = 1.5, 60.0, 0.30, 300.0, 0.45
"""Of the law that losses are drawn from: 5.7 nats at the smallest rung, 3.7 at the largest."""
TARGET = (22_000_000, 1_310_000)
COSTS = (0.03, 0.01, 0.0)
"""c_D, c_N, c_O of a recipe; its cost does not grow with tokens per parameter."""
GROWING = (0.03, 0.01, 0.03)


@dataclass(frozen=True)
class Noise:
    """`pair_sd`: of a pair's difference, nats; `run_sd`: of a baseline run; `tails`: degrees of freedom of both;
    `unequal`: how many times as loud the smallest size is as the largest; `rate`: at which a run diverges."""

    name: str
    pair_sd: float = 0.003
    run_sd: float = 0.01
    tails: float = np.inf
    unequal: float = 1.0
    rate: float = 0.0


NOISES = (
    Noise("normal"),
    Noise("heavy tails (t with 3 df)", tails=3),
    Noise("unequal: the smallest size 5 times as loud", unequal=5),
    Noise("unequal: the largest size 5 times as loud", unequal=0.2),
    Noise("every run diverges at 5 %", rate=0.05),
)


def drawn(noise: Noise, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray:
    """Return noise of unit variance."""
    if np.isinf(noise.tails):
        return rng.standard_normal(shape)
    return rng.standard_t(noise.tails, shape) / np.sqrt(noise.tails / (noise.tails - 2))


def true_gap(parameters: float, tokens: float, costs: tuple[float, float, float]) -> float:
    """Return the recipe's gap, nats per token."""
    terms = (B * tokens**-BETA, A * parameters**-ALPHA, tokens / parameters)
    return float(np.dot(costs, terms))


def true_more_tokens(parameters: float, tokens: float, costs: tuple[float, float, float]) -> float:
    """Return the share of tokens more that makes up for it."""
    return float((1 + true_gap(parameters, tokens, costs) / (B * tokens**-BETA)) ** (1 / BETA) - 1)


def simulated(
    noise: Noise, rng: np.random.Generator, seeds: int, costs: tuple[float, float, float], jump: float = 0.0
) -> Ladder:
    """Return one ladder; `jump`: nats added to the gap at the largest size, a change of phase."""
    rungs = []
    loud = np.geomspace(noise.unequal, 1.0, len(SIZES)) if noise.unequal >= 1 else np.geomspace(1, 1 / noise.unequal, 4)
    for place, size in enumerate(SIZES):
        for tokens in TOKENS:
            level = E + A * size**-ALPHA + B * tokens**-BETA
            losses = level + noise.run_sd * drawn(noise, rng, (seeds,))
            gap = true_gap(size, tokens, costs) + jump * (place == len(SIZES) - 1)
            differences = gap + loud[place] * noise.pair_sd * drawn(noise, rng, (seeds,))
            sound = rng.random((2, seeds)) >= noise.rate
            kept = {seed: float(losses[seed]) for seed in range(seeds) if sound[0, seed]}
            pairs = {seed: float(differences[seed]) for seed in kept if sound[1, seed]}
            if kept:
                rungs.append(Rung(size, tokens, kept, {"recipe": pairs}))
    return Ladder("baseline", "val_loss", rungs)


@dataclass(frozen=True)
class Errors:
    """Over trials: how often the interval of `more_tokens` holds the truth on the ladder's largest rung and a decade
    beyond, growth is found at 5 %, and a prediction is refused."""

    on_ladder: float
    beyond: float
    grows: float
    refused: float


def errors(
    noise: Noise, seeds: int, trials: int, costs: tuple[float, float, float] = COSTS, jump: float = 0.0,
    refuse: bool = True,
) -> Errors:  # fmt: skip
    """Return the rates over `trials` ladders; without `refuse` the refusals, which fit once more, are left out."""
    rng = np.random.default_rng(0)
    found = []
    for trial in range(trials):
        fit = fit_ladder(simulated(noise, rng, seeds, costs, jump), DRAWS, seed=trial)
        row = []
        for place in ((SIZES[-1], TOKENS[-1]), TARGET):
            effect = effect_at(fit, "recipe", *place)
            row.append(effect.low <= true_more_tokens(*place, costs) <= effect.high)
        row.append(fit.gaps["recipe"].growth[1] < 0.05)
        row.append(bool(refuse and refusals(fit, "recipe")))
        found.append(row)
    return Errors(*map(float, np.mean(found, axis=0)))


def effective_coverage(
    noise: Noise, seeds: int, ratio: float, trials: int, run_sd: float = 0.01
) -> tuple[float, float]:
    """Return how often the interval of effective data holds the true `ratio`, and how often a jackknife's does."""
    rng = np.random.default_rng(0)
    counts = np.array([0.5, 1.0, 2.0])
    at = TOKENS[1]
    quantile = float(special.stdtrit(seeds - 1, 0.975))
    held, jackknife = [], []
    for _ in range(trials):
        seed_effect = 0.02 * rng.standard_normal((seeds, 1))
        losses = E + B * (counts * at) ** -BETA + seed_effect + run_sd * drawn(noise, rng, (seeds, 3))
        recipe = E + B * (ratio * at) ** -BETA + seed_effect[:, 0] + noise.pair_sd * drawn(noise, rng, (seeds,))
        every = range(seeds)

        def judged(kept: list[int], losses: NDArray = losses, recipe: NDArray = recipe) -> tuple[float, float, float]:
            curve = Curve((0.5, 1.0, 2.0), {seed: losses[seed] for seed in kept}, 1.0)
            found = effective_data({seed: float(recipe[seed]) for seed in kept}, curve)
            return (found.ratio, found.low, found.high) if found else (np.nan,) * 3

        whole, low, high = judged(list(every))
        held.append(low <= ratio <= high)
        with np.errstate(divide="ignore", invalid="ignore"):
            left_out = np.log([judged([each for each in every if each != seed])[0] for seed in every])
            pseudo = seeds * np.log(whole) - (seeds - 1) * left_out
            error = pseudo.std(ddof=1) / seeds**0.5
        jackknife.append(bool(abs(pseudo.mean() - np.log(ratio)) <= quantile * error))
    return float(np.mean(held)), float(np.mean(jackknife))


def ladder_table(trials: int) -> list[str]:
    """Return the rows of the table of ladders."""
    rows = [
        "| noise | seeds | interval holds on the largest rung | a decade beyond | grows, though it does not | refused, "
        "though sound | refused at a jump of 0.03 |",
        "|---|---|---|---|---|---|---|",
    ]
    for noise in NOISES:
        for seeds in (2, 3):
            sound, jump = errors(noise, seeds, trials), errors(noise, seeds, trials, jump=0.03)
            cells = (sound.on_ladder, sound.beyond, sound.grows, sound.refused, jump.refused)
            rows.append(f"| {noise.name} | {seeds} | {' | '.join(f'{100 * each:.1f}' for each in cells)} |")
            print(rows[-1], flush=True)
    return rows


def effective_table(trials: int) -> list[str]:
    """Return the rows of the table of effective data."""
    rows = [
        "| noise | true ratio | 2, 3, 5 seeds | jackknife: 2, 3, 5 seeds |",
        "|---|---|---|---|",
    ]
    loud = Noise("baseline as loud as a third of its slope", pair_sd=0.05)
    for noise, run_sd in ((NOISES[0], 0.01), (NOISES[1], 0.01), (loud, 0.1)):
        for ratio in (0.98, 0.8, 1.1):
            cells = [effective_coverage(noise, seeds, ratio, trials, run_sd) for seeds in (2, 3, 5)]
            ours, theirs = (" / ".join(f"{100 * cell[place]:.1f}" for cell in cells) for place in (0, 1))
            rows.append(f"| {noise.name} | {ratio} | {ours} | {theirs} |")
            print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    record({"ladders": ladder_table, "effective-data": effective_table}, TRIALS)
