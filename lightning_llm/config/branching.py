"""`branch_from=RUN[/checkpoints/step=N]`: a config that starts from a parent run's, with keys changed. No torch.

The parent's config.yaml replaces the defaults. A preset for branches (its file has `branch_from: ???`) and the
overrides are applied to it. The branch has its own folder, tracking and launcher.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.config_hash import NOT_IDENTITY, below, flatten
from lightning_llm.config.derived_keys import FROM_WEIGHTS
from lightning_llm.config.recipes import group_names, option_files
from lightning_llm.config.resolve import first_line
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.aliases import migrate
from lightning_llm.config.weight_folders import run_of
from lightning_llm.config.yaml_file import literal, read_mapping

KEY = "branch_from"
EXPECTED = "a run's folder (its newest good checkpoint is taken), or one of its checkpoints/step=N"
OWN = ("run", "launcher", "resume", "hardware")
"""Keys of the run itself, which are not taken from the parent run."""
SAME_DATA = ("tokenizer", "sequence_length", "global_batch_size", "micro_batch_size", "cache_dir", "num_workers")
"""Keys of `data` that keep the parent's values if a branch selects another file of the group."""
NOT_CHANGES = (
    *NOT_IDENTITY,
    KEY,
    "recipe",
    "world",
    "checkpoint.",
    "data.cache_dir",
    "data.num_workers",
    "precision.reference",
    "precision.hardware",
)
"""Keys in which a branch may differ from its parent run without being another experiment."""
OVERRIDE = "override /"
NOT_VALUES = ("defaults", "hydra", "sweep")

GroupTree = Callable[[str, str], Any]
"""(group, name) -> the node that `group=name` composes."""


@dataclass(frozen=True)
class Branching:
    """A requested branch: path of the parent run or checkpoint, and the preset's {group: file} and {key: value}."""

    path: Path
    groups: Mapping[str, Any]
    values: Mapping[str, Any]


def read_branching(parsed: Sequence[Override], config_dir: Path | None) -> Branching | None:
    """Return the branch that the overrides or their preset request; None if they request none.

    Raises:
        ConfigError: a parent run with a preset that is not for branches, or such a preset without a parent run.
    """
    named = [each for each in parsed if each.key_or_group == KEY and not each.is_delete()]
    path = named[-1].value() if named else None
    if path is not None and (not isinstance(path, str) or not path.strip()):
        raise ConfigError(Problem(KEY, f"is {path!r}. Give {EXPECTED}."))
    recipes = [each.value() for each in parsed if each.key_or_group == "recipe" and not each.is_delete()]
    recipe = str(recipes[-1]) if recipes and recipes[-1] is not None else None
    groups, values = recipe_overrides(recipe, config_dir) if recipe else ({}, {})
    if path is None and KEY in values:
        path = values[KEY] if values[KEY] != "???" else None
        if path is None:
            raise ConfigError(
                Problem(KEY, f"a value must be given, because recipe={recipe} is for branches: {EXPECTED}.")
            )
    if path is None:
        return None
    if recipe and KEY not in values and recipe in option_files("recipe", config_dir):
        text = (
            f"is {recipe}, a run from step 0, and a branch uses its parent run's config. Omit it and "
            f"give the groups and keys to change, or write a preset for branches, with `{KEY}: ???` in its file."
        )
        raise ConfigError(Problem("recipe", text))
    if any(each.key_or_group == "model" and each.value() == FROM_WEIGHTS for each in parsed):
        text = f"is {FROM_WEIGHTS}, and a branch uses its parent run's model and weights. Omit it."
        raise ConfigError(Problem("model", text))
    return Branching(
        Path(str(path)).expanduser().absolute(), groups, {key: each for key, each in values.items() if key != KEY}
    )


