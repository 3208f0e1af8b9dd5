"""Seconds of equally fast ranks, with the jitter of step times, light- and heavy-tailed.

`python tests/health/step_noise.py STEPS` prints how often `StragglerDetector` names one of 4, and after how many steps
it names one that computes 20 % longer.
"""

import sys
from collections.abc import Iterator
from statistics import median

import numpy as np

from lightning_llm.health.stragglers import PARTS, WAIT, Straggler, StragglerDetector

RANKS = 4
TAILS = {
    "normal": lambda rng, size: rng.standard_normal(size),
    "Student's t, 3 degrees of freedom": lambda rng, size: rng.standard_t(3, size),
    "Pareto, exponent 1.5 (no variance)": lambda rng, size: rng.pareto(1.5, size),
    "1 step in 50 three times as long": lambda rng, size: rng.standard_normal(size) + (rng.random(size) < 0.02) / 0.01,
}
"""Noise of a rank's own seconds, in units of the jitter."""


def clean_steps(
    tail: str, jitter: float, steps: int, seed: int, ranks: int = RANKS, slow: dict[int, float] | None = None
) -> Iterator[np.ndarray]:
    """Yield seconds [ranks, columns] as the detector takes them: 1 of computing, 0.01 of data, 0.02 of the rest.

    All steps vary in length by a tenth, as their texts do. `slow`: what ranks take times as long to compute.
    """
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        length = rng.uniform(0.95, 1.05)
        own = np.array([0.01, 1.0, 0.02]) * np.maximum(1 + jitter * TAILS[tail](rng, (ranks, len(PARTS))), 0.2)
        own[:, 1] *= length
        for rank, factor in (slow or {}).items():
            own[rank, 1] *= factor
        whole = own.sum(axis=1)
        yield np.concatenate([own, (whole.max() - whole + 0.05)[:, None]], axis=1)
        assert own.shape[1] == WAIT


def named(seconds: Iterator[np.ndarray], ranks: int = RANKS, **limits: float) -> list[tuple[int, Straggler]]:
    """Return the named ranks by step, from 1."""
    detector = StragglerDetector([range(ranks)], **limits)
    found = ((step, each) for step, row in enumerate(seconds, 1) for each in detector.take(step, row))
    return [(step, each) for step, each in found if not each.over]


def steps_to_name(tail: str, jitter: float, seed: int, most: int = 400) -> float:
    """Return after how many steps rank 1, 20 % slower, is named; infinity if not within `most`."""
    detector = StragglerDetector([range(RANKS)])
    for step, row in enumerate(clean_steps(tail, jitter, 60, seed), 1):
        detector.take(step, row)
    for step, row in enumerate(clean_steps(tail, jitter, most, seed + 1000, slow={1: 1.2}), 1):
        if any((each.rank, each.work) == (1, "compute") for each in detector.take(60 + step, row)):
            return step
    return float("inf")


if __name__ == "__main__":
    count = int(sys.argv[1])
    for tail in TAILS:
        for jitter in (0.01, 0.03, 0.1):
            alarms = len(named(clean_steps(tail, jitter, count, 0)))
            after = sorted(steps_to_name(tail, jitter, seed) for seed in range(21))
            print(
                f"{tail}, jitter {jitter:.0%}: {alarms / count * 1e4:.2f} names in 10,000 steps; 20 % slower: named "
                f"after {median(after):g} steps (of 21 runs, the slowest {after[-1]:g})",
                flush=True,
            )
