"""Whether a file or a folder that is asked for can be written, before hours are spent on what goes there."""

import tempfile
from pathlib import Path

from lightning_llm.base.errors import Problem

KEY = "--output"


def file_problems(file: Path) -> list[Problem]:
    """Return why `file` cannot be written, none where it can."""
    if file.is_dir():
        return [Problem(KEY, f"{file} is a folder. Name a file in it.")]
    return _problems(file, file.parent)


def folder_problems(folder: Path) -> list[Problem]:
    """Return why no file can be written in `folder`, which may have to be made."""
    return _problems(folder, folder)


def _problems(path: Path, folder: Path) -> list[Problem]:
    folder = folder.absolute()
    above = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=above):
            return []
    except OSError as error:
        return [Problem(KEY, f"{path} cannot be written ({error.strerror}). Name another.")]
