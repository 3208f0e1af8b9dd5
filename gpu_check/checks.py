"""The checks, most important first in case a call is cut off; their inputs, and targets for their rows."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gpu_check.journal import Clock, Journal

TOTAL_SECONDS = 645.0
"""Seconds for the wheels and all checks, slightly less than eleven minutes, because ending a check takes time, too."""


class Check(NamedTuple):
    """One check. `module`: its function `items(call)` returns what is measured.

    `share`: its seconds of a whole call. `needs`: modules that it imports.
    """

    title: str
    module: str
    share: float
    needs: tuple[str, ...]


MODEL_PACKAGES = ("torch", "pydantic", "yaml")
RUN_PACKAGES = (
    *MODEL_PACKAGES, "lightning", "hydra", "omegaconf", "platformdirs", "safetensors", "psutil", "rich", "matplotlib",
)  # fmt: skip
CHECKS = {
    "agreement": Check(
        "native against emulated: codes, products, parts on two ranks", "gpu_check.agreement", 160, MODEL_PACKAGES
    ),
    "speed": Check("a 1B model: train, a hand-written loop, native FP8", "gpu_check.speed", 160, MODEL_PACKAGES),
    "emulation": Check("each emulated recipe's time over bf16's", "gpu_check.emulation", 120, MODEL_PACKAGES),
    "memory": Check("peak memory of runs relative to plan", "gpu_check.memory", 75, RUN_PACKAGES),
    "curves": Check("loss curves of every native recipe against bf16's", "gpu_check.curves", 105, RUN_PACKAGES),
    "steps": Check("tests marked gpu, and steps of every recipe", "gpu_check.steps", 25, MODEL_PACKAGES),
}


def seconds_for(name: str, names: list[str], left: float) -> float:
    """Return the seconds of those `left` that check `name` may take: its share among itself and the following checks.

    Time that a check does not use is left to the others. `names`: the checks of this call, in order.
    """
    remaining = names[names.index(name) :]
    return left * CHECKS[name].share / sum(CHECKS[each].share for each in remaining)


@dataclass(frozen=True)
class Call:
    """Inputs of a check.

    `journal`: existing rows, including those of other checks. `clock`: the time left for the check. `scratch`: a folder
    that is deleted after the check.
    """

    journal: Journal
    clock: Clock
    scratch: Path


MODEL = "llama_1b"
MFU = f"{MODEL}, bf16: model FLOPs utilisation of"
"""Prefix of the rows for the first target, followed by the kind of step."""
NATIVE_STEP = f"{MODEL}, a step, bf16's time over native"
"""Prefix of the rows for the second target, followed by the recipe."""
MFU_PERCENT, NATIVE_RATIO = 55.0, 1.3


class Target(NamedTuple):
    """A required number: `check` measures it, in rows that begin with `rows`; it must be `at_least` so many `unit`."""

    title: str
    check: str
    rows: str
    at_least: float
    unit: str


TARGETS = (
    Target("model FLOPs utilisation in bf16 at 1B on one GPU", "speed", MFU, MFU_PERCENT, "%"),
    Target("native FP8 over bf16 at 1B", "speed", NATIVE_STEP, NATIVE_RATIO, "times"),
)


def closing(journal: Journal, checks: tuple[str, ...]) -> list[str]:
    """Return the last lines of a call: the machine, a line for each target, the number of rows, remaining work."""
    lines = [f"{journal.machine.device}, driver {journal.machine.driver}, torch {journal.machine.torch}, "
             f"Transformer Engine {journal.machine.transformer_engine or 'not installed'}"]  # fmt: skip
    lines += [_line(target, journal) for target in TARGETS]
    rows = [row for check in checks for each in journal.results(check).values() for row in each]
    counts = {status: sum(row.status == status for row in rows) for status in ("cut off", "error", "off")}
    said = [f"{count} {status}" for status, count in counts.items() if count]
    lines.append(f"{len(rows)} rows{': ' if said else ''}{', '.join(said)}")
    if counts["cut off"]:
        lines.append("the next `make gpu-check` continues with the items that were cut off")
    return lines


def _line(target: Target, journal: Journal) -> str:
    """Return whether a target is met, by its best row: one recipe or kind of step that reaches it is enough."""
    wanted = f"target: {target.title} >= {target.at_least:g} {target.unit}"
    rows = [row for each in journal.results(target.check).values() for row in each if row.what.startswith(target.rows)]
    measured = [row for row in rows if row.value is not None]
    if not measured:
        why = next((row.note for row in rows), "no rows yet")
        return f"{wanted}: not measured ({why})"
    best = max(measured, key=lambda row: row.value or 0.0)
    behind = best.what.removeprefix(target.rows).strip()
    verdict = "met" if (best.value or 0.0) >= target.at_least else "not met"
    return f"{wanted}: {verdict}, {best.value:.4g} {target.unit} ({behind})"
