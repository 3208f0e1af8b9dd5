"""Simulate CI jobs that repeat `compare --require lossless` until it is green.

Writes a table of docs/howto/gate_in_ci.md.

`python docs/internals/simulate_gates.py` takes seconds (4,000 series per cell). The true gap is the margin, so every
"lossless" is false. A job tries again with more seeds of its sweep, or with a new sweep, and stops at the first green.
"""

from pathlib import Path

import numpy as np
from simulated import record

from lightning_llm.compare.error_budget import Spending, spending_of, with_spending
from lightning_llm.compare.recorded_looks import RecordedLook
from lightning_llm.compare.requirement import Gate
from lightning_llm.compare.statistics.intervals import simultaneous_intervals
from lightning_llm.compare.terms import Terms

TERMS = Terms()
WAYS = ("more seeds", "new sweep")
PAIR_SD, FIRST_SEEDS, TRIALS = 0.005, 3, 4000
LOOKS = (1, 2, 4, 8)


def spendings(looks: int, planned: int | None) -> list[Spending]:
    """Return the spending of each look of one series, as `compare` decides it."""
    gate, budget, taken = Gate("lossless", looks=planned), 1 - TERMS.confidence, []
    found = []
    for number in range(looks):
        look = RecordedLook("", str(number), TERMS.margin, TERMS.confidence, TERMS.metric, 0.1, {"a": 3}, {"a": ""})
        found.append(spending_of(look, taken, gate, budget, Path()))
        taken.append(with_spending(look, found[-1]))
    return found


def false_lossless(
    again: str, looks: int, *, planned: int | None = None, budget: bool = True, trials: int = TRIALS, gap: float = 0.01
) -> float:
    """Return the share of series with a "lossless" at some look, with the true `gap`.

    `again`: "more seeds" adds a seed at each look, "new sweep" draws three new ones. Without `budget` each look has the
    confidence of a single one.
    """
    rng = np.random.default_rng(1)
    count = FIRST_SEEDS + looks - 1 if again == "more seeds" else FIRST_SEEDS * looks
    differences = gap + PAIR_SD * rng.standard_normal((trials, 1, count))
    green = np.zeros(trials, dtype=bool)
    for number, spending in enumerate(spendings(looks, planned)):
        if budget and spending.exhausted:
            continue
        seen = (
            differences[..., : FIRST_SEEDS + number]
            if again == "more seeds"
            else differences[..., FIRST_SEEDS * number : FIRST_SEEDS * (number + 1)]
        )
        confidence = 1 - spending.spent if budget else TERMS.confidence
        green |= simultaneous_intervals(seen, confidence).high[:, 0] < TERMS.margin
    return float(green.mean())


def gate_table(trials: int) -> list[str]:
    """Return the rows of the table of false "lossless" by the number of looks."""
    rows = ["| tries again with | error budget | " + " | ".join(f"{looks} looks" for looks in LOOKS) + " |"]
    rows.append("|---|---|" + "---|" * len(LOOKS))
    ways = (("none (95 % each)", False, None), ("half of the rest", True, None), ("equal parts", True, 0))
    for again in WAYS:
        for name, budget, planned in ways:
            rates = [
                false_lossless(again, looks, planned=looks if planned == 0 else None, budget=budget, trials=trials)
                for looks in LOOKS
            ]
            rows.append(f"| {again} | {name} | {' | '.join(f'{100 * rate:.1f}' for rate in rates)} |")
            print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    record({"gate-errors": gate_table}, TRIALS)
