"""Local files of a source: finding those that match its `path`, reporting problems, and opening them.

Files are opened here and not by the readers' libraries, because some take a path for a pattern or a URL. Imports
neither torch nor `datasets`.
"""

import bz2
import glob
import gzip
import io
import lzma
import os
import stat
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.data import TextSourceConfig, TokenSourceConfig, loader_of

WORKING_FOLDERS = frozenset(("__MACOSX", "__pycache__", "_delta_log", "_spark_metadata", "_temporary"))
"""Working folders of other programs, which contain files of the same endings."""
HIDDEN, WORKING, OTHER_ENDING = "hidden", "a program's working folder", "another ending"
"""Reasons for which a file of a folder is not read."""
ENCODING = "utf-8-sig"
"""UTF-8, with or without the byte order mark that some editors write."""
DAMAGED = (ValueError, OSError, EOFError, KeyError, zlib.error, lzma.LZMAError)
"""Errors of a file that cannot be read; pyarrow's and datasets' are among these."""


@dataclass(frozen=True)
class FoundFiles:
    """The files that match a path: those to read, absolute and sorted, and {path: reason} of `skipped` ones."""

    read: list[Path] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


class LocalFiles:
    """Mixin of loaders with a `path`: a file, a glob, or a folder, where all files with their suffixes are read."""

    def files(self: Any) -> list[Path]:
        """Return the files that are read, absolute and sorted."""
        return matching_files(self.path or "", self.suffixes)

    def skipped_files(self: Any) -> dict[str, str]:
        """Return {path: reason} of the files that match `path` but are not read."""
        return find_files(self.path or "", self.suffixes).skipped


def local_path(path: str) -> Path:
    """Return the absolute `path`, with "~" expanded if it refers to a home folder."""
    return Path(os.path.expanduser(path)).absolute()  # Path's own raises for a file named ~notes.txt


