"""Pairs of runs to compare: runs of the same seed that differ in the factor, with all other differences."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from lightning_llm.base.errors import Problem
from lightning_llm.compare.runs.differences import (
    BRANCH_KEY,
    FREE,
    LAYOUT,
    ROUNDING,
    data_hashes,
    equal_by_hash,
    equivalent_starts,
    meaningful,
    same_config,
    validation_differences,
)
from lightning_llm.compare.runs.factor import Factor
from lightning_llm.compare.runs.losses import LOSS
from lightning_llm.config.config_hash import below, is_data_path
from lightning_llm.tracking.reading import Run

Setting = tuple[tuple[str, str], ...]
ADD_PARTNER = "Run it, or leave this run out."


@dataclass(frozen=True)
class Pair:
    """A run of a recipe and the baseline's run of the same seed.

    `confounders`: {key besides the factor that differs: (baseline's value, run's value)}.
    """

    run: Run
    baseline: Run
    confounders: dict[str, tuple[Any, Any]]


@dataclass
class ComparisonGroup:
    """Recipes in one setting, which are judged together against the same baseline runs.

    `setting`: {key that varies besides the factor: value here}; `text`: the same as text; `survived_at`: keys of which
    a search kept only one value, as text. `recipes`: {label: pairs, one per seed}; `missing`: {label: seeds at which
    only the baseline's run finished}; `unfinished`: {label, also of the baseline: unfinished runs at seeds without a
    finished one}; `aa_groups`: groups of runs of one recipe and seed that differ only in rounding.
    """

    setting: dict[str, Any]
    text: str = ""
    survived_at: str = ""
    recipes: dict[str, list[Pair]] = field(default_factory=dict)
    missing: dict[str, list[int]] = field(default_factory=dict)
    unfinished: dict[str, list[Run]] = field(default_factory=dict)
    aa_groups: list[list[Run]] = field(default_factory=list)

    @property
    def judged(self) -> Run:
        """A run of a recipe in this setting. (The baseline may have another setting, which is then a confounder.)"""
        return next(iter(self.recipes.values()))[0].run

    @property
    def runs(self) -> list[Run]:
        """Every run of a pair, of recipes and baseline, once."""
        found = {id(run): run for pairs in self.recipes.values() for pair in pairs for run in (pair.baseline, pair.run)}
        return list(found.values())


def pair_runs(
    runs: Sequence[Run], factor: Factor, unfinished: Sequence[Run] = (), metric: str = LOSS
) -> tuple[list[ComparisonGroup], list[Problem]]:
    """Pair each run with the baseline's run of the same seed; return (groups of pairs by setting, problems).

    Problems are runs without a partner, for example because `metric` was measured on different data. `unfinished` runs
    only show which runs are missing.
    """
    varying = setting_keys(runs, factor, metric)
    usual = Counter(_rounding(run, factor) for run in runs)
    baselines = [run for run in runs if factor.level(run) == factor.baseline]
    others = [run for run in runs if factor.level(run) != factor.baseline]
    families: dict[Setting, ComparisonGroup] = {}
    problems: list[Problem] = []

    def order(run: Run) -> tuple[str, str, int]:
        return factor.label(run), str(setting_of(run, varying)), run.seed

    def rank(pair: Pair) -> tuple[int, int]:
        return len(pair.confounders), -usual[_rounding(pair.run, factor)]

    for _, group in groupby(sorted(others, key=order), key=order):
        pairs, refused = _pairs_of(list(group), baselines, factor, metric)
        problems += refused
        if not pairs:
            continue
        # Runs that only differ in rounding serve the A/A floor; of each seed the closest pair is judged.
        # One that lost its loss is no twin to pass over: the recipe did so where the baseline trained through.
        lost = [pair for pair in pairs if pair.run.diverged and all(below(key, ROUNDING) for key in pair.confounders)]
        best = min(sorted(lost or pairs, key=lambda pair: pair.run.started_at, reverse=True), key=rank)
        setting = {key: best.run.config.get(key) for key in varying}
        family = families.setdefault(setting_of(best.run, varying), ComparisonGroup(setting))
        family.recipes.setdefault(factor.label(best.run), []).append(best)
    for family in families.values():
        family.recipes = {label: family.recipes[label] for label in factor.labels.values() if label in family.recipes}
        family.aa_groups = _aa_groups(runs, family, metric)
        _add_unfinished(family, unfinished, baselines, factor, metric)
    found = sorted(families.values(), key=_order)
    name_settings(found)
    return found, problems


def _order(family: ComparisonGroup) -> tuple[int, int, list[tuple[bool, float, str]]]:
    """Return the sort key of a setting: parameters, tokens, then the other varying values, numbers by size.

    The baseline's tokens: a run that diverged may have ended early.
    """
    values = [value for _, value in sorted(family.setting.items())]
    numbers = [isinstance(value, int | float) and not isinstance(value, bool) for value in values]
    rest = [(not n, float(v) if n else 0.0, "" if n else str(v)) for n, v in zip(numbers, values, strict=True)]
    tokens = next(iter(family.recipes.values()))[0].baseline.tokens
    return family.judged.parameters or 0, max(tokens.values(), default=0), rest


def name_settings(families: Sequence[ComparisonGroup]) -> None:
    """Set `text`, the setting as text, of each group: GROUP=NAME if names are unique, else KEY=VALUE of each key."""
    groups: dict[str, list[str]] = {}
    for key in sorted({key for family in families for key in family.setting}):
        groups.setdefault(key.partition(".")[0], []).append(key)
    parts: list[list[str]] = [[] for _ in families]
    for group, keys in groups.items():
        values = [tuple(str(family.setting.get(key)) for key in keys) for family in families]
        names = [str(family.judged.config.get(f"{group}.name") or "") for family in families]
        named = len({*values}) == len({*names}) == len({*zip(values, names, strict=True)}) > 1
        for family, name, found in zip(families, names, parts, strict=True):
            found += [f"{group}={name}"] if named else [f"{key}={family.setting.get(key)}" for key in keys]
    for family, found in zip(families, parts, strict=True):
        family.text = ", ".join(found)


def same_but_for_rounding(runs: Sequence[Run], metric: str) -> list[list[Run]]:
    """Return the groups of two or more runs of one recipe and seed that differ at most in the order of sums."""
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if group[0].seed == run.seed and not meaningful(group[0], run, ROUNDING, metric):
                group.append(run)
                break
        else:
            groups.append([run])
    return [group for group in groups if len(group) > 1]


def _add_unfinished(
    family: ComparisonGroup, unfinished: Sequence[Run], baselines: list[Run], factor: Factor, metric: str
) -> None:
    """Record unfinished runs, and the seeds at which only the baseline finished.

    The remaining runs of such a recipe may be the lucky ones.
    """
    first = next(iter(family.recipes.values()))[0].baseline
    if found := _without_end(first, baselines, unfinished, factor):
        family.unfinished[factor.baseline_label] = found
    for label, pairs in family.recipes.items():
        found = _without_end(pairs[0].run, [pair.run for pair in pairs], unfinished, factor)
        if found:
            family.unfinished[label] = found
        if seeds := sorted({run.seed for run in found if _pairs_of([run], baselines, factor, metric)[0]}):
            family.missing[label] = seeds


def _without_end(one: Run, ended: Sequence[Run], unfinished: Sequence[Run], factor: Factor) -> list[Run]:
    """Return the `unfinished` runs equal to `one` except for seed and rounding, at seeds of none that `ended`."""
    seeds = {run.seed for run in ended}
    level = [run for run in unfinished if factor.level(run) == factor.level(one) and run.seed not in seeds]
    return [run for run in level if same_config(run, one, (*ROUNDING, *equivalent_starts([run, one])))]


def _aa_groups(runs: Sequence[Run], family: ComparisonGroup, metric: str) -> list[list[Run]]:
    """Return the groups of runs that only differ in rounding and include a run of this comparison group."""
    judged = {id(run) for run in family.runs}
    return [group for group in same_but_for_rounding(runs, metric) if any(id(run) in judged for run in group)]


def _pairs_of(runs: list[Run], baselines: list[Run], factor: Factor, metric: str) -> tuple[list[Pair], list[Problem]]:
    pairs, problems = [], []
    for run in runs:
        seeded = [each for each in baselines if each.seed == run.seed]
        if not seeded:
            level, base = factor.label(run), factor.baseline_label
            text = f"{level} at seed {run.seed} has no run of {base} at that seed to be paired with. {ADD_PARTNER}"
            problems.append(Problem(str(run.folder), text))
            continue
        comparable = [each for each in seeded if not validation_differences(each, run, metric)]
        if not comparable:
            unlike = ", ".join(validation_differences(seeded[0], run, metric))
            text = (
                f"its {metric} is not comparable with that of {seeded[0].folder}: they differ in {unlike}. "
                "Tokenizer, held-out documents, sequence length and the sources' shares of the scored sequences must "
                "be the same (data.validation.weights sets those of different mixes)."
            )
            problems.append(Problem(str(run.folder), text))
            continue
        newest_first = sorted(comparable, key=lambda each: each.started_at, reverse=True)
        pairs.append(
            min((_pair(run, each, factor, metric) for each in newest_first), key=lambda pair: len(pair.confounders))
        )
    return pairs, problems


def _pair(run: Run, baseline: Run, factor: Factor, metric: str) -> Pair:
    """Return the pair; keys of the factor, and keys that follow from them, are no confounders."""
    return Pair(run, baseline, meaningful(baseline, run, _own_keys(factor), metric))


def _own_keys(factor: Factor) -> tuple[str, ...]:
    """Return the keys of the factor, and keys that follow from them."""
    own = factor.keys
    if "trainer.threads" in own:
        own += ("threads",)
    if "precision.backend" in own:
        own += ("backend",)
    if any(key.startswith("parallel.") for key in own):
        own += LAYOUT
    if any(key.startswith("data.") for key in own):
        own += ("data_hash",)
    if any(key.startswith("model.") for key in own):
        own += ("init_digest",)
    if any(key.startswith("distil.") for key in own):
        own += ("distil.", "teachers")
    if BRANCH_KEY in own:
        own += ("branch.",)
    return own


def _absent_with(factor: Factor, runs: Sequence[Run]) -> tuple[str, ...]:
    """Return the keys that are absent in runs without the factor's group and equal in all other runs.

    Example: with students of one ensemble and runs without distillation, compared by `distil.weight`, `distil.teachers`
    is no separate setting.
    """
    group = factor.keys[0].partition(".")[0] if factor.keys else ""
    keys = sorted({key for run in runs for key in run.config if key.startswith(f"{group}.")})
    having = [run for run in runs if any(run.config.get(key) is not None for key in keys)]
    if len(having) == len(runs):
        return ()
    return tuple(key for key in keys if len({str(run.config.get(key)) for run in having}) == 1)


def setting_keys(runs: Sequence[Run], factor: Factor, metric: str) -> list[str]:
    """Return the keys that vary besides the factor, the seed and keys that only change rounding."""
    keys = sorted({key for run in runs for key in run.config})
    free = (*FREE, *ROUNDING, "seed", *factor.keys, *_absent_with(factor, runs), *equivalent_starts(runs))
    hashes = data_hashes(runs)
    if len(hashes) == 1 and None not in hashes:  # the same data, stored elsewhere
        free += tuple(filter(is_data_path, keys))
    free += equal_by_hash(runs, metric)
    return [key for key in keys if not below(key, free) and len({str(run.config.get(key)) for run in runs}) > 1]


def setting_of(run: Run, keys: list[str]) -> Setting:
    """Return the run's setting: its values of `keys` as (key, text)."""
    return tuple((key, str(run.config.get(key))) for key in keys)


def _rounding(run: Run, factor: Factor) -> Setting:
    keys = [key for key in sorted(run.config) if below(key, ROUNDING) and key not in factor.keys]
    return setting_of(run, keys)
