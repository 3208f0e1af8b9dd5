"""loader=parquet: one column of each file; other columns and the encoding of text may differ between files."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.data import LOADERS, TextSourceConfig
from lightning_llm.data.sources.files import LocalFiles, file_problems
from lightning_llm.data.sources.source import raised_in_a_line, text_of

COMPRESSION = 3  # text within parquet, about
READ_ROWS = 4096


@LOADERS.register
class ParquetSource(LocalFiles, TextSourceConfig):
    """Parquet files; only the column `text_key` is read."""

    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    loader: Literal["parquet"] = "parquet"

    def problems(self, key: str) -> Iterable[Problem]:
        return file_problems(key, self)

    def cached_bytes(self, files: Sequence[Path]) -> int:
        return COMPRESSION * super().cached_bytes(files)

    def build(self, key: str, files: Sequence[Path]) -> Any:
        return ParquetReader(self.text_key, key, files)


class ParquetReader:
    """A `DocumentReader` of rows."""

    def __init__(self, text_key: str, key: str, files: Sequence[Path]):
        self.text_key, self.key, self.files = text_key, key, files

    def documents(self) -> Iterator[str | None]:
        """Yield each row's text. Raises ValueError with the name of a file that cannot be read."""
        for file in self.files:
            try:
                with raised_in_a_line(), file.open("rb") as opened:  # pyarrow would take some names for URLs
                    yield from self._column(opened, str(file))
            except (ValueError, OSError) as error:
                raise ValueError(f"{file}: {error}" if len(self.files) > 1 else str(error)) from error

    def _column(self, opened: Any, where: str) -> Iterator[str | None]:
        import pyarrow.parquet  # imported only where a token cache is built

        column, content = self.text_key, pyarrow.parquet.ParquetFile(opened)
        names = content.schema_arrow.names
        if column not in names:
            text_of(dict.fromkeys(names), column, self.key, where)
        for batch in content.iter_batches(READ_ROWS, columns=[column]):
            for value in batch.column(column).to_pylist():
                yield text_of({column: value}, column, self.key, where)
