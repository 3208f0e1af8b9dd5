"""`--config-dir DIR` as a Python package: `DIR/callbacks/mine.py` is `config_dir.callbacks.mine`.

Its Python files are found here; its YAML files are `yaml_source`'s.

Naming the folder on the command line is the choice to run what lies in it. A recipe alone imports installed code only.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem

PACKAGE = "config_dir"


def open_config_dir(folder: Path | None) -> None:
    """Let `_target_: config_dir.callbacks.FILE.Class` name classes of `folder`; None: of nowhere.

    Raises:
        ConfigError: it is no folder.
    """
    if PACKAGE in sys.modules:
        for name in [each for each in sys.modules if each.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
    if folder is None:
        return
    if not folder.is_dir():
        raise ConfigError(Problem("--config-dir", f"{folder} is no folder. Give a folder of config groups."))
    spec = ModuleSpec(PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [str(folder.absolute())]
    sys.modules[PACKAGE] = module_from_spec(spec)
    importlib.invalidate_caches()


def config_dir_arguments() -> list[str]:
    """Return the words that open the same folder in a process started from here: a rank, a job of a sweep."""
    module = sys.modules.get(PACKAGE)
    return ["--config-dir", *module.__path__] if module else []
