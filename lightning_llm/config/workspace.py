"""Folders of a command: the folder of all runs, independent of the working directory, and `--config-dir`.

`DIR/callbacks/mine.py` is the module `config_dir.callbacks.mine`; `sources` reads the YAML files. Passing the folder on
the command line permits running its code. A preset by itself imports only installed code.
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
    """Return the root of the source checkout that this package runs from; None for an installed wheel."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "recipes").is_dir() else None


def default_outputs() -> str:
    """Return the folder of all runs: LIGHTNING_LLM_OUTPUTS, the checkout's outputs/, or ~/lightning-llm/outputs."""
    if os.environ.get(OUTPUTS_VARIABLE):
        return str(Path(os.environ[OUTPUTS_VARIABLE]).expanduser().absolute())
    return possible_outputs()[0]


def possible_outputs() -> list[str]:
    """Return the default folders of runs: that of the checkout, if any, and that of an installed wheel."""
    root = checkout()
    return [*([str(root / "outputs")] if root else []), str(Path.home() / "lightning-llm" / "outputs")]


def folders_named(word: str, root: Path) -> list[Path]:
    """Return the folders named `word`: a path, an experiment of `root`, or else SWEEP or SWEEP/N in any experiment."""
    for path in (Path(word).expanduser(), root / word):
        if path.is_dir():
            return [path]
    return [path for each in sorted(root.iterdir()) if (path := each / word).is_dir()] if root.is_dir() else []


def same_folder(one: Path, other: Path) -> bool:
    """Return whether two paths are the same folder, also through links or mounts; missing ones are compared by name."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def open_config_dir(folder: Path | None) -> None:
    """Make `_target_: config_dir.callbacks.FILE.Class` refer to classes of `folder`; None: to nothing.

    Raises:
        ConfigError: it is not a folder.
    """
    if CONFIG_DIR_PACKAGE in sys.modules:
        for name in [each for each in sys.modules if each.partition(".")[0] == CONFIG_DIR_PACKAGE]:
            del sys.modules[name]
    if folder is None:
        return
    if not folder.is_dir():
        raise ConfigError(Problem("--config-dir", f"is {folder}, not a folder. Give a folder with config groups."))
    spec = ModuleSpec(CONFIG_DIR_PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [str(folder.absolute())]
    sys.modules[CONFIG_DIR_PACKAGE] = module_from_spec(spec)
    importlib.invalidate_caches()


def config_dir_arguments() -> list[str]:
    """Return the arguments that open the same folder in a child process: a rank, a job of a sweep."""
    module = sys.modules.get(CONFIG_DIR_PACKAGE)
    return ["--config-dir", *module.__path__] if module else []
