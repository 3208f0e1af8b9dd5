"""Check that an output file or folder can be written, before hours of work produce its content."""

import tempfile
from pathlib import Path

from lightning_llm.base.errors import Problem

KEY = "--output"


def file_problems(file: Path) -> list[Problem]:
    """Return a problem if `file` cannot be written, else an empty list."""
    if file.is_dir():
        return [Problem(KEY, "is a folder. Give a file in it.", file)]
    return _problems(file, file.parent)


def folder_problems(folder: Path) -> list[Problem]:
    """Return a problem if no file can be written in `folder`, which need not exist yet."""
    return _problems(folder, folder)


def _problems(path: Path, folder: Path) -> list[Problem]:
    folder = folder.absolute()
    above = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=above):
            return []
    except OSError as error:
        return [Problem(KEY, f"cannot be written ({error.strerror}). Choose another path.", path)]
