"""The loader of Megatron-LM's indexed datasets."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.data import LOADERS, TokenSourceConfig
from lightning_llm.data.sources.files import FoundFiles, file_problems, find_files, local_path

INDEX, TOKENS = ".idx", ".bin"


@LOADERS.register
class MegatronSource(TokenSourceConfig):
    """What Megatron-LM's `tools/preprocess_data.py` writes: token ids in `PREFIX.bin`, their places in `PREFIX.idx`.

    `path` is a prefix, a file of a pair, a folder or a glob. Whether documents end in the end-of-document token
    (`--append-eod`) makes no difference.
    """

    suffixes: ClassVar[tuple[str, ...]] = (INDEX, TOKENS)

    loader: Literal["megatron"] = "megatron"

    def problems(self, key: str) -> Iterator[Problem]:
        from lightning_llm.data.sources.megatron import index_problem

        yield from file_problems(key, self)
        for prefix in sorted({file.with_suffix("") for file in self.files()}):
            if problem := index_problem(prefix):
                yield Problem(f"{key}.path", f"{problem}.")

    def files(self) -> list[Path]:
        """Return both files of each pair, as far as they are there."""
        found = self._found().read
        if any(file.suffix not in self.suffixes for file in found):
            return found  # which are another loader's
        pairs = {file.with_suffix(suffix) for file in found for suffix in self.suffixes}
        return sorted(file for file in pairs if file.is_file())

    def skipped_files(self) -> dict[str, str]:
        return self._found().skipped

    def _found(self) -> FoundFiles:
        path = self.path or ""
        for pair in (f"{path}{suffix}" for suffix in self.suffixes if path):
            if os.path.isfile(local_path(pair)):
                return find_files(pair, self.suffixes)
        found = find_files(path, self.suffixes)
        return found if found.read else find_files(f"{path}{INDEX}", self.suffixes)

    def build(self, key: str, files: Sequence[Path]) -> Any:
        from lightning_llm.data.sources.megatron import MegatronReader

        return MegatronReader([file.with_suffix("") for file in files if file.suffix == INDEX])
