"""The loader of the standard library of the Python that runs."""

import platform
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.data import LOADERS, TextSourceConfig


@LOADERS.register
class PythonSource(TextSourceConfig):
    """The standard library's sources, or its documentation: real text without a download."""

    loader: Literal["python"] = "python"

    def problems(self, key: str) -> Iterator[Problem]:
        if self.part is None:
            yield Problem(f"{key}.part", "loader=python needs part=code or part=prose.")
        if self.path is not None:
            yield Problem(f"{key}.path", f"{self.path!r}: loader=python reads this Python's library only.")
        if self.include is not None:
            from lightning_llm.data.sources.python_library import TOPICS, library_files

            for pattern in self.include:
                if not library_files((pattern,)) and not (self.part == "prose" and fnmatchcase(TOPICS, pattern)):
                    yield Problem(
                        f"{key}.include", f"{pattern!r} matches no module of the library: http/*, os.py, json/*."
                    )

    def files(self) -> list[Path]:
        from lightning_llm.data.sources.python_library import library_files

        return list(library_files(self.include))

    def identity(self, files: Sequence[Path]) -> dict[str, Any]:
        """Return it without the files' times: they depend on the Python version alone."""
        version = f"{platform.python_implementation()} {platform.python_version()}"
        keys = self.model_dump(exclude={"weight", "role"} | ({"include"} if self.include is None else set()))
        return keys | {"python": version, "files": [[file.name, file.stat().st_size] for file in files]}

    def build(self, key: str, files: Sequence[Path]) -> Any:
        from lightning_llm.data.sources.python_library import LibraryReader

        return LibraryReader(self.part or "code", self.include)