def recipe_overrides(
    name: str, config_dir: Path | None, above: frozenset[str] = frozenset()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ({group: file}, {dotted key: value}) of the preset `name`, after those of the presets it extends.

    Both are empty if there is no such preset or if it extends itself (`above`: presets that extend it); composition
    reports these errors.
    """
    file = option_files("recipe", config_dir).get(name)
    if file is None or name in above:
        return {}, {}
    tree: Any = deepcopy(_parsed(file.read_text(encoding="utf-8-sig")))
    groups: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for entry in tree.get("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            more_groups, more_values = recipe_overrides(entry, config_dir, above | {name})
            groups, values = groups | more_groups, values | more_values
        elif isinstance(entry, dict):
            groups |= {key.removeprefix(OVERRIDE): each for key, each in entry.items() if key.startswith(OVERRIDE)}
    own = {key: each for key, each in tree.items() if key not in NOT_VALUES}
    return groups, values | flatten(own)


@lru_cache(maxsize=64)
def _parsed(text: str) -> Any:
    """Return the keys of a preset's YAML `text`; cached, since all jobs of a sweep read it."""
    return OmegaConf.to_container(OmegaConf.create(text), resolve=False)


def changed_keys(trunk: Config, branch: Config) -> dict[str, tuple[Any, Any]]:
    """Return {key: (parent's value, branch's value)} of the differences that can affect training.

    `trunk`: config of the parent run. Keys of paths, names and tracking are ignored (`NOT_CHANGES`).
    """
    before, after = (flatten(each.model_dump(mode="json")) for each in (trunk, branch))
    return {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not below(key, NOT_CHANGES)
    }


def branch_tree(
    branching: Branching, parsed: Sequence[Override], defaults: DictConfig, group_tree: GroupTree
) -> DictConfig:
    """Return the parent run's config as a tree with preset and overrides applied, not yet resolved or checked.

    Args:
        branching: result of `read_branching(parsed)`.
        parsed: the overrides.
        defaults: the tree composed without overrides, for keys that are not taken from the parent (`OWN`).
        group_tree: returns the tree of a group's file.

    Raises:
        ConfigError: there is no run at the path, its config.yaml cannot be read, or an override does not fit.
    """
    run = run_of(branching.path)
    if run is None:
        what = "has no run" if branching.path.is_dir() else "is a file" if branching.path.exists() else None
        raise ConfigError(Problem(KEY, f"{branching.path} {what or 'does not exist'}. Give {EXPECTED}."))
    tree = read_mapping(run / "config.yaml", str(run / "config.yaml"), "It must be as its run wrote it.")
    migrate(tree)
    experiment = OmegaConf.select(tree, "run.experiment")
    with open_dict(tree):
        for key in OWN:
            tree[key] = defaults[key]
        tree.run.experiment = experiment
        tree.branch_from = literal(str(branching.path))
        OmegaConf.update(tree, "logger.tags", {}, merge=False)
    if not OmegaConf.is_dict(tree.get("data")):
        raise ConfigError(Problem("data", "must be a mapping in the parent run's config.", repr(tree.get("data"))))
    trunks_data = literal(OmegaConf.to_container(tree.data, resolve=True))
    recipe = [each.value() for each in parsed if each.key_or_group == "recipe"]
    if recipe:
        tree.recipe = recipe[-1]
    for group, name in branching.groups.items():
        tree[group] = group_tree(group, str(name))
    for key, value in branching.values.items():
        OmegaConf.update(tree, key, value, force_add=True)
    typed = [each for each in parsed if each.key_or_group not in ("recipe", KEY)]
    if problems := apply_overrides(tree, typed, group_tree):
        raise ConfigError(problems)
    if isinstance(trunks_data, dict):
        _keep_data(tree, trunks_data, branching, typed)
    return tree


def _keep_data(tree: DictConfig, before: Mapping[Any, Any], branching: Branching, typed: Sequence[Override]) -> None:
    """Restore the parent's tokenizer and batch keys, except given ones, if another file of `data` was selected."""
    given = {*branching.values, *(each.key_or_group for each in typed)}
    if "data" not in branching.groups and "data" not in given:
        return
    for key in SAME_DATA:
        if key in before and not any(each == f"data.{key}" or each.startswith(f"data.{key}.") for each in given):
            OmegaConf.update(tree, f"data.{key}", before[key], merge=False, force_add=True)


def apply_overrides(tree: DictConfig, parsed: Sequence[Override], group_tree: GroupTree) -> list[Problem]:
    """Apply overrides to the resolved config `tree` in place, whole groups first; return the problems.

    `group_tree` returns the tree of a group's file.
    """
    groups = set(group_names())
    vocabulary = OmegaConf.select(tree, "model.vocab_size")
    follows = vocabulary is not None and OmegaConf.select(tree, "data.tokenizer.vocab_size") == vocabulary
    problems: list[Problem] = []
    for each in sorted(parsed, key=lambda each: each.key_or_group not in groups):
        problems += _apply(tree, each, each.key_or_group in groups, group_tree)
    changed = {each.key_or_group for each in parsed}
    if "trainer.compile" in changed and not changed & {"parallel", "parallel.compile"}:
        OmegaConf.update(tree, "parallel.compile", tree.trainer.compile)  # the saved config has it resolved
    if follows and changed & {"model", "model.vocab_size"} and "data.tokenizer.vocab_size" not in changed:
        OmegaConf.update(tree, "data.tokenizer.vocab_size", tree.model.vocab_size)
    return problems


def _apply(tree: DictConfig, each: Override, is_group: bool, group_tree: GroupTree) -> Iterator[Problem]:
    key = each.key_or_group
    if each.is_delete():
        yield Problem(key, "~ deletes keys of a composition, but this changes a run's config. Override single keys.")
    elif each.is_sweep_override():
        yield Problem(key, "has several values, but this is the config of one run. Give one.")
    elif is_group and not isinstance(each.value(), dict):
        try:
            tree[key] = group_tree(key, str(each.value()))
        except ConfigError as error:
            yield from error.problems
    else:
        try:
            OmegaConf.update(tree, key, each.value(), force_add=True)
        except OmegaConfBaseException as error:
            yield Problem(key, f"cannot be set: {first_line(error)}.")
