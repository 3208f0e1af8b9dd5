"""How the gap moves with what varies beside the recipe: model size, tokens, a rate, any number of the settings."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.report.panels import Interval, interval_of
from lightning_llm.compare.statistics.intervals import Decision
from lightning_llm.compare.verdict import Verdict
from lightning_llm.compare.wording import short

PARAMETERS, TOKENS = "parameters", "tokens"
TOKEN_KEYS = ("trainer.max_steps", "schedule.", "data.global_batch_size", "data.sequence_length")
"""Of a setting: what a number of tokens is made of, or follows from it."""


@dataclass(frozen=True)
class TrendPoint:
    """A verdict at `x`; `floor`: the A/A floor there, `margin`: what it was held against, nats."""

    x: float
    interval: Interval
    decision: Decision
    floor: float | None
    margin: float


@dataclass(frozen=True)
class TrendLine:
    """One recipe's verdicts, ascending in `x`."""

    name: str
    points: tuple[TrendPoint, ...]


@dataclass(frozen=True)
class Trend:
    """The gap over one quantity, `key`, where all else (`setting`, in words) is the same or follows from it."""

    key: str
    label: str
    setting: str
    lines: tuple[TrendLine, ...]

    @property
    def xs(self) -> list[float]:
        """Where there are points."""
        return sorted({point.x for line in self.lines for point in line.points})


@dataclass(frozen=True)
class Quantity:
    """What can be an axis: `values`: {verdict's id: x}; `prefixes`: of the keys of a setting that it stands for."""

    key: str
    label: str
    values: Mapping[int, float]
    prefixes: tuple[str, ...]

    def owns(self, name: str) -> bool:
        """Whether a key of a setting is a part of it."""
        return name.startswith(self.prefixes)


def trends(comparison: Comparison) -> list[Trend]:
    """Return a trend for each quantity of which two values or more were judged, and each combination of the others.

    Where no two verdicts have all else the same, what has one value at each of the quantity's may move with it (a rate
    that was chosen for each size); and over sizes whose tokens grow with them, lines are at as many per parameter.
    """
    verdicts = comparison.verdicts
    settings = {id(verdict): verdict.family.setting for verdict in verdicts}
    found: list[Trend] = []
    for quantity in _quantities(verdicts, settings):
        rest = [name for name in _varying(settings.values()) if not quantity.owns(name)]
        own = _panels(verdicts, quantity, _words(verdicts, rest))
        if not own:
            rest = [name for name in rest if not _follows(name, quantity.values, settings)]
            own = _panels(verdicts, quantity, _words(verdicts, rest))
        if not own and quantity.key == PARAMETERS:
            words = _words(verdicts, [name for name in rest if not name.startswith(TOKEN_KEYS)])
            own = _panels(verdicts, quantity, {id(each): (*words[id(each)], _per_parameter(each)) for each in verdicts})
        found += own
    return found


def _panels(verdicts: Sequence[Verdict], quantity: Quantity, words: Mapping[int, tuple[str, ...]]) -> list[Trend]:
    """Return a trend for each of `words`, {verdict's id: what is the same along a line}, that has two values of x."""
    panels: dict[tuple[str, ...], dict[str, list[TrendPoint]]] = {}
    for verdict in verdicts:
        if id(verdict) in quantity.values:
            x = quantity.values[id(verdict)]
            point = TrendPoint(x, interval_of(verdict), verdict.colour, verdict.floor.sd, verdict.terms.margin)
            panels.setdefault(words[id(verdict)], {}).setdefault(verdict.name, []).append(point)
    made = [
        Trend(
            quantity.key,
            quantity.label,
            ", ".join(setting),
            tuple(TrendLine(name, tuple(sorted(points, key=lambda point: point.x))) for name, points in lines.items()),
        )
        for setting, lines in panels.items()
    ]
    return [trend for trend in made if len(trend.xs) > 1]


def _words(verdicts: Sequence[Verdict], names: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """Return {verdict's id: its values of the keys `names`, in words}: a model by its size where that says which."""
    plain = {id(each): tuple(f"{name}={each.family.setting.get(name)}" for name in names) for each in verdicts}
    short_words = {id(each): tuple(_short_words(each, names)) for each in verdicts}
    return short_words if len({*short_words.values()}) == len({*plain.values()}) else plain


def _short_words(verdict: Verdict, names: Sequence[str]) -> Iterator[str]:
    if any(name.startswith("model.") for name in names):
        yield f"{short(verdict.parameters)} parameters"
    if any(name.startswith(TOKEN_KEYS) for name in names):
        yield f"{short(verdict.tokens)} tokens"
    for name in names:
        if not name.startswith(("model.", *TOKEN_KEYS)):
            yield f"{name}={verdict.family.setting.get(name)}"


def _per_parameter(verdict: Verdict) -> str:
    return f"{(verdict.tokens or 0) / (verdict.parameters or 1):.2g} tokens per parameter"


def _quantities(verdicts: Sequence[Verdict], settings: Mapping[int, Mapping[str, Any]]) -> list[Quantity]:
    """Return what can be an axis: it is a number at every verdict, and has two values."""
    sizes = {id(each): float(each.parameters) for each in verdicts if each.parameters}
    tokens = {id(each): float(each.tokens) for each in verdicts if each.tokens}
    found = [
        Quantity(PARAMETERS, "parameters of the model", sizes, ("model.",)),
        Quantity(TOKENS, "training tokens", tokens, TOKEN_KEYS),
    ]
    for key in _varying(settings.values()):
        values = {of: setting.get(key) for of, setting in settings.items()}
        numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in values.values())
        if numbers and not key.startswith(("model.", *TOKEN_KEYS)):
            found.append(Quantity(key, key, {of: float(value or 0.0) for of, value in values.items()}, (key,)))
    return [each for each in found if len({*each.values.values()}) > 1]


def _varying(settings: Iterable[Mapping[str, Any]]) -> list[str]:
    settings = list(settings)
    keys = sorted({key for setting in settings for key in setting})
    return [key for key in keys if len({str(setting.get(key)) for setting in settings}) > 1]


def _follows(name: str, values: Mapping[int, float], settings: Mapping[int, Mapping[str, Any]]) -> bool:
    """Whether a key of the settings has one value at each value of the quantity, and so does not split a line."""
    at: dict[float, set[str]] = {}
    for of, x in values.items():
        at.setdefault(x, set()).add(str(settings[of].get(name)))
    return all(len(found) == 1 for found in at.values())
