"""loader=olmo: what `numpy.memmap` takes for an array, as in OLMo and OLMo-core (`MemMapDataset`, `NumpyDataset`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.data import LOADERS, TokenSourceConfig
from lightning_llm.data.sources.files import LocalFiles, file_problems

NUMPY_MAGIC = b"\x93NUMPY"
READ_TOKENS = 1 << 24
LOOKED_AT_TOKENS = 4096


@LOADERS.register
class OlmoSource(LocalFiles, TokenSourceConfig):
    """OLMo's `.npy` files: token ids without a header, each document followed by the end-of-document token."""

    suffixes: ClassVar[tuple[str, ...]] = (".npy",)

    loader: Literal["olmo"] = "olmo"
    dtype: Literal["uint16", "uint32"] = Field("uint16", description="one token in the file, little-endian")

    def problems(self, key: str) -> Iterator[Problem]:
        yield from file_problems(key, self)
        size = int(self.dtype[-2:]) // 8
        for file in self.files():
            stored = file.stat().st_size
            with file.open("rb") as opened:
                head = opened.read(len(NUMPY_MAGIC))
            if head == NUMPY_MAGIC:
                text = f"{file} has numpy's header, and OLMo's files have none: write it anew with numpy's tofile."
                yield Problem(f"{key}.path", text)
            elif stored % size or not stored:
                text = f"{file} has {stored:,} bytes, which are no whole number of {self.dtype}: it is cut short."
                yield Problem(f"{key}.path", text if stored else f"{file} is empty.")

    def build(self, key: str, files: Sequence[Path]) -> Any:
        return OlmoReader(list(files), self.dtype)


@dataclass
class OlmoReader:
    """A `TokenReader`."""

    files: list[Path]
    dtype: str

    def token_files(self) -> list[Path]:
        """Return the files."""
        return self.files

    def tokens(self, number: int) -> np.ndarray:
        """Return the token ids of file `number`, [tokens]."""
        return np.asarray(np.memmap(self.files[number], np.dtype(self.dtype).newbyteorder("<"), mode="r"))

    def documents(self, number: int, end_of_document: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where the documents begin, and their lengths; tokens after the last end are a document, too.

        Raises ValueError where no document ends, or ids look like halves of wider ones.
        """
        tokens = self.tokens(number)
        self._check_width(tokens[:LOOKED_AT_TOKENS])
        pieces = [
            np.flatnonzero(tokens[first : first + READ_TOKENS] == end_of_document) + first
            for first in range(0, len(tokens), READ_TOKENS)
        ]
        ends = np.concatenate(pieces).astype(np.int64)
        if not len(ends):
            text = f"has no token {end_of_document}, which ends a document in data.tokenizer: it was made with another"
            raise ValueError(text)
        if ends[-1] != len(tokens) - 1:
            ends = np.append(ends, len(tokens))
        starts = np.append(0, ends[:-1] + 1)
        return starts, ends - starts

    def _check_width(self, tokens: np.ndarray) -> None:
        """Raise ValueError for uint32 that is read as uint16: of every two, the second is next to nothing."""
        high = tokens[1::2]
        if self.dtype == "uint16" and len(high) > 1 and high.max() < 16 <= tokens[::2].max():
            raise ValueError("looks like uint32, but is read as uint16. Set dtype=uint32")
