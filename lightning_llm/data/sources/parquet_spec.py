"""The loader of Parquet files."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.data import LOADERS, TextSourceConfig
from lightning_llm.data.sources.files import LocalFiles, file_problems

COMPRESSION = 3  # text within parquet, about


@LOADERS.register
class ParquetSource(LocalFiles, TextSourceConfig):
    """Parquet files, of which the column `text_key` alone is read."""

    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    loader: Literal["parquet"] = "parquet"

    def problems(self, key: str) -> Iterable[Problem]:
        return file_problems(key, self)

    def cached_bytes(self, files: Sequence[Path]) -> int:
        return COMPRESSION * super().cached_bytes(files)

    def build(self, key: str, files: Sequence[Path]) -> Any:
        from lightning_llm.data.sources.parquet import ParquetReader

        return ParquetReader(self, key, files)
