"""Folders: the user's cache, a short folder for Unix sockets, the nearest existing folder, and outputs of a command.

The path of a socket is limited to 107 bytes. `multiprocessing` and Ray put their sockets into TMPDIR; if its path is
too long, they get a shorter folder.
"""

import os
import tempfile
from multiprocessing import util
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem

LONGEST_PATH = 107
"""Maximum length of a socket's path on Linux in bytes (unix(7), sun_path)."""
OWN_NAMES = len("/pymp-xxxxxxxx/listener-xxxxxxxx")
RAY_NAMES = len("/ray/session_2026-11-26_14-00-00_000000_1234567/sockets/plasma_store")
SHORT = ("/tmp", "/var/tmp", "/dev/shm")


def use_short_sockets() -> None:
    """Let `multiprocessing` put the sockets of this process and its children into a short folder.

    Raises:
        ConfigError: TMPDIR is too long, and no other folder can be used.
    """
    if not _is_long(OWN_NAMES):
        return
    before = tempfile.tempdir
    tempfile.tempdir = _short_folder()
    try:
        util.get_temp_dir()  # chosen by the first call, and removed when this process ends
    finally:
        tempfile.tempdir = before


def ray_environment() -> dict[str, str]:
    """Return the environment variable that makes Ray put its sockets into a short folder; {} if TMPDIR is short.

    Raises:
        ConfigError: as `use_short_sockets`.
    """
    return {"RAY_TMPDIR": _short_folder()} if _is_long(RAY_NAMES) else {}


def _is_long(names: int) -> bool:
    return len(os.fsencode(tempfile.gettempdir())) + names > LONGEST_PATH


def _short_folder() -> str:
    found = next((each for each in SHORT if os.access(each, os.W_OK | os.X_OK)), None)
    if found is None:
        text = (
            f"is {tempfile.gettempdir()}, too long for the paths of sockets, and {', '.join(SHORT)} cannot be written. "
            f"Set TMPDIR to a folder with at most {LONGEST_PATH - RAY_NAMES} bytes."
        )
        raise ConfigError(Problem("TMPDIR", text))
    return found


def user_cache_dir() -> Path:
    """Return the user's folder of caches (tokens, kernels), which may not exist yet."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("lightning-llm"))


def nearest_existing(path: Path) -> Path:
    """Return `path` or the nearest existing folder above it."""
    return next((p for p in (path, *path.parents) if os.path.exists(p)), Path("/"))  # Path.exists raises on long names


OUTPUT = "--output"


def output_file_problems(file: Path) -> list[Problem]:
    """Return a problem if the file of --output cannot be written, else []: checked before hours of work produce it."""
    if file.is_dir():
        return [Problem(OUTPUT, "is a folder. Give a file in it.", file)]
    return _output_problems(file, file.parent)


def output_folder_problems(folder: Path) -> list[Problem]:
    """Return a problem if the folder of --output cannot be written, else []. It need not exist yet."""
    return _output_problems(folder, folder)


def _output_problems(path: Path, folder: Path) -> list[Problem]:
    folder = folder.absolute()
    above = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=above):
            return []
    except OSError as error:
        return [Problem(OUTPUT, f"cannot be written ({error.strerror}). Choose another path.", path)]