def matching_files(path: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files to read for `path`, absolute and sorted; `find_files` also returns the skipped ones."""
    return find_files(path, suffixes).read


def find_files(path: str, suffixes: tuple[str, ...]) -> FoundFiles:
    """Return the files that match `path` (a file, a folder or a glob); in a folder, those that end in `suffixes`.

    A path that exists is used literally, even with wildcard characters; any other is a pattern. In a folder, links are
    followed, each real folder is read once, and hidden files and folders are skipped.
    """
    if not path:
        return FoundFiles()
    literal = local_path(path)
    if os.path.isfile(literal):  # Path's own raise for names that are too long
        return FoundFiles([literal])
    if os.path.isdir(literal):
        return _in_folder(literal, suffixes)
    if not glob.has_magic(path):
        return FoundFiles()
    found = FoundFiles()
    for name in sorted({*glob.glob(_pattern(literal), recursive=True)}):
        if reason := _unreadable(name):
            found.skipped[name] = reason
        elif os.path.isfile(name):
            found.read.append(Path(name))
        elif "**" not in path:  # which matches the folders that it goes through
            found.skipped[name] = "a folder"
    return FoundFiles(sorted(found.read), found.skipped)


def _pattern(path: Path) -> str:
    """Return `path` as a pattern with its existing leading folders escaped."""
    folder = next(each for each in path.parents if os.path.isdir(each))
    return os.path.join(glob.escape(str(folder)), path.relative_to(folder))


def _in_folder(root: Path, suffixes: tuple[str, ...]) -> FoundFiles:
    found = FoundFiles()
    visited: dict[tuple[int, int], str] = {}

    def unopened(error: OSError) -> None:
        found.skipped[str(error.filename)] = f"cannot be opened: {error.strerror}"

    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=unopened):
        its = os.stat(folder)
        if (first := visited.setdefault((its.st_dev, its.st_ino), folder)) != folder:
            found.skipped[folder] = f"the same folder as {first}"
            subfolders.clear()
            continue
        for name in sorted((*subfolders, *names)):
            reason = HIDDEN if name.startswith(".") else WORKING if name in WORKING_FOLDERS else None
            if reason is None and name in subfolders:
                continue
            path = os.path.join(folder, name)
            if reason or (reason := _unreadable(path)):
                found.skipped[path] = reason
            elif not name.lower().endswith(suffixes):
                found.skipped[path] = OTHER_ENDING
            else:
                found.read.append(Path(path))
        subfolders[:] = sorted(each for each in subfolders if os.path.join(folder, each) not in found.skipped)
    return FoundFiles(sorted(found.read), found.skipped)


def _unreadable(path: str) -> str | None:
    """Return why nothing can be read at `path`, None for a file or a folder."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return "a link to nothing"
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "no regular file"


def file_problems(
    key: str, source: TextSourceConfig | TokenSourceConfig, is_own: Callable[[Path], bool] | None = None
) -> Iterator[Problem]:
    """Yield a problem if `path` is missing, matches no file, or matches files with the ending of another loader.

    Args:
        key: data.sources.NAME.
        source: the config of the source.
        is_own: returns whether a file belongs to this loader although its ending is another's.
    """
    if isinstance(source, TextSourceConfig) and source.part is not None:
        yield Problem(f"{key}.part", f"{source.part!r} is a key of loader=python, not of {source.loader}. Remove it.")
    if isinstance(source, TextSourceConfig) and source.include is not None:
        text = f"is a key of loader=python, not of {source.loader}. Select files with a glob in {key}.path."
        yield Problem(f"{key}.include", text)
    if not source.path:
        yield Problem(f"{key}.path", f"loader={source.loader} needs a path. Give a file, a folder or a glob.")
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
    absolute = local_path(path)
    if os.path.isdir(absolute):
        endings = ", ".join(suffixes)
        return f"the folder {absolute} contains no file that ends in {endings}. Select files with a glob."
    return f"{path!r} matches no file (looked for {absolute}). Give a file, a folder or a glob."


def _by_arrow(codec: str) -> Callable[[Path], Any]:
    def open_file(file: Path) -> Any:
        import pyarrow  # imported only where such a file is read

        return pyarrow.CompressedInputStream(file.open("rb"), codec)

    return open_file


OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _by_arrow("zstd"),
    ".lz4": _by_arrow("lz4"),
}


def with_compressed(*endings: str) -> tuple[str, ...]:
    """Return `endings` and their compressed forms: ".txt" gives ".txt", ".txt.gz", ".txt.bz2" and so on."""
    return endings + tuple(ending + compression for compression in OPENERS for ending in endings)


def opened(file: Path) -> IO[bytes]:
    """Open a file for reading bytes; it is decompressed if its ending is that of a compression (`OPENERS`)."""
    found: IO[bytes] = OPENERS.get(file.suffix.lower(), lambda each: each.open("rb"))(file)
    return found


def opened_as_text(file: Path, encoding: str = ENCODING) -> IO[str]:
    """Open a file for reading text; it is decompressed if its ending is that of a compression (`OPENERS`)."""
    return io.TextIOWrapper(opened(file), encoding=encoding)


def beginning(file: Path) -> bytes:
    """Return up to 4,096 bytes of the beginning of a file, without a byte order mark and leading blanks."""
    try:
        with file.open("rb") as opened:
            return opened.read(4096).removeprefix(BOM_UTF8).lstrip()
    except OSError:  # reported when the file is read
        return b""


def first_that_is_no_text(files: Iterable[Path]) -> str | None:
    """Return the place of the first byte that is not UTF-8, as text ("line 3 of FILE, byte 0xff,"); None if valid."""
    for file in files:
        with opened(file) as content:
            for number, line in enumerate(io.BufferedReader(content), 1):  # type: ignore[type-var]
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    return f"line {number} of {file}, byte 0x{line[error.start]:02x},"
    return None
