"""Data for the fit of a ladder: losses of the baseline and paired differences of recipes, by size and tokens."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.runs.losses import has_learned, tail_of
from lightning_llm.compare.runs.pairing import ComparisonGroup
from lightning_llm.compare.verdict import Verdict
from lightning_llm.tracking.reading import Run

Place = tuple[int, int]
"""(parameters of the model, tokens of the run): a place on the ladder."""
UNLEARNED = "the baseline has not learned there"


@dataclass
class Rung:
    """The runs of one rung: one model size, trained on one number of tokens.

    `losses`: the baseline's, {seed: nats per token}; `differences`: {recipe: {seed: nats}}, recipe minus baseline;
    `unlearned`: the baseline has learned nothing there, so no gap can be measured; `began`: start of each recipe's
    first run, ISO 8601.
    """

    parameters: int
    tokens: int
    losses: dict[int, float] = field(default_factory=dict)
    differences: dict[str, dict[int, float]] = field(default_factory=dict)
    unlearned: bool = False
    began: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> Place:
        """(parameters, tokens)."""
        return self.parameters, self.tokens


@dataclass
class Ladder:
    """All rungs, sorted by size and tokens, of runs against `baseline` judged by `metric`.

    `left_out`: {place: reason} of rungs excluded from the fit.
    """

    baseline: str
    metric: str
    rungs: list[Rung]
    left_out: dict[Place, str] = field(default_factory=dict)

    @property
    def recipes(self) -> list[str]:
        """Every recipe measured on any rung, in order of appearance."""
        return list(dict.fromkeys(name for rung in self.rungs for name in rung.differences))

    def without(self, places: Iterable[Place]) -> "Ladder":
        """Return the ladder without the rungs at these places."""
        gone = set(places)
        return Ladder(self.baseline, self.metric, [rung for rung in self.rungs if rung.place not in gone])

    def of_recipes(self, names: Collection[str]) -> "Ladder":
        """Return the ladder with the gaps of these recipes only, and all baseline losses."""
        rungs = [
            replace(rung, differences={name: row for name, row in rung.differences.items() if name in names})
            for rung in self.rungs
        ]
        return replace(self, rungs=rungs)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per run as plain data, as read by `ladder_of_rows`."""
        found: list[dict[str, Any]] = []
        for rung in self.rungs:
            where = {"parameters": rung.parameters, "tokens": rung.tokens}
            for seed, loss in sorted(rung.losses.items()):
                learned = {"learned": False} if rung.unlearned else {}
                found.append({**where, "recipe": self.baseline, "seed": seed, "loss": loss, **learned})
            for name, row in rung.differences.items():
                found += [
                    {**where, "recipe": name, "seed": seed, "loss": rung.losses[seed] + value}
                    for seed, value in sorted(row.items())
                ]
        return found


def ladder_of_rows(rows: Sequence[Mapping[str, Any]], baseline: str, metric: str = "val_loss") -> Ladder:
    """Return the ladder from rows {parameters, tokens, recipe, seed, loss}, such as those in a file of results."""
    rungs: dict[Place, Rung] = {}
    for row in sorted(rows, key=lambda row: row["recipe"] != baseline):
        rung = rungs.setdefault((row["parameters"], row["tokens"]), Rung(row["parameters"], row["tokens"]))
        if row["recipe"] == baseline:
            rung.losses[row["seed"]] = row["loss"]
            rung.unlearned |= not row.get("learned", True)
        elif row["seed"] in rung.losses:
            rung.differences.setdefault(row["recipe"], {})[row["seed"]] = row["loss"] - rung.losses[row["seed"]]
    return _sifted(Ladder(baseline, metric, [rungs[place] for place in sorted(rungs)]))


def ladder_of(comparison: Comparison) -> Ladder:
    """Return the ladder of a comparison: its pairs, and baseline runs without a recipe.

    Raises:
        ConfigError: several settings have one size and number of tokens, so the rung is ambiguous.
    """
    rungs: dict[Place, Rung] = {}
    for verdict in comparison.verdicts:
        _add_pairs(rungs, verdict)
    problems = [
        Problem("RUN", f"{len(each)} settings have {where[0]} parameters and {where[1]} tokens ({'; '.join(each)}): "
                "a rung must be one. Name the runs of one setting, or use each recipe's best (--best-of KEY).")
        for where, each in _settings_by_place(comparison).items() if len(each) > 1
    ]  # fmt: skip
    if problems:
        raise ConfigError(problems)
    _add_lone_baselines(rungs, comparison)
    return _sifted(Ladder(comparison.factor.baseline_label, comparison.terms.metric, [rungs[p] for p in sorted(rungs)]))


def _settings_by_place(comparison: Comparison) -> dict[Place, list[str]]:
    found: dict[Place, list[ComparisonGroup]] = {}
    for verdict in comparison.verdicts:
        place = _place(verdict)
        if place and all(family is not verdict.family for family in found.get(place, [])):
            found.setdefault(place, []).append(verdict.family)
    return {place: [family.text or "no other key" for family in families] for place, families in found.items()}


def _place(verdict: Verdict) -> Place | None:
    return (verdict.parameters, verdict.tokens) if verdict.parameters and verdict.tokens else None


def _add_pairs(rungs: dict[Place, Rung], verdict: Verdict) -> None:
    place, measured = _place(verdict), verdict.judged.measured
    if place is None or measured.tail is None:
        return
    rung = rungs.setdefault(place, Rung(*place))
    out = verdict.judged.estimate.outlier_seeds
    rung.unlearned |= measured.unlearned is not None
    for pair in verdict.sound_pairs:
        if pair.run.seed not in out:
            rung.losses[pair.run.seed] = measured.tail.of(pair.baseline)
    rung.began[verdict.name] = min(pair.run.started_at for pair in verdict.pairs)
    rung.differences[verdict.name] = {seed: gap for seed, gap in measured.differences.items() if seed not in out}


def _add_lone_baselines(rungs: dict[Place, Rung], comparison: Comparison) -> None:
    """Add the baseline's runs without a pair: they improve its law, at tokens without recipe runs."""
    terms, factor = comparison.terms, comparison.factor
    for run in comparison.runs:
        if factor.level(run) != factor.baseline or run.diverged or not run.finished:
            continue
        tail = tail_of([run], terms.metric, terms.tail_share)
        place = _place_of(run, tail.steps[-1]) if tail else None
        if tail is None or place is None:
            continue
        rung = rungs.setdefault(place, Rung(*place))
        if not rung.differences:
            rung.losses[run.seed] = tail.of(run)
            rung.unlearned |= not has_learned(run, tail)


def _place_of(run: Run, step: int) -> Place | None:
    tokens = run.tokens.get(step)
    return (run.parameters, tokens) if run.parameters and tokens else None


def _sifted(ladder: Ladder) -> Ladder:
    """Return the ladder without unusable rungs, which `left_out` lists."""
    out = {rung.place: UNLEARNED for rung in ladder.rungs if rung.unlearned}
    out |= {rung.place: "no usable run of the baseline" for rung in ladder.rungs if not rung.losses}
    kept = ladder.without(out)
    kept.left_out = out
    return kept
