"""Data of the report's pictures, without drawing: gaps, curves, losses, speeds, and gaps over a quantity."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.format import short
from lightning_llm.compare.runs.pairing import ComparisonGroup, Pair
from lightning_llm.compare.statistics.intervals import Decision
from lightning_llm.compare.statistics.paired_curves import Curve, difference, kept_pairs, paired_curves
from lightning_llm.compare.terms import Terms
from lightning_llm.compare.verdict import Verdict
from lightning_llm.tracking.reading import Run


@dataclass(frozen=True)
class Frame:
    """Properties that the pictures of a comparison share: the baseline's name, the margin and its unit, the confidence.

    `margin`: nats; for several settings with margins in tokens the smallest, which scales an axis (rows and points have
    their own). `looks`: number of declared looks over which intervals are simultaneous; 0 without declared looks.
    """

    baseline: str
    margin: float
    unit: str
    metric: str
    confidence: float
    margin_text: str
    looks: int = 0

    @property
    def level(self) -> str:
        """The confidence of the verdicts as text: "95 %", "95 % repeated" with declared looks."""
        return f"{100 * self.confidence:g} %{' repeated' if self.looks else ''}"

    @property
    def gap_label(self) -> str:
        """The label of an axis of gaps, with their unit."""
        return f"gap to {self.baseline} ({self.unit})"


@dataclass(frozen=True)
class Interval:
    """A `gap` with its interval [`low`, `high`], which are NaN with a single pair; all are NaN without a pair."""

    gap: float
    low: float
    high: float

    @property
    def bounded(self) -> bool:
        """True if the interval is known, not only the gap."""
        return math.isfinite(self.low) and math.isfinite(self.high)


@dataclass(frozen=True)
class ForestRow:
    """One row of a forest plot: a verdict with its interval.

    `seeds`, `outliers`: {seed: difference, nats} of the pairs in the gap and of outliers; `floor`: the A/A floor (noise
    of runs that differ only in rounding), None if unknown; `margin`: nats.
    """

    name: str
    setting: str
    decision: Decision
    qualified: str
    interval: Interval
    seeds: dict[int, float]
    outliers: dict[int, float]
    diverged_seeds: tuple[int, ...]
    floor: float | None
    margin: float


@dataclass(frozen=True)
class SeedLine:
    """The difference of one seed along the run: `gap` after so many `tokens`.

    `fate`: "" for a seed in the gap, else "outlier" or "diverged".
    """

    seed: int
    tokens: tuple[int, ...]
    gap: tuple[float, ...]
    fate: str = ""


@dataclass(frozen=True)
class CurvePanel:
    """Data of one picture: a recipe's difference to the baseline along the run, its interval, and the single seeds.

    `floor`: the A/A floor, None if unknown; `margin`: nats; `look`: "look 2 of 6" if the recipe was judged at declared
    looks, else "".
    """

    name: str
    decision: Decision
    curve: Curve
    seeds: tuple[SeedLine, ...]
    floor: float | None
    margin: float
    look: str = ""

    @property
    def band(self) -> str:
        """The description of the drawn interval, for the legend."""
        return f"{100 * self.curve.confidence:.3g} % at each step{f' ({self.look})' if self.look else ''}"


@dataclass(frozen=True)
class LossLine:
    """The mean validation loss of one recipe over `tokens`, with the range [`low`, `high`] over the seeds."""

    name: str
    tokens: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class SpeedPoint:
    """A recipe's gap and its speed relative to the baseline (`ratio`); `emulated`: not the format's own speed."""

    name: str
    decision: Decision
    ratio: float
    interval: Interval
    emulated: bool


def frame_of(comparison: Comparison, family: ComparisonGroup | None = None) -> Frame:
    """Return the properties that the pictures of the group `family` share; None: of all groups."""
    verdicts = comparison.verdicts_of(family) if family else comparison.verdicts
    terms = min((verdict.terms for verdict in verdicts), key=lambda each: each.margin)
    several = len({verdict.terms.margin for verdict in verdicts}) > 1
    margin = f"{100 * (terms.token_margin or 0):g} % of tokens" if several else terms.margin_text
    looks = len(comparison.design.looks) if comparison.design else 0
    baseline = comparison.factor.baseline_label
    return Frame(baseline, terms.margin, terms.unit, terms.metric, terms.confidence, margin, looks)


def forest_rows(comparison: Comparison) -> list[ForestRow]:
    """Return a row of the forest plot per verdict, in the order of the comparison."""
    return [_forest_row(verdict) for verdict in comparison.verdicts]


def _forest_row(verdict: Verdict) -> ForestRow:
    judged = verdict.judged
    out = judged.estimate.outlier_seeds
    differences = judged.measured.differences
    return ForestRow(
        name=verdict.name,
        setting=verdict.family.text,
        decision=verdict.colour,
        qualified=verdict.qualified,
        interval=interval_of(verdict),
        seeds={seed: value for seed, value in differences.items() if seed not in out},
        outliers={seed: differences[seed] for seed in out},
        diverged_seeds=tuple(sorted({*judged.measured.diverged_seeds, *judged.measured.baseline_diverged_seeds})),
        floor=verdict.floor.sd,
        margin=verdict.terms.margin,
    )


def interval_of(verdict: Verdict) -> Interval:
    """Return the gap and interval of a verdict."""
    estimate = verdict.judged.estimate
    return Interval(estimate.gap, estimate.low, estimate.high)


def curve_panels(comparison: Comparison, family: ComparisonGroup) -> list[CurvePanel]:
    """Return the curve data of each verdict of the group that has a curve, or a seed with one."""
    verdicts = comparison.verdicts_of(family)
    panels = [
        CurvePanel(
            verdict.name, verdict.colour, curve, tuple(_seed_lines(verdict)), verdict.floor.sd, verdict.terms.margin,
            verdict.sequential.text if verdict.sequential else "",
        )
        for verdict, curve in zip(verdicts, paired_curves(verdicts), strict=True)
    ]  # fmt: skip
    return [panel for panel in panels if panel.curve.steps or panel.seeds]


def _seed_lines(verdict: Verdict) -> list[SeedLine]:
    kept = {pair.run.seed for pair in kept_pairs(verdict)}
    lines = []
    for pair in verdict.pairs:
        points = _points(pair, verdict)
        if points:
            seed = pair.run.seed
            out = seed in verdict.judged.estimate.outlier_seeds
            fate = "" if seed in kept else "outlier" if out else "diverged"
            lines.append(SeedLine(seed, tuple(points), tuple(points.values()), fate))
    return lines


def _points(pair: Pair, verdict: Verdict) -> dict[int, float]:
    """Return {tokens: difference} at the validations at which both losses are finite."""
    metric = verdict.terms.metric
    both = set(pair.run.validations.get(metric, {})) & set(pair.baseline.validations.get(metric, {}))
    found = {pair.baseline.tokens.get(step, 0): difference(pair, verdict, step) for step in sorted(both)}
    return {tokens: gap for tokens, gap in found.items() if math.isfinite(gap)}


def loss_lines(comparison: Comparison, family: ComparisonGroup) -> list[LossLine]:
    """Return the mean losses of the baseline and of each recipe, over the pairs in which neither run diverged."""
    verdicts, terms = comparison.verdicts_of(family), comparison.terms
    runs = {id(pair.baseline): pair.baseline for verdict in verdicts for pair in kept_pairs(verdict)}
    named = [(comparison.factor.baseline_label, list(runs.values()))]
    named += [(verdict.name, [pair.run for pair in kept_pairs(verdict)]) for verdict in verdicts]
    return [line for name, own in named if (line := _loss_line(name, own, terms))]


def _loss_line(name: str, runs: Sequence[Run], terms: Terms) -> LossLine | None:
    curves = [
        {
            run.tokens.get(step, 0): loss
            for step, loss in run.validations.get(terms.metric, {}).items()
            if math.isfinite(loss)
        }
        for run in runs
    ]
    common = sorted(set.intersection(*map(set, curves))) if curves else []
    if not common:
        return None
    columns = [[curve[tokens] for curve in curves] for tokens in common]
    mean = tuple(math.fsum(column) / len(column) for column in columns)
    return LossLine(name, tuple(common), mean, tuple(map(min, columns)), tuple(map(max, columns)))


def speed_points(comparison: Comparison, family: ComparisonGroup) -> list[SpeedPoint]:
    """Return a point for each recipe of the group with a known gap and speed."""
    return [
        SpeedPoint(verdict.name, verdict.colour, ratio, interval_of(verdict), verdict.emulated)
        for verdict in comparison.verdicts_of(family)
        if verdict.judged.estimate.pairs and (ratio := verdict.cost.tokens_per_second_ratio) is not None
    ]


PARAMETERS, TOKENS = "parameters", "tokens"
TOKEN_KEYS = ("trainer.max_steps", "schedule.", "data.global_batch_size", "data.sequence_length")
"""Keys of a setting that determine the number of tokens, or depend on it."""


@dataclass(frozen=True)
class TrendPoint:
    """The gap of one verdict at the value `x` of a quantity; `floor`: the A/A floor there; `margin`: nats."""

    x: float
    interval: Interval
    decision: Decision
    floor: float | None
    margin: float


@dataclass(frozen=True)
class TrendLine:
    """The points of one recipe, ascending in `x`."""

    name: str
    points: tuple[TrendPoint, ...]


@dataclass(frozen=True)
class Trend:
    """Data of one picture: gaps over one quantity, such as tokens.

    `key`, `label`: of the quantity; `setting`: everything else as text, which is constant or depends on the quantity.
    """

    key: str
    label: str
    setting: str
    lines: tuple[TrendLine, ...]

    @property
    def xs(self) -> list[float]:
        """All values of the quantity at which a recipe has a point, ascending."""
        return sorted({point.x for line in self.lines for point in line.points})


@dataclass(frozen=True)
class Quantity:
    """A quantity for an x axis. `values`: {id(verdict): x}; `prefixes`: of the config keys that determine it."""

    key: str
    label: str
    values: Mapping[int, float]
    prefixes: tuple[str, ...]

    def owns(self, name: str) -> bool:
        """Return whether the config key `name` is one of those that determine the quantity."""
        return name.startswith(self.prefixes)


def trends(comparison: Comparison) -> list[Trend]:
    """Return the data of gaps over each quantity with at least two values, for each combination of the others.

    If no two verdicts agree in everything else, keys with one value per value of the quantity may vary with it (for
    example a rate chosen for each size). Over sizes with tokens that grow with them, lines are at equal tokens per
    parameter.
    """
    verdicts = comparison.verdicts
    settings = {id(verdict): verdict.family.setting for verdict in verdicts}
    found: list[Trend] = []
    for quantity in _quantities(verdicts, settings):
        rest = [name for name in _varying(settings.values()) if not quantity.owns(name)]
        own = _panels(verdicts, quantity, _constants(verdicts, rest))
        if not own:
            rest = [name for name in rest if not _follows(name, quantity.values, settings)]
            own = _panels(verdicts, quantity, _constants(verdicts, rest))
        if not own and quantity.key == PARAMETERS:
            kept = _constants(verdicts, [name for name in rest if not name.startswith(TOKEN_KEYS)])
            own = _panels(verdicts, quantity, {id(each): (*kept[id(each)], _per_parameter(each)) for each in verdicts})
        found += own
    return found


def _panels(verdicts: Sequence[Verdict], quantity: Quantity, constants: Mapping[int, tuple[str, ...]]) -> list[Trend]:
    """Return a trend with at least two values of x for each of `constants`, {id of a verdict: values along a line}."""
    panels: dict[tuple[str, ...], dict[str, list[TrendPoint]]] = {}
    for verdict in verdicts:
        if id(verdict) in quantity.values:
            x = quantity.values[id(verdict)]
            point = TrendPoint(x, interval_of(verdict), verdict.colour, verdict.floor.sd, verdict.terms.margin)
            panels.setdefault(constants[id(verdict)], {}).setdefault(verdict.name, []).append(point)
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


def _constants(verdicts: Sequence[Verdict], names: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """Return {id of a verdict: values of the keys `names` as text}, with a model named by its size if that is
    unique."""
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
    """Return the possible axes: numeric for every verdict, with at least two values."""
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
    """Return whether a key of the settings has one value at each value of the quantity, so it does not split a line."""
    at: dict[float, set[str]] = {}
    for of, x in values.items():
        at.setdefault(x, set()).add(str(settings[of].get(name)))
    return all(len(found) == 1 for found in at.values())
