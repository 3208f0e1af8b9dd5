"""Curves as trainers log them, with known gaps, for tests of verdicts over logs."""

from collections.abc import Callable, Sequence

import numpy as np

Frame = dict[str, np.ndarray]
Curves = dict[str, dict[int, Frame]]


def frame(
    gap: float, seed: int, points: int = 200, kind: str = "loss", noise: float = 0.02, sd: float = 0.002
) -> Frame:
    """Return {"step", kind}: a power law, batch noise of the seed, and noise of the run.

    `gap` in nats shifts the curve; `sd` of a run's level, in nats.
    """
    steps = 10.0 * np.arange(1, points + 1)
    of_seed = np.random.default_rng(seed).standard_normal(points)
    of_run = np.random.default_rng((seed, round(gap * 1e5) + 7))
    own = 0.15 * noise * of_run.standard_normal(points) + sd * of_run.standard_normal()
    return {"step": steps, kind: 2.2 + 8 * (steps + 20) ** -0.45 + gap + noise * of_seed + own}


def curves(gap: float = 0.0005, seeds: Sequence[int] = range(4), **settings: object) -> Curves:
    """Return the curves of the arms bf16 and fp8, which is worse by `gap` nats."""
    arms = {"bf16": 0.0, "fp8": gap}
    return {arm: {seed: frame(shift, seed, **settings) for seed in seeds} for arm, shift in arms.items()}  # type: ignore[arg-type]


def changed(found: Curves, change: Callable[[Frame], Frame], which: Sequence[tuple[str, int]]) -> Curves:
    """Return `found` with the frames of `which` (arm, seed) changed."""
    return {
        arm: {seed: change(each) if (arm, seed) in which else each for seed, each in frames.items()}
        for arm, frames in found.items()
    }


def write_csv(found: Curves, folder, decimals: int = 4) -> list[str]:
    """Write each frame to ARM-SEED.csv in `folder`; return the arguments ARM/SEED=PATH."""
    words = []
    for arm, frames in found.items():
        for seed, each in frames.items():
            path = folder / f"{arm}-{seed}.csv"
            rows = (",".join(f"{value:.{decimals}f}" for value in row) for row in zip(*each.values(), strict=True))
            path.write_text("\n".join([",".join(each), *rows]) + "\n")
            words.append(f"{arm}/{seed}={path}")
    return words
