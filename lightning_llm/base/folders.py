"""Folders: the user's cache, a short one for unix sockets, and the nearest that exists.

A socket's path has at most 107 bytes. `multiprocessing` puts the sockets of loader processes and of its fork server
into the folder of temporary files, TMPDIR, and Ray its own; where that path is too long, they get a shorter folder.
"""

import os
import tempfile
from multiprocessing import util
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem

LONGEST_PATH = 107
"""Bytes of a socket's path on Linux (unix(7), sun_path)."""
OWN_NAMES = len("/pymp-xxxxxxxx/listener-xxxxxxxx")
RAY_NAMES = len("/ray/session_2026-11-26_14-00-00_000000_1234567/sockets/plasma_store")
SHORT = ("/tmp", "/var/tmp", "/dev/shm")


def use_short_sockets() -> None:
    """Have `multiprocessing` keep the sockets of this process, and of those that it starts, in a short folder.

    Raises:
        ConfigError: TMPDIR is too long, and there is no other folder.
    """
    if not _is_long(OWN_NAMES):
        return
    before = tempfile.tempdir
    tempfile.tempdir = _short_folder()
    try:
        util.get_temp_dir()  # is chosen by the first who asks, and removed when this process ends
    finally:
        tempfile.tempdir = before


def ray_environment() -> dict[str, str]:
    """Return the variable that has Ray keep its sockets in a short folder, {} where TMPDIR is short.

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
            f"is {tempfile.gettempdir()}, too long for the sockets between processes, and {', '.join(SHORT)} cannot be "
            f"written. Set TMPDIR to a folder of at most {LONGEST_PATH - RAY_NAMES} bytes."
        )
        raise ConfigError(Problem("TMPDIR", text))
    return found


def user_cache_dir() -> Path:
    """Return the folder of what can be made again (token caches, kernels). It may not exist yet."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("lightning-llm"))


def nearest_existing(path: Path) -> Path:
    """Return `path` or the nearest folder above it that exists."""
    return next((p for p in (path, *path.parents) if os.path.exists(p)), Path("/"))  # Path's raises for long names
