"""Commands of new Python interpreters: every process of this program that runs Python is started by `python_module`.

The working folder is the user's: a `random.py` or `json.py` in it must not replace a library. `-P` (safe path) keeps
the folder off the module path of the process, PYTHONSAFEPATH off those of the processes that it starts. Standard
library only.
"""

import os
import sys
from pathlib import Path

SAFE_PATH = "PYTHONSAFEPATH"
UTF8 = "PYTHONUTF8"
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Variables that Lightning reads as whole numbers when it is imported."""
ROOT = Path(__file__).resolve().parents[2]
"""The folder of this package: of a checkout, or site-packages."""


def python_module(module: str, *arguments: str) -> list[str]:
    """Return the command that runs `module` in a new interpreter. Give the process `python_environment()`, too."""
    return [sys.executable, *module_arguments(module, *arguments)]


def module_arguments(module: str, *arguments: str) -> list[str]:
    """Return the arguments with which an interpreter runs `module`."""
    return ["-P", "-m", module, *arguments]


def python_environment() -> dict[str, str]:
    """Return the variables that a new interpreter needs beside those of this process.

    A checkout that was never installed is found by the module path alone, often as the working folder.
    """
    found = {SAFE_PATH: "1"}
    if (ROOT / "pyproject.toml").is_file() and any(Path(each or os.curdir).resolve() == ROOT for each in sys.path):
        known = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
        found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(ROOT), *known]))
    return found


def use_utf8() -> None:
    """Start this command again in Python's UTF-8 mode where its locale knows ASCII alone, and its children in it.

    Arguments, names of files and files that libraries open without an encoding could hold no other letters. Python
    takes that mode by itself in the locale C, unless PYTHONUTF8=0 forbids it.
    """
    if sys.getfilesystemencoding() == "ascii" and os.environ.get(UTF8) != "1":
        os.environ[UTF8] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def has_working_folder() -> bool:
    """Return whether the working folder still exists: another shell may have deleted it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def leave_working_folder() -> None:
    """Take the working folder off the module path of this process, which `python -m` puts there, and of its children.

    For the process of a command. PYTHONPATH and installed packages stay.
    """
    os.environ.update(python_environment())
    first = Path(sys.path[0] or os.curdir).resolve()
    if not sys.flags.safe_path and first == Path.cwd() != ROOT:
        del sys.path[0]


def unset_empty_ranks() -> None:
    """Remove rank variables that are empty: a template of a job sets them so, and Lightning's import would raise."""
    for name in RANKS:
        if not os.environ.get(name, "0").strip():
            del os.environ[name]
