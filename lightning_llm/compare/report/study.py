"""Facts of a comparison that its methods section states: recipes, seeds, models, data, versions, hardware."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from lightning_llm.compare.best_value import Selection
from lightning_llm.compare.looks import Design
from lightning_llm.compare.recorded_looks import RecordedLook
from lightning_llm.compare.runs.factor import Factor
from lightning_llm.compare.runs.pairing import ComparisonGroup
from lightning_llm.compare.runs.usable import ended_some
from lightning_llm.compare.terms import Terms
from lightning_llm.compare.verdict import Verdict
from lightning_llm.config.config_hash import flatten
from lightning_llm.config.recipes import option_files
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.config.weight_folders import NOT_SHAPE
from lightning_llm.tracking.reading import Run

GROUP = "model"
MOST_KEYS = 8
"""Maximum number of listed keys of a model that differs from its file."""


@dataclass(frozen=True)
class Study:
    """The judged runs and options of a comparison, and facts about them for its methods section.

    `all_pairs`: all recipes were compared with each other; `ladder`: a law over sizes and tokens was fitted.
    """

    factor: Factor
    terms: Terms
    families: Sequence[ComparisonGroup]
    verdicts: Sequence[Verdict]
    selection: Selection | None
    looks: Sequence[RecordedLook]
    design: Design | None = None
    all_pairs: bool = False
    ladder: bool = False

    @property
    def budgeted(self) -> bool:
        """True if the looks share an error budget (--require)."""
        return any(look.spent is not None for look in self.looks)

    @property
    def runs(self) -> list[Run]:
        """Every run of a pair, of recipes and baseline, once."""
        return list({id(run): run for family in self.families for run in family.runs}.values())

    @property
    def logged(self) -> bool:
        """True if the runs are logs of another trainer."""
        return any(run.logged_on for run in self.runs)

    @property
    def recipes(self) -> list[str]:
        """Names of the recipes that were compared with the baseline."""
        return list(dict.fromkeys(verdict.name for verdict in self.verdicts))

    @property
    def settings(self) -> list[str]:
        """The settings that were judged separately, as text; [] if there is only one."""
        return [family.text for family in self.families if family.text]

    @property
    def seeds(self) -> list[int]:
        """The seeds at which there is a pair, ascending."""
        return sorted({seed for verdict in self.verdicts for seed in verdict.judged.measured.seeds})

    @property
    def pairs(self) -> tuple[int, int]:
        """(smallest, largest) number of pairs of a recipe in a setting, including pairs with a failed run."""
        counts = [len(verdict.judged.measured.seeds) for verdict in self.verdicts]
        return min(counts), max(counts)

    @property
    def tail_validations(self) -> tuple[int, int]:
        """(smallest, largest) number of validations over which a verdict averages."""
        counts = [len(tail.steps) for verdict in self.verdicts if (tail := verdict.judged.measured.tail)]
        return (min(counts), max(counts)) if counts else (0, 0)

    @property
    def emulated(self) -> list[str]:
        """Names of the recipes with emulated casts."""
        return list(dict.fromkeys(verdict.name for verdict in self.verdicts if verdict.emulated))

    @property
    def native(self) -> list[str]:
        """Names of the recipes with quantized matrix products that ran in native kernels in every run."""
        found = [
            verdict.name
            for verdict in self.verdicts
            if all(pair.run.summary.get("backend") == "native" for pair in verdict.pairs)
        ]
        return list(dict.fromkeys(found))

    @property
    def recipe_sources(self) -> dict[str, str]:
        """{precision recipe: the sources that its file names, as text}."""
        found = {
            str(run.config.get("precision.name")): str(run.config["precision.reference"])
            for run in self.runs
            if run.config.get("precision.reference")
        }
        return dict(sorted(found.items())) if self.factor.name.startswith("precision") else {}

    def values(self, key: str) -> list[Any]:
        """Return the values of a config key over all runs, each once, in order of the runs."""
        found = {str(value): value for run in self.runs if (value := run.config.get(key)) is not None}
        return list(found.values())  # by text: a config of another version may hold a list where this has a number

    @property
    def models(self) -> list[str]:
        """The names of the models, with the keys that differ from their files."""
        return models_of(self.runs)

    def recorded(self, key: str) -> list[str]:
        """Return the values under a dotted key in the runs' summaries, each once."""
        return list(dict.fromkeys(str(value) for run in self.runs if (value := _at(run.summary, key)) is not None))

    @property
    def devices(self) -> list[str]:
        """Descriptions of the hardware of the runs, each once."""
        return self.recorded("device")

    @property
    def commits(self) -> list[str]:
        """The git commits of the runs' code, 12 digits, marked if files were changed; [] for installed wheels."""
        found = []
        for run in self.runs:
            git = run.summary.get("git") or {}
            if git.get("sha"):
                found.append(f"{str(git['sha'])[:12]}{', with local changes' if git.get('dirty') else ''}")
        return list(dict.fromkeys(found))

    @property
    def tokens(self) -> list[int]:
        """The numbers of tokens at which losses were judged."""
        return sorted({verdict.tokens for verdict in self.verdicts if verdict.tokens})

    @property
    def parameters(self) -> list[int]:
        """The numbers of parameters of the models."""
        return sorted({verdict.parameters for verdict in self.verdicts if verdict.parameters})

    @property
    def comparisons(self) -> int:
        """The largest number of simultaneous intervals of a group."""
        return max((verdict.judged.estimate.comparisons for verdict in self.verdicts), default=1)

    @property
    def decided_by_interval(self) -> bool:
        """True if any recipe has an interval."""
        return any(verdict.judged.estimate.low == verdict.judged.estimate.low for verdict in self.verdicts)

    @property
    def pooled(self) -> bool:
        """True if any recipes shared a variance."""
        return any(verdict.judged.estimate.pool > 1 for verdict in self.verdicts)

    @property
    def unpooled(self) -> bool:
        """True if a recipe with a larger spread kept its own variance while others shared one."""
        by_family: dict[int, set[bool]] = {}
        for verdict in self.verdicts:
            estimate = verdict.judged.estimate
            if estimate.pairs > 1 and not verdict.judged.measured.identical:
                by_family.setdefault(id(verdict.family), set()).add(estimate.pool > 1)
        return any(len(kinds) > 1 for kinds in by_family.values())

    @property
    def unlike_seeds(self) -> bool:
        """True if recipes of one group were compared over different seeds."""
        by_family: dict[int, set[tuple[int, ...]]] = {}
        for verdict in self.verdicts:
            out = verdict.judged.estimate.outlier_seeds
            kept = tuple(sorted(seed for seed in verdict.judged.measured.differences if seed not in out))
            if len(kept) > 1:
                by_family.setdefault(id(verdict.family), set()).add(kept)
        return any(len(found) > 1 for found in by_family.values())

    @property
    def failed(self) -> bool:
        """True if any run failed, including the baseline's."""
        found = (verdict.judged.stability for verdict in self.verdicts)
        return any(stability.failed or stability.baseline_failed for stability in found)

    @property
    def ended_by_search(self) -> bool:
        """True if a search stopped some recipes of the sweeps early, and so chose the judged ones."""
        return ended_some(self.runs)

    @property
    def unverified(self) -> bool:
        """True if the records of any run could not be verified."""
        return any(run.unverified for run in self.runs)

    @property
    def one_pair(self) -> bool:
        """True if a recipe had at most one pair."""
        return any(verdict.judged.estimate.pairs < 2 for verdict in self.verdicts)


