"""The loader of Hugging Face datasets."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.data import LOADERS, TextSourceConfig
from lightning_llm.data.sources.files import FoundFiles, find_files, local_path


@LOADERS.register
class HuggingFaceSource(TextSourceConfig):
    """A dataset of the hub, or a local folder that `datasets` can load.

    A hub dataset without `revision` is known by its name alone: a newer version there is not noticed.
    """

    loader: Literal["huggingface"] = "huggingface"

    @classmethod
    def is_local(cls, path: str) -> bool:
        return path[0] in "/.~" or os.path.isdir(path)  # a hub name (owner/name), unless such a folder is here

    def problems(self, key: str) -> Iterator[Problem]:
        if self.part is not None:
            yield Problem(f"{key}.part", f"{self.part!r} belongs to loader=python, not to {self.loader}.")
        if not self.path:
            yield Problem(f"{key}.path", f"loader={self.loader} needs a path.")
            return
        absolute = local_path(self.path)
        if os.path.isfile(absolute):
            yield Problem(f"{key}.path", f"{absolute} is a file; files are read by loader=jsonl, text or parquet.")
        elif not os.path.isdir(absolute) and (self.path[0] in "/.~" or self.path.count("/") > 1):
            yield Problem(f"{key}.path", f"there is no folder {absolute}, and it is no hub name (owner/name).")

    def files(self) -> list[Path]:
        return self._in_folder().read

    def skipped_files(self) -> dict[str, str]:
        return self._in_folder().skipped

    def _in_folder(self) -> FoundFiles:
        path = self.path or ""
        return find_files(path, ("",)) if path and os.path.isdir(local_path(path)) else FoundFiles()

    def build(self, key: str, files: Sequence[Path]) -> Any:
        from lightning_llm.data.sources.huggingface import HuggingFaceReader

        return HuggingFaceReader(self, key, files)
