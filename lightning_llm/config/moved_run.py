"""A run's config.yaml that is read where the run lies now: its folder is the file's, whatever path was recorded."""

import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lightning_llm.config.workspace import same_folder
from lightning_llm.config.yaml_file import read_mapping

CONFIG = "config.yaml"
WRITTEN_BY_RUNS = ("summary.json", "metrics.jsonl", "checkpoints")
"""What lies beside the config of a run that has begun."""


def place_where_it_lies(tree: DictConfig, file: Path) -> None:
    """Set `run.dir` of a run's config to the folder of `file`, and `run.root` accordingly; changes `tree` in place.

    A folder that was moved, copied or mounted elsewhere is so the run's own. Nothing changes where both paths lead to
    the same folder, or where `file` lies in no run's folder: a copy of config.yaml alone names the run it was of.
    """
    folder = Path(os.path.abspath(file)).parent
    recorded, root = (OmegaConf.select(tree, key) for key in ("run.dir", "run.root"))
    if not isinstance(recorded, str) or not is_run_file(file) or same_folder(folder, Path(recorded)):
        return
    tree.run.dir = str(folder)
    if isinstance(root, str):
        tree.run.root = str(_root_of(folder, Path(recorded), Path(root)))


def moved_from(file: Path) -> Path | None:
    """Return the folder that the run of `file` recorded as its own, None where that is the folder of `file`."""
    recorded = OmegaConf.select(read_mapping(file, CONFIG), "run.dir")
    if not isinstance(recorded, str) or same_folder(file.parent, Path(recorded)):
        return None
    return Path(recorded)


def is_run_file(file: Path) -> bool:
    """Return whether `file` is the config of a run that has begun, in the run's folder."""
    return file.name == CONFIG and any((file.parent / name).exists() for name in WRITTEN_BY_RUNS)


def _root_of(folder: Path, recorded: Path, root: Path) -> Path:
    """Return where run.root lies for a run now in `folder`: moved with it, as it was, or as far above the folder."""
    if not recorded.is_relative_to(root) or recorded == root:
        return root
    below = recorded.relative_to(root).parts
    moved_along = folder.parts[-len(below) :] == below
    return folder.parents[len(below) - 1] if moved_along or not root.exists() else root
