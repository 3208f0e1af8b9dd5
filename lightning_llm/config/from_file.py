"""Reading a run's config.yaml with overrides on top. The config of a moved run gets the folder of its file."""

import os
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.branching import apply_overrides
from lightning_llm.config.compose import compose_tree
from lightning_llm.config.derived_keys import fill_from_weights, fill_steps, give_way_to_cluster
from lightning_llm.config.overrides import read_overrides
from lightning_llm.config.resolve import read_tree
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.aliases import migrate
from lightning_llm.config.schema.validation import ParsedConfig
from lightning_llm.config.workspace import same_folder
from lightning_llm.config.yaml_file import read_mapping

CONFIG = "config.yaml"
WRITTEN_BY_RUNS = ("summary.json", "metrics.jsonl", "checkpoints")
"""Files next to the config of a run that has begun."""


def load_config(file: Path, overrides: Sequence[str]) -> Config:
    """Return the config that a run wrote as `config.yaml`, with value overrides on top, for reading only.

    Callback classes are not checked, since they may be in a `--config-dir` that is not open here.

    Raises:
        ConfigError: the file is missing or invalid (its name is the key), or an override is invalid.
    """
    tree = read_mapping(file, file.name, "It must be as its run wrote it.")
    migrate(tree)
    set_run_folder(tree, file)
    try:
        return _read_resolved(tree, overrides, to_build=False).checked()
    except ConfigError as error:
        if overrides:
            load_config(file, [])  # raises if the file itself is invalid
            raise
        wrong = [str(each).rstrip(".") for each in error.problems]
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        text = f"is damaged or from another version: {wrong[0]}{more}. Restore the file as its run wrote it."
        raise ConfigError(Problem(str(file), text)) from error


def read_file(file: Path, overrides: Sequence[str], config_dir: Path | None = None) -> ParsedConfig:
    """Return the config of `--config FILE` with overrides on top, and its problems.

    A run's config.yaml applies to the folder that contains it (`set_run_folder`), unless overridden.

    `group=name` replaces the whole group by that file; overrides of single keys are applied afterwards.

    Raises:
        ConfigError: the config has no valid part.
    """
    tree = read_mapping(file, "--config", "Give a run's config.yaml.")
    migrate(tree)
    set_run_folder(tree, file)
    return _read_resolved(tree, overrides, config_dir, to_build=True)


def _read_resolved(
    tree: DictConfig, overrides: Sequence[str], config_dir: Path | None = None, *, to_build: bool
) -> ParsedConfig:
    parsed, problems = read_overrides(overrides)
    one_machine = tree.get("world") == OmegaConf.select(tree, "trainer.devices")
    for each in parsed:
        if each.key_or_group == "recipe":
            text = (
                "cannot be changed with --config. Override groups and keys, or compose a new config without --config."
            )
            problems.append(Problem("recipe", text))
    problems += apply_overrides(
        tree,
        [each for each in parsed if each.key_or_group != "recipe"],
        lambda group, name: compose_tree([f"{group}={name}"], config_dir)[0][group],
    )
    if problems:
        raise ConfigError(problems)
    changed = {each.key_or_group for each in parsed}
    if changed & {"run.root", "run.experiment", "run.name"} and "run.dir" not in changed:
        OmegaConf.update(tree, "run.dir", "${run.root}/${run.experiment}/${run.name}")  # the saved value is resolved
    if "trainer.devices" in changed and "world" not in changed and one_machine:
        tree.world = None  # it was recorded for the former number of ranks
    give_way_to_cluster(tree, changed)
    fill_from_weights(tree, list(changed))
    if to_build:
        fill_steps(tree, changed, of_file=True)
    return read_tree(tree, to_build=to_build)


def set_run_folder(tree: DictConfig, file: Path) -> None:
    """Set `run.dir` of a run's config to the folder of its `file`, and `run.root` accordingly, in place.

    So a folder that was moved, copied or mounted elsewhere works as the run's folder. Nothing changes if both paths are
    the same folder, or if `file` is not in a run's folder: a copied config.yaml still refers to its run.
    """
    folder = Path(os.path.abspath(file)).parent
    recorded, root = (OmegaConf.select(tree, key) for key in ("run.dir", "run.root"))
    if not isinstance(recorded, str) or not is_run_file(file) or same_folder(folder, Path(recorded)):
        return
    tree.run.dir = str(folder)
    if isinstance(root, str):
        tree.run.root = str(_root_of(folder, Path(recorded), Path(root)))


def moved_from(file: Path) -> Path | None:
    """Return the former folder of a run that was moved, as recorded in its config.yaml `file`; None if it was not."""
    recorded = OmegaConf.select(read_mapping(file, CONFIG), "run.dir")
    if not isinstance(recorded, str) or same_folder(file.parent, Path(recorded)):
        return None
    return Path(recorded)


def is_run_file(file: Path) -> bool:
    """Return whether `file` is the config.yaml in the folder of a run that has begun."""
    return file.name == CONFIG and any((file.parent / name).exists() for name in WRITTEN_BY_RUNS)


def _root_of(folder: Path, recorded: Path, root: Path) -> Path:
    """Return run.root for a run now in `folder`: moved with it, unchanged, or as many levels above the folder."""
    if not recorded.is_relative_to(root) or recorded == root:
        return root
    below = recorded.relative_to(root).parts
    moved_along = folder.parts[-len(below) :] == below
    return folder.parents[len(below) - 1] if moved_along or not root.exists() else root
