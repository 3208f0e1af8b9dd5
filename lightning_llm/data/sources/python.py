"""loader=python: text of the Python installation itself, so that nothing is downloaded.

`part=code` is the source code of the standard library. `part=prose` is the docstrings of its modules and the language
reference in `pydoc_data`. The corpus depends only on the Python version, so these are excluded: installed packages,
modules that distributions may ship separately (idlelib, tkinter, lib2to3, ...), and files written at build time for one
platform. Test folders and generated character tables are excluded, too.
"""

import ast
import inspect
import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.data import LOADERS, TextSourceConfig
from lightning_llm.data.sources.source import Document, document

LEFT_OUT_FOLDERS = frozenset(
    (
        *("__phello__", "__pycache__", "dist-packages", "lib-dynload", "pydoc_data", "site-packages"),
        *("distutils", "ensurepip", "idlelib", "lib2to3", "msilib", "tkinter", "turtledemo"),
        *("idle_test", "test", "tests"),
    )
)
LEFT_OUT_PREFIXES = ("_sysconfigdata", "_distutils_system_mod", "config-", "sitecustomize", "usercustomize")
GENERATED_MARKS = ("gencodec", "generated from", "automatically generated", "auto-generated")
HEAD_CHARACTERS = 400
TOPICS = "pydoc_data/topics.py"
"""Path of the language reference for `include`."""

Part = Literal["code", "prose"]


@LOADERS.register
class PythonSource(TextSourceConfig):
    """loader=python: the source code of the standard library, or its documentation."""

    loader: Literal["python"] = "python"

    def problems(self, key: str) -> Iterator[Problem]:
        if self.part is None:
            yield Problem(f"{key}.part", "loader=python needs part=code or part=prose.")
        if self.path is not None:
            text = f"{self.path!r}: loader=python only reads this Python's standard library. Remove it."
            yield Problem(f"{key}.path", text)
        for pattern in self.include or ():
            if not library_files((pattern,)) and not (self.part == "prose" and fnmatchcase(TOPICS, pattern)):
                text = f"{pattern!r} matches no module of the library. Give globs such as http/*, os.py or json/*."
                yield Problem(f"{key}.include", text)

    def files(self) -> list[Path]:
        return list(library_files(self.include))

    def identity(self, files: Sequence[Path]) -> dict[str, Any]:
        """Return the identity without file times: the files depend only on the Python version."""
        version = f"{platform.python_implementation()} {platform.python_version()}"
        keys = self.model_dump(exclude={"weight", "role"} | ({"include"} if self.include is None else set()))
        return keys | {"python": version, "files": [[file.name, file.stat().st_size] for file in files]}

    def build(self, key: str, files: Sequence[Path]) -> Any:
        return LibraryReader(self.part or "code", self.include)


@cache  # nothing adds to an interpreter's own library while it runs
def library_files(include: tuple[str, ...] | None = None) -> tuple[Path, ...]:
    """Return the files of the standard library that belong to the corpus, sorted by their path within it.

    `include`: return only paths that match one of these globs, in which * also matches "/"; None: all.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    if include is not None:
        return tuple(file for file in library_files() if _matches(file.relative_to(root).as_posix(), include))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in LEFT_OUT_FOLDERS and not s.startswith(LEFT_OUT_PREFIXES)]
        files += [
            Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(LEFT_OUT_PREFIXES)
        ]
    return tuple(sorted(files, key=lambda file: file.relative_to(root).as_posix()))


def _matches(path: str, include: tuple[str, ...] | None) -> bool:
    return include is None or any(fnmatchcase(path, pattern) for pattern in include)


class LibraryReader:
    """`DocumentReader` of the part "code" or "prose". It keeps the documents in memory, because reading is slow."""

    def __init__(self, part: Part, include: tuple[str, ...] | None = None):
        self.part: Part = part
        self.include = include

    @cached_property
    def _documents(self) -> list[Document]:
        return [document(text, family) for text, family in texts_of(self.part, self.include)]

    def documents(self) -> Iterator[Document]:
        """Yield the documents, with keys that hold out a module's code and docstrings together."""
        return iter(self._documents)


def texts_of(part: Part, include: tuple[str, ...] | None = None) -> Iterator[tuple[str, str]]:
    """Yield (text, family) of each document; documents with the same family are held out together.

    The family of a module's docstrings is its source code, so that text held out in one part is not trained on in the
    other.
    """
    for source in modules(include):
        text = source if part == "code" else docstrings(source)
        if text:
            yield text, source
    if part == "prose" and _matches(TOPICS, include):
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
        for _, text in sorted(topics.items()):
            yield text, text


def modules(include: tuple[str, ...] | None = None) -> Iterator[str]:
    """Yield the source text of each module that matches `include`, in order, without generated modules."""
    for file in library_files(include):
        with tokenize.open(file) as opened:  # honours the file's coding line (PEP 263)
            text = opened.read()
        head = text[:HEAD_CHARACTERS].lower()
        if text.strip() and not any(mark in head for mark in GENERATED_MARKS):
            yield text


def docstrings(source: str) -> str:
    """Return the docstrings of a module, its classes and functions, dedented and separated by blank lines.

    Returns "" if `source` has none.
    """
    found = []
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        body = getattr(node, "body", None)
        if isinstance(body, list):
            pending += reversed(body)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text and text.strip():
                found.append(inspect.cleandoc(text).strip())
    return "\n\n".join(found) + "\n" if found else ""
