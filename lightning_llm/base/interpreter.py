"""Starting Python interpreters: every Python process of this program is started with `python_module`.

A user's `random.py` or `json.py` in the working directory must not replace a library. `-P` (safe path) keeps the
directory off the module path of a process, PYTHONSAFEPATH off those of its children. Standard library only.
"""

import os
import sys
from pathlib import Path

SAFE_PATH = "PYTHONSAFEPATH"
UTF8 = "PYTHONUTF8"
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Variables that Lightning parses as integers when it is imported."""
ROOT = Path(__file__).resolve().parents[2]
"""The folder that contains this package: a checkout or site-packages."""


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs `module` in a new interpreter; use it with `python_environment()`."""
    return [sys.executable, *module_arguments(module, *arguments)]


def module_arguments(module: str, *arguments: str) -> list[str]:
    """Return the arguments with which an interpreter runs `module`, without the interpreter itself."""
    return ["-P", "-m", module, *arguments]


def python_environment() -> dict[str, str]:
    """Return the environment variables that a new interpreter needs in addition to those of this process.

    A checkout that is not installed is found only through the module path, often as the working directory.
    """
    found = {SAFE_PATH: "1"}
    if (ROOT / "pyproject.toml").is_file() and any(Path(each or os.curdir).resolve() == ROOT for each in sys.path):
        known = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
        found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(ROOT), *known]))
    return found


def use_utf8() -> None:
    """If the locale is ASCII, restart this command in Python's UTF-8 mode, which its children inherit.

    Otherwise arguments, file names and files that libraries open without an encoding would be limited to ASCII. Python
    uses that mode by default in the locale C, unless PYTHONUTF8=0 forbids it.
    """
    if sys.getfilesystemencoding() == "ascii" and os.environ.get(UTF8) != "1":
        os.environ[UTF8] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def has_working_folder() -> bool:
    """Return whether the working directory still exists; it may have been deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def leave_working_folder() -> None:
    """Remove the working directory, which `python -m` adds, from the module path of this process and its children.

    For the process of a command. PYTHONPATH and installed packages are kept.
    """
    os.environ.update(python_environment())
    first = Path(sys.path[0] or os.curdir).resolve()
    if not sys.flags.safe_path and first == Path.cwd() != ROOT:
        del sys.path[0]


def unset_empty_ranks() -> None:
    """Remove empty rank variables, which job templates may set and which make Lightning's import fail."""
    for name in RANKS:
        if not os.environ.get(name, "0").strip():
            del os.environ[name]
