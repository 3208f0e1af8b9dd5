"""Aims that a call closes with: met or not met, by the rows there are."""

from typing import NamedTuple

from gpu_check.journal import Journal

MODEL = "llama_1b"
MFU = f"{MODEL}, bf16: model FLOPs utilisation of"
"""How the rows begin that the first aim is judged by; behind it, whose step it is."""
NATIVE_STEP = f"{MODEL}, a step, bf16's time over native"
"""How the rows begin that the second aim is judged by; behind it, the recipe."""
MFU_PERCENT, NATIVE_RATIO = 55.0, 1.3


class Aim(NamedTuple):
    """A number that is aimed at, the check that measures it, and how its rows begin."""

    title: str
    check: str
    rows: str
    at_least: float
    unit: str


AIMS = (
    Aim("model FLOPs utilisation in bf16 at 1B on one GPU", "speed", MFU, MFU_PERCENT, "%"),
    Aim("native FP8 over bf16 at 1B", "speed", NATIVE_STEP, NATIVE_RATIO, "times"),
)


def closing(journal: Journal, checks: tuple[str, ...]) -> list[str]:
    """Return a line for each aim, and one on what a further call has left to do."""
    lines = [f"{journal.machine.device}, driver {journal.machine.driver}, torch {journal.machine.torch}, "
             f"Transformer Engine {journal.machine.transformer_engine or 'not installed'}"]  # fmt: skip
    lines += [_line(aim, journal) for aim in AIMS]
    rows = [row for check in checks for each in journal.results(check).values() for row in each]
    counts = {status: sum(row.status == status for row in rows) for status in ("cut off", "error", "off")}
    said = [f"{count} {status}" for status, count in counts.items() if count]
    lines.append(f"{len(rows)} rows{': ' if said else ''}{', '.join(said)}")
    if counts["cut off"]:
        lines.append("the next `make gpu-check` goes on with what was cut off")
    return lines


def _line(aim: Aim, journal: Journal) -> str:
    """Return whether an aim is met: by its best row, for one recipe or layout that reaches it is enough."""
    wanted = f"aim: {aim.title} >= {aim.at_least:g} {aim.unit}"
    rows = [row for each in journal.results(aim.check).values() for row in each if row.what.startswith(aim.rows)]
    measured = [row for row in rows if row.value is not None]
    if not measured:
        why = next((row.note for row in rows), "no row of it yet")
        return f"{wanted}: not measured ({why})"
    best = max(measured, key=lambda row: row.value or 0.0)
    behind = best.what.removeprefix(aim.rows).strip()
    verdict = "met" if (best.value or 0.0) >= aim.at_least else "not met"
    return f"{wanted}: {verdict}, {best.value:.4g} {aim.unit} ({behind})"
