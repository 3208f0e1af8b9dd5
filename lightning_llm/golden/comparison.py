"""Comparison of a golden curve with the same steps run again: equal, within the band, or different; and its text."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_llm.base.errors import Problem
from lightning_llm.config.config_hash import below
from lightning_llm.golden.curve import GRAD_NORM, GRADIENT_NORMS, LEARNING_RATE, LOSS, Band, Curve, same
from lightning_llm.golden.file import Golden, is_bitwise_key
from lightning_llm.tracking.provenance import FINGERPRINT, origin_changes

Outcome = Literal["equal", "within_band", "different"]
Changes = dict[str, tuple[Any, Any]]
"""{dotted key: (recorded value, value now)}; None for a value that is missing on one side."""
CHANGES_BITS = (
    "versions.torch", "versions.transformer-engine", "device", "threads", "compiled", "backend", f"{FINGERPRINT}."
)  # fmt: skip
"""Keys of a recording's origin that may change rounding without an error."""
CHANGES_NO_BITS = (f"{FINGERPRINT}.os",)
INPUTS = ("data_hash", "init_digest", "teachers")
"""Keys of a recording's origin that belong to the recipe."""
CODE, NOT_TOLD = "code_hash", ("validation_hash",)


@dataclass(frozen=True)
class Difference:
    """The first number that differs from the recorded one. `step` is counted from 1.

    `quantity`: "loss", "gradient_norm" of `parameter`, "grad_norm" (of all together), "lr"; "steps" or "parameters" if
    the curves do not have the same ones. `allowed_from`, `allowed_to`: the band; None if bits must be equal.
    `others`: how many more numbers of that step differ.
    """

    step: int
    quantity: str
    parameter: str | None = None
    recorded: float | None = None
    now: float | None = None
    allowed_from: float | None = None
    allowed_to: float | None = None
    others: int = 0

    @property
    def relative(self) -> float | None:
        """|now - recorded| / |recorded|; None if a value is missing or the ratio is not finite."""
        if self.recorded is None or self.now is None or not self.recorded:
            return None
        ratio = abs(self.now - self.recorded) / abs(self.recorded)
        return ratio if math.isfinite(ratio) else None