def _at(summary: Mapping[str, Any], key: str) -> Any:
    found: Any = summary
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def models_of(runs: Iterable[Run]) -> list[str]:
    """Return the names of the runs' models, each once, in order of the runs."""
    return list(dict.fromkeys(name for run in runs if (name := _called(run.config)) is not None))


def _called(config: Mapping[str, Any]) -> str | None:
    """Return "llama_tiny", or "llama_tiny with num_layers=2, hidden_size=64" where keys of the file were overridden.

    A model without a shipped file (of a --config-dir, or of weights) has its name alone.
    """
    name = config.get(f"{GROUP}.name")
    if name is None:
        return None
    file = _values_of_file(str(name))
    changed = {
        key: config[f"{GROUP}.{key}"]
        for key, value in file.items()
        if key not in NOT_SHAPE and f"{GROUP}.{key}" in config and config[f"{GROUP}.{key}"] != value
    }
    parts = [f"{key}={_word(value)}" for key, value in list(changed.items())[:MOST_KEYS]]
    if more := len(changed) - len(parts):
        parts.append(f"{more} more")
    return f"{name} with {', '.join(parts)}" if parts else str(name)


def _word(value: Any) -> str:
    return json.dumps(value, default=str).replace('"', "")


@cache
def _values_of_file(name: str) -> dict[str, Any]:
    """Return the flat values of the shipped model `name`, including defaults; {} without one."""
    file = option_files(GROUP).get(name)
    if file is None or name == "from_weights":
        return {}
    values: Any = OmegaConf.to_container(OmegaConf.create(file.read_text(encoding="utf-8")))
    return flatten(ModelConfig.model_validate(values).model_dump(mode="json"))
