import csv
from typing import ClassVar, Literal

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.data import LOADERS, SourceConfig
from lightning_llm.data.sources.files import matching_files


@LOADERS.register
class CsvSource(SourceConfig):
    """A column of CSV files; each row is a document."""

    suffixes: ClassVar = (".csv",)

    loader: Literal["csv"] = "csv"
    path: str
    column: str = "text"

    def problems(self, key):
        return [] if self.files() else [Problem(f"{key}.path", f"{self.path!r} matches no file.")]

    def files(self):
        return matching_files(self.path, self.suffixes)

    def build(self, key, files):
        return CsvReader(files, self.column)


class CsvReader:
    """Yields the documents of the files in a fixed order."""

    def __init__(self, files, column):
        self.files, self.column = files, column

    def documents(self):
        for file in self.files:
            with file.open(newline="") as opened:
                yield from (row[self.column] for row in csv.DictReader(opened))
