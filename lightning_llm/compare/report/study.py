"""Facts of a comparison for its methods section: recipes, seeds, models, data, versions, hardware."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from lightning_llm.compare.best_value import Selection
from lightning_llm.compare.looks import Design, RecordedLook
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
"""Named of a model that has little in common with its file."""


@dataclass(frozen=True)
class Study:
    """The judged runs and how they were judged; `all_pairs`: recipes against each other, too; `ladder`: a law over
    sizes and tokens was fitted."""

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
    def runs(self) -> list[Run]:
        """Every run of a pair, once."""
        return list({id(run): run for family in self.families for run in family.runs}.values())

    @property
    def recipes(self) -> list[str]:
        """The recipes that were held against the baseline."""
        return list(dict.fromkeys(verdict.name for verdict in self.verdicts))

    @property
    def settings(self) -> list[str]:
        """The settings that were judged apart, in words; empty where there is one."""
        return [family.words for family in self.families if family.words]

    @property
    def seeds(self) -> list[int]:
        """The seeds of all pairs."""
        return sorted({seed for verdict in self.verdicts for seed in verdict.judged.measured.seeds})

    @property
    def pairs(self) -> tuple[int, int]:
        """Fewest and most pairs of a recipe in a setting, those that failed included."""
        counts = [len(verdict.judged.measured.seeds) for verdict in self.verdicts]
        return min(counts), max(counts)

    @property
    def tail_validations(self) -> tuple[int, int]:
        """Fewest and most validations that the tail's mean is of."""
        counts = [len(tail.steps) for verdict in self.verdicts if (tail := verdict.judged.measured.tail)]
        return (min(counts), max(counts)) if counts else (0, 0)

    @property
    def emulated(self) -> list[str]:
        """The recipes that ran emulated."""
        return list(dict.fromkeys(verdict.name for verdict in self.verdicts if verdict.emulated))

    @property
    def native(self) -> list[str]:
        """The recipes whose quantised products ran natively throughout."""
        found = [
            verdict.name
            for verdict in self.verdicts
            if all(pair.run.summary.get("backend") == "native" for pair in verdict.pairs)
        ]
        return list(dict.fromkeys(found))

    @property
    def recipe_sources(self) -> dict[str, str]:
        """{precision recipe: what its file says that it is taken from}."""
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
        """What the models are called, with the keys in which they are not as their files say."""
        return models_of(self.runs)

    def recorded(self, key: str) -> list[str]:
        """Return what the runs' summaries have under a dotted key, each once."""
        return list(dict.fromkeys(str(value) for run in self.runs if (value := _at(run.summary, key)) is not None))

    @property
    def devices(self) -> list[str]:
        """The hardware of the runs."""
        return self.recorded("device")

    @property
    def commits(self) -> list[str]:
        """The commits of the checkouts, 12 digits, with a word where files were changed; empty for wheels."""
        found = []
        for run in self.runs:
            git = run.summary.get("git") or {}
            if git.get("sha"):
                found.append(f"{str(git['sha'])[:12]}{', with local changes' if git.get('dirty') else ''}")
        return list(dict.fromkeys(found))

    @property
    def tokens(self) -> list[int]:
        """The numbers of tokens that the judged losses are after."""
        return sorted({verdict.tokens for verdict in self.verdicts if verdict.tokens})

    @property
    def parameters(self) -> list[int]:
        """The sizes of the models."""
        return sorted({verdict.parameters for verdict in self.verdicts if verdict.parameters})

    @property
    def comparisons(self) -> int:
        """The most intervals that hold together."""
        return max((verdict.judged.estimate.comparisons for verdict in self.verdicts), default=1)

    @property
    def decided_by_interval(self) -> bool:
        """Whether any recipe has an interval."""
        return any(verdict.judged.estimate.low == verdict.judged.estimate.low for verdict in self.verdicts)

    @property
    def pooled(self) -> bool:
        """Whether recipes shared a variance."""
        return any(verdict.judged.estimate.pool > 1 for verdict in self.verdicts)

    @property
    def unpooled(self) -> bool:
        """Whether a recipe's spread stood out, so that it kept its own variance beside others that shared one."""
        by_family: dict[int, set[bool]] = {}
        for verdict in self.verdicts:
            estimate = verdict.judged.estimate
            if estimate.pairs > 1 and not verdict.judged.measured.identical:
                by_family.setdefault(id(verdict.family), set()).add(estimate.pool > 1)
        return any(len(kinds) > 1 for kinds in by_family.values())

    @property
    def unlike_seeds(self) -> bool:
        """Whether recipes of one family were compared over different seeds."""
        by_family: dict[int, set[tuple[int, ...]]] = {}
        for verdict in self.verdicts:
            out = verdict.judged.estimate.outlier_seeds
            kept = tuple(sorted(seed for seed in verdict.judged.measured.differences if seed not in out))
            if len(kept) > 1:
                by_family.setdefault(id(verdict.family), set()).add(kept)
        return any(len(found) > 1 for found in by_family.values())

    @property
    def failed(self) -> bool:
        """Whether any run failed, the baseline's included."""
        found = (verdict.judged.stability for verdict in self.verdicts)
        return any(stability.failed or stability.baseline_failed for stability in found)

    @property
    def ended_by_search(self) -> bool:
        """Whether a search ended some recipes of the runs' sweeps early, and so chose those that are judged."""
        return ended_some(self.runs)

    @property
    def unverified(self) -> bool:
        """Whether the records of any run could not be verified."""
        return any(run.unverified for run in self.runs)

    @property
    def one_pair(self) -> bool:
        """Whether a recipe had one pair to be judged by, or none."""
        return any(verdict.judged.estimate.pairs < 2 for verdict in self.verdicts)


def _at(summary: Mapping[str, Any], key: str) -> Any:
    found: Any = summary
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def models_of(runs: Iterable[Run]) -> list[str]:
    """Return what the runs' models are called, each once, in order of the runs."""
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
    words = [f"{key}={_word(value)}" for key, value in list(changed.items())[:MOST_KEYS]]
    if more := len(changed) - len(words):
        words.append(f"{more} more")
    return f"{name} with {', '.join(words)}" if words else str(name)


def _word(value: Any) -> str:
    return json.dumps(value, default=str).replace('"', "")


@cache
def _values_of_file(name: str) -> dict[str, Any]:
    """Return the flat values of the shipped model `name`, with the defaults of what it leaves out; {} without one."""
    file = option_files(GROUP).get(name)
    if file is None or name == "from_weights":
        return {}
    values: Any = OmegaConf.to_container(OmegaConf.create(file.read_text(encoding="utf-8")))
    return flatten(ModelConfig.model_validate(values).model_dump(mode="json"))
