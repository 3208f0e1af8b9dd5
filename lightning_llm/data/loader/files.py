"""Local files: which ones a source's `path` names, and what is wrong with it. Imports neither torch nor `datasets`."""

import os
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from glob import glob, has_magic
from pathlib import Path

from lightning_llm.config.schema.data import TextSourceConfig, TokenSourceConfig, loader_of
from lightning_llm.errors import Problem


def matching_files(path: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files that `path` (a file, a folder or a glob) names, absolute and sorted; of a folder by ending."""
    expanded = Path(path).expanduser().absolute()
    if os.path.isfile(expanded):  # Path's own raise for names that are too long
        return [expanded]
    if os.path.isdir(expanded):
        found: Iterable[Path] = (f for f in expanded.rglob("*") if f.name.lower().endswith(suffixes))
    elif has_magic(path):
        found = map(Path, glob(str(expanded), recursive=True))
    else:
        return []
    return sorted(f for f in found if f.is_file())


def file_problems(
    key: str, source: TextSourceConfig | TokenSourceConfig, is_own: Callable[[Path], bool] | None = None
) -> Iterator[Problem]:
    """Yield a problem where `path` is missing, names no file, or files that are another loader's by their names.

    `is_own` tells of the first file whether it is the loader's nevertheless.
    """
    if isinstance(source, TextSourceConfig) and source.part is not None:
        yield Problem(f"{key}.part", f"{source.part!r} belongs to loader=python, not to {source.loader}.")
    if isinstance(source, TextSourceConfig) and source.include is not None:
        text = f"belongs to loader=python, not to {source.loader}: name files by a glob in {key}.path."
        yield Problem(f"{key}.include", text)
    if not source.path:
        yield Problem(f"{key}.path", f"loader={source.loader} needs a path.")
        return
    files = source.files()
    if not files:
        yield Problem(f"{key}.path", _no_file(source.path, source.suffixes))
        return
    kinds = {loader_of(file.name) for file in files}
    kind = kinds.pop()
    if kinds or kind in (None, source.loader) or (is_own and is_own(files[0])):  # of several kinds, or this one
        return
    text = (
        f"{source.path!r}: files like {files[0].name} are read by loader={kind}, not by {source.loader}. "
        f"Set data={kind} data.sources.{kind}.path={source.path}."
    )
    yield Problem(f"{key}.path", text)


def _no_file(path: str, suffixes: Sequence[str]) -> str:
    absolute = Path(path).expanduser().absolute()
    if os.path.isdir(absolute):
        endings = ", ".join(suffixes)
        return f"the folder {absolute} holds no file that ends in {endings}. Name the files with a glob."
    return f"{path!r} matches no file (looked for {absolute}). Give a file, a folder or a glob."


def beginning(file: Path) -> bytes:
    """Return what a file starts with, behind a byte order mark and blanks."""
    try:
        with file.open("rb") as opened:
            return opened.read(4096).removeprefix(BOM_UTF8).lstrip()
    except OSError:  # whoever reads all of it says why
        return b""