@dataclass(frozen=True)
class Check:
    """Result of a check. `first` is None unless `outcome` is "different"; `band` is None if bits were compared.

    `machine`: changed versions, device and fingerprint; `code`, `layout`, `recipe`: other differences from the
    recording. `may_round_otherwise`: whether a change of the machine or the layout may change bits.
    """

    outcome: Outcome
    steps: int
    parameters: int
    first: Difference | None = None
    band: Band | None = None
    machine: Changes = field(default_factory=dict)
    code: Changes = field(default_factory=dict)
    layout: Changes = field(default_factory=dict)
    recipe: Changes = field(default_factory=dict)
    may_round_otherwise: bool = False

    def as_data(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        first = self.first and {**_spelled(asdict(self.first)), "relative_difference": self.first.relative}
        changes = {name: getattr(self, name) for name in ("machine", "code", "layout", "recipe")}
        return {
            "outcome": self.outcome,
            "steps": self.steps,
            "parameters": self.parameters,
            "first_difference": first,
            "band": self.band and band_facts(self.band),
            "may_round_otherwise": self.may_round_otherwise,
            "differences": {name: {key: list(pair) for key, pair in its.items()} for name, its in changes.items()},
        }


def band_facts(band: Band) -> dict[str, Any]:
    """Return the facts of a band as JSON data: its runs, its settings, and its width relative to the numbers."""
    norms, losses = band.gradient_norm_widths, band.widths(LOSS)
    return {
        "runs": band.noise.runs,
        "nudged": band.noise.nudged,
        "false_alarms": band.false_alarms,
        "compared": band.compared,
        "standard_deviations": band.deviations,
        "loss": losses[-1] if losses else None,
        "gradient_norm_median": norms[len(norms) // 2] if norms else None,
        "gradient_norm_largest": norms[-1] if norms else None,
    }


def recipe_changes(recorded: Golden, config: Mapping[str, Any]) -> Changes:
    """Return the recipe keys of `config` (as `file.recipe_keys` returns them) that differ from the recorded ones."""
    return _unequal(recorded.config, config)


def recipe_problems(changes: Changes, file: str) -> list[Problem]:
    """Return a problem for each changed recipe key: a check rejects another recipe. `file`: name of the golden file."""
    text = (
        "is {}, and {} in {}: another recipe. Set it back, record a golden file of this one, or compare all the "
        "same: --allow-differences."
    )
    return [Problem(key, text.format(word(now), word(then), file)) for key, (then, now) in changes.items()]


def input_changes(recorded: Golden, now: Golden) -> Changes:
    """Return the inputs of `now` that differ from the recorded ones: data, initial weights and teachers."""
    changes = origin_changes(recorded.origin, now.origin)
    return {key: pair for key, pair in changes.items() if key in INPUTS}


def compare(recorded: Golden, now: Golden, band: Band | None, *, prefer_band: bool = False) -> Check:
    """Compare `now` with the recording: by bits and, if these differ and are allowed to, within `band`.

    Bits may differ if the recording's own repeats differed, or if the machine or the layout may change them;
    `prefer_band` always allows it.
    """
    changes = origin_changes(recorded.origin, now.origin)
    told = {key: pair for key, pair in changes.items() if key not in (*NOT_TOLD, *INPUTS, CODE)}
    layout = _unequal(recorded.layout, now.layout)
    found: dict[str, Any] = {
        "machine": told,
        "code": {key: pair for key, pair in changes.items() if key == CODE},
        "layout": layout,
        "recipe": _unequal(recorded.config, now.config) | input_changes(recorded, now),
        "may_round_otherwise": any(map(_changes_bits, told)) or _other_sums(recorded, now, layout),
    }
    sizes = recorded.curve.steps, len(recorded.curve.gradient_norms)
    first = first_difference(recorded.curve, now.curve, None)
    if first is None:
        return Check("equal", *sizes, **found)
    if band is None or band.noise.mean is None:
        return Check("different", *sizes, first, **found)
    if not (prefer_band or not band.noise.nudged or found["may_round_otherwise"]):
        return Check("different", *sizes, first, **found)
    first = first_difference(recorded.curve, now.curve, band)
    return Check("within_band" if first is None else "different", *sizes, first, band, **found)


def first_difference(recorded: Curve, now: Curve, band: Band | None) -> Difference | None:
    """Return the first number of `now` that differs from the recorded one, or is outside `band`; None if none does.

    "First" is the order in which a step computes the numbers; gradient norms run from the head to the embedding.
    """
    then, here = recorded.series, now.series
    if odd := then.keys() ^ here.keys():
        name = min(odd).removeprefix(f"{GRADIENT_NORMS}.")
        return Difference(1, "parameters", name, others=len(odd) - 1)
    agrees = _agreement(band)
    for step in range(min(recorded.steps, now.steps)):
        names = [name for name in then if not agrees(name, step, then[name][step], here[name][step])]
        if names:
            allowed = None if band is None else band.interval(names[0], step)
            low, high = (None, None) if allowed is None else (allowed[0] - allowed[1], allowed[0] + allowed[1])
            numbers = then[names[0]][step], here[names[0]][step]
            return Difference(step + 1, *_named(names[0]), *numbers, low, high, len(names) - 1)
    if recorded.steps != now.steps:
        return Difference(min(recorded.steps, now.steps) + 1, "steps")
    return None


def _agreement(band: Band | None) -> Callable[[str, int, float, float], bool]:
    def agrees(name: str, step: int, then: float, now: float) -> bool:
        allowed = None if band is None else band.interval(name, step)
        if allowed is None or same(then, now):
            return same(then, now)
        return abs(now - allowed[0]) <= allowed[1]

    return agrees


def _named(name: str) -> tuple[str, str | None]:
    """Return (quantity, parameter) of a series' name."""
    if name in (LOSS, GRAD_NORM, LEARNING_RATE):
        return name, None
    return "gradient_norm", name.removeprefix(f"{GRADIENT_NORMS}.")


def _changes_bits(key: str) -> bool:
    return below(key, CHANGES_BITS) and not below(key, CHANGES_NO_BITS)


def _other_sums(recorded: Golden, now: Golden, layout: Changes) -> bool:
    """Return whether the layouts may change bits; false if both give the same bits as one rank."""
    both = recorded.bitwise and now.bitwise
    return any(not (both and is_bitwise_key(key)) for key in layout)


def _unequal(then: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    keys = sorted(then.keys() | now.keys())
    return {key: (then.get(key), now.get(key)) for key in keys if then.get(key) != now.get(key)}


def _spelled(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with numbers that are not finite as "nan", "inf", "-inf", as records have them."""
    return {
        key: str(each) if isinstance(each, float) and not math.isfinite(each) else each for key, each in values.items()
    }


def word(value: Any) -> str:
    """Return a config value as text, "none" for a missing one."""
    return "none" if value is None else str(value)


SHOWN = 12
"""Number of differing keys listed; `--json` has all."""
QUANTITIES = {
    "loss": "the loss",
    "grad_norm": "the gradient norm of all parameters together",
    "lr": "the learning rate",
}


def recorded_lines(golden: Golden, file: Path, band: Band | None) -> list[str]:
    """Return the text of `golden record`: the file, its losses, and whether checks compare bits or within a band."""
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
    """Return lines about a band: the number of runs behind it, and its width."""
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
    """Return the text of `golden check`: the outcome, the band, and everything that differs from the recording."""
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
