"""loader=parquet, by the parquet builder of `datasets`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_llm.config.schema.data import TextSourceConfig
from lightning_llm.data.loader.records import column_of, said_in_a_line
from lightning_llm.data.source import streamed, these_files


class ParquetReader:
    """A `DocumentReader` of rows."""

    def __init__(self, config: TextSourceConfig, key: str, files: Sequence[Path]):
        self.config, self.key, self.files = config, key, files

    def documents(self) -> Iterator[str | None]:
        """Yield each row's text."""
        with said_in_a_line():
            rows = streamed("parquet", self.files)
        return column_of(rows, self.config.text_key, self.key, these_files(self.config.path, self.files))
