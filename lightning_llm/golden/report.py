"""Text of `golden record` and `golden check`."""

from pathlib import Path

from lightning_llm.golden.band import Band
from lightning_llm.golden.comparison import Changes, Check, Difference, band_facts, word
from lightning_llm.golden.curve import Curve
from lightning_llm.golden.file import Golden

SHOWN = 12
"""Number of differing keys listed; `--json` has all."""
QUANTITIES = {
    "loss": "the loss",
    "grad_norm": "the gradient norm of all parameters together",
    "lr": "the learning rate",
}


def recorded_lines(golden: Golden, file: Path, band: Band | None) -> list[str]:
    """Return lines about the recording, and about the comparisons it allows."""
    curve = golden.curve
    losses = f"loss {curve.loss[0]:.4f}" + (f" to {curve.loss[-1]:.4f}" if curve.steps > 1 else "")
    lines = [f"golden  {file}: {_size(curve)}, {losses}"]
    if golden.noise is None or band is None:
        return [
            *lines,
            "band    none: a check compares bits, and --repeats 5 --nudge measures a band for other machines",
        ]
    if golden.noise.mean is None:
        text = f"{golden.noise.runs} runs gave the same bits: a check compares bits"
        return [*lines, f"band    none: {text}; for other machines measure one by --nudge"]
    return [*lines, *band_lines(band)]


def band_lines(band: Band) -> list[str]:
    """Return lines about the runs and the width of a band."""
    facts = band_facts(band)
    nudged = ", all but the first with weights moved as far as sums round" if band.noise.nudged else ""
    median, largest = _share(facts["gradient_norm_median"]), _share(facts["gradient_norm_largest"])
    share, count = f"{facts['false_alarms']:.2g}", f"{facts['compared']:,}"
    return [
        f"band    of {facts['runs']} runs{nudged}: mean +- {facts['standard_deviations']:.3g} standard deviations",
        f"        relative: gradient norms {median} (median) to {largest}, losses up to {_share(facts['loss'])}",
        f"        at most {share} of checks of an unchanged program find one of {count} numbers outside",
    ]


def check_lines(check: Check, file: Path) -> list[str]:
    """Return lines about the outcome, the band, and everything else that differs from the recording."""
    lines = _outcome(check, file)
    if check.band is not None:
        lines += band_lines(check.band)
    lines += _changes("recipe", check.recipe) + _changes("layout", check.layout) + _changes("machine", check.machine)
    lines += _changes("code", check.code)
    if not (check.recipe or check.layout or check.machine or check.code):
        lines.append("same    recipe, layout, machine, versions and code are as recorded")
    if check.outcome == "different" and check.band is None and check.may_round_otherwise:
        lines.append(
            "note    this machine or layout may round otherwise, and then bits differ without a fault. Record with "
            "--repeats 5 --nudge for a band that allows for it, or record where you check"
        )
    return lines


def _outcome(check: Check, file: Path) -> list[str]:
    size = f"{check.steps} steps, {check.parameters} parameters"
    if check.first is None:
        if check.outcome == "equal":
            return [f"equal   {size}: the same bits as {file}"]
        return [f"within  {size}: not the same bits as {file}, and within its band"]
    return [f"DIFFERENT from {file} at step {check.first.step}: {_told(check.first)}", *_context(check)]


def _context(check: Check) -> list[str]:
    """Return lines about the other numbers of the first step that differs, and the likely place of the cause."""
    first = check.first
    if first is None or first.quantity in ("steps", "parameters"):
        return []
    if first.quantity == "gradient_norm":
        agrees = "equal" if check.band is None else "within the band"
        before = f"the loss of step {first.step} is {agrees}, and so are gradients nearer to it"
    elif first.quantity == "loss":
        before = "the forward pass, or an update before it, is another"
    else:
        before = "nothing before it in that step differs"
    return [f"        {before}; other numbers of that step that differ: {first.others}"]


def _told(first: Difference) -> str:
    if first.quantity == "steps":
        return "one of the two runs has no such step"
    if first.quantity == "parameters":
        return f"the parameter {first.parameter} is not in both"
    name = QUANTITIES.get(first.quantity) or f"the gradient norm of {first.parameter}"
    allowed = "must be equal"
    if first.allowed_from is not None and first.allowed_to is not None:
        allowed = f"{first.allowed_from:.9g} to {first.allowed_to:.9g} is allowed"
    off = "" if first.relative is None else f"relative difference {first.relative:.2g}, "
    return f"{name} is {_number(first.now)}, recorded {_number(first.recorded)} ({off}{allowed})"


def _changes(title: str, changes: Changes) -> list[str]:
    shown = list(changes.items())[:SHOWN]
    lines = [f"{title:<8}{key}: {word(then)} -> {word(now)}" for key, (then, now) in shown]
    more = len(changes) - len(shown)
    return [*lines, *([f"{title:<8}{more} more (--json has all)"] if more else [])]


def _size(curve: Curve) -> str:
    return f"{curve.steps} steps, {len(curve.gradient_norms)} parameters"


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.1e}"


def _number(value: float | None) -> str:
    return "none" if value is None else repr(value)
