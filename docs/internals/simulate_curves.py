"""Simulate logs of trainers: false "lossless" verdicts with the gap at the margin, and ordinary logs that are refused.

    .venv/bin/python docs/internals/simulate_curves.py [COMPARISONS]

Each comparison has an arm and a baseline of 4 seeds, the noise of batches in common, and the margin as true gap. Logs
differ in length, decimals, noise, trend and kind of loss. `lossless` must be near 2.5 %, `refused` near 0.
"""

import sys
from collections import Counter
from itertools import product

import numpy as np

from lightning_llm.api import compare
from lightning_llm.base.errors import ConfigError

MARGIN, SEEDS = 0.01, 4
KINDS = [
    *product(("loss",), (50, 200, 1000), ("power", "linear", "decay"), (0.005, 0.05), (4,)),
    *product(("val_loss",), (5, 20, 100), ("power", "decay"), (0.001, 0.003), (3, 4)),
]
"""(column, points, trend, SD of the noise from point to point, decimals)."""


def trend(name: str, points: int) -> np.ndarray:
    """Return a falling loss, [points]: a power law, a line, or a power law with a linear decay of the rate."""
    share = np.arange(1, points + 1) / points
    if name == "linear":
        return 5 - 2 * share
    return 2.2 + 8 * (2000 * share + 20) ** -0.45 - 0.15 * (name == "decay") * np.clip(5 * share - 4, 0, 1)


def outcome(rng: np.random.Generator, column: str, points: int, shape: str, noise: float, decimals: int) -> str:
    """Return the decision over simulated logs, or "refused"."""
    level = rng.normal(0, 0.004, (2, SEEDS))
    batches = rng.normal(0, noise, (SEEDS, points))
    logs: dict[str, dict[int, dict[str, np.ndarray]]] = {"bf16": {}, "arm": {}}
    for at, (arm, gap) in enumerate((("bf16", 0.0), ("arm", MARGIN))):
        for seed in range(SEEDS):
            own = rng.normal(0, 0.2 * noise, points) + level[at, seed]
            losses = np.round(trend(shape, points) + gap + batches[seed] + own, decimals)
            logs[arm][seed] = {"step": 10.0 * np.arange(1, points + 1), column: losses}
    try:
        return compare(curves=logs, baseline="bf16", margin=MARGIN, quiet=True).verdicts[0].decision
    except ConfigError as error:
        return f"refused ({error.problems[0].text[:60]})"


def main() -> None:
    """Print the shares of all outcomes over all kinds of logs."""
    each = int(sys.argv[1]) // len(KINDS) + 1 if len(sys.argv) > 1 else 60
    rng = np.random.default_rng(0)
    found = Counter(outcome(rng, *kind) for kind in KINDS for _ in range(each))
    for name, count in sorted(found.items()):
        print(f"{name:72} {100 * count / sum(found.values()):5.1f} % of {sum(found.values())}")


if __name__ == "__main__":
    main()
