"""Folders of runs, whatever folder a command is started in."""

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of the package `lightning_llm`."""
OUTPUTS_VARIABLE = "LIGHTNING_LLM_OUTPUTS"


def checkout() -> Path | None:
    """Return the root of the source checkout this package runs from; None for an installed wheel."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "recipes").is_dir() else None


def default_outputs() -> str:
    """Return the folder of all runs: LIGHTNING_LLM_OUTPUTS, the checkout's outputs/, or ~/lightning-llm/outputs."""
    if os.environ.get(OUTPUTS_VARIABLE):
        return str(Path(os.environ[OUTPUTS_VARIABLE]).expanduser().absolute())
    return possible_outputs()[0]


def possible_outputs() -> list[str]:
    """Return the folders of runs without LIGHTNING_LLM_OUTPUTS: the checkout's, if there is one, and a wheel's."""
    root = checkout()
    return [*([str(root / "outputs")] if root else []), str(Path.home() / "lightning-llm" / "outputs")]


def folders_named(word: str, root: Path) -> list[Path]:
    """Return the folders that `word` names: a path, an experiment of `root`, else SWEEP or SWEEP/N in any of them."""
    for path in (Path(word).expanduser(), root / word):
        if path.is_dir():
            return [path]
    return [path for each in sorted(root.iterdir()) if (path := each / word).is_dir()] if root.is_dir() else []


def same_folder(one: Path, other: Path) -> bool:
    """Return whether two paths lead to the same folder, by links or mounts; of those not there, by their names."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)
