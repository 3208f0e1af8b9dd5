"""Comparison of a golden curve with the same steps run again: equal, within the band, or different, and where first."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lightning_llm.base.errors import Problem
from lightning_llm.config.config_hash import below
from lightning_llm.golden.band import Band
from lightning_llm.golden.curve import GRAD_NORM, GRADIENT_NORMS, LEARNING_RATE, LOSS, Curve, same
from lightning_llm.golden.file import Golden, is_bitwise_key
from lightning_llm.tracking.provenance import FINGERPRINT, origin_changes

Outcome = Literal["equal", "within_band", "different"]
Changes = dict[str, tuple[Any, Any]]
"""{key: (recorded, now)}, None where one has none."""
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
        """Return it for JSON."""
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
    """Return a band as data: its runs and settings, and its width relative to the numbers."""
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
    """Return the recipe keys (`file.recipe_keys`) of `config` that differ from the recorded ones."""
    return _unequal(recorded.config, config)


def recipe_problems(changes: Changes, file: str) -> list[Problem]:
    """Return problems that make a check refuse another recipe."""
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
    """Return a value as text."""
    return "none" if value is None else str(value)
