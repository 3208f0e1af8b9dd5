"""Folders of a command: where runs are kept, whatever folder it is started in, and the user's `--config-dir`.

`DIR/callbacks/mine.py` is the module `config_dir.callbacks.mine`; `sources` reads the YAML files. Naming the folder on
the command line is the choice to run its code. A recipe alone imports installed code only.
"""

import importlib
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of the package `lightning_llm`."""
OUTPUTS_VARIABLE = "LIGHTNING_LLM_OUTPUTS"
CONFIG_DIR_PACKAGE = "config_dir"


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


def open_config_dir(folder: Path | None) -> None:
    """Let `_target_: config_dir.callbacks.FILE.Class` name classes of `folder`; None: of nowhere.

    Raises:
        ConfigError: it is no folder.
    """
    if CONFIG_DIR_PACKAGE in sys.modules:
        for name in [each for each in sys.modules if each.partition(".")[0] == CONFIG_DIR_PACKAGE]:
            del sys.modules[name]
    if folder is None:
        return
    if not folder.is_dir():
        raise ConfigError(Problem("--config-dir", f"{folder} is no folder. Give a folder of config groups."))
    spec = ModuleSpec(CONFIG_DIR_PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [str(folder.absolute())]
    sys.modules[CONFIG_DIR_PACKAGE] = module_from_spec(spec)
    importlib.invalidate_caches()


def config_dir_arguments() -> list[str]:
    """Return the arguments that open the same folder in a process started from here: a rank, a job of a sweep."""
    module = sys.modules.get(CONFIG_DIR_PACKAGE)
    return ["--config-dir", *module.__path__] if module else []
