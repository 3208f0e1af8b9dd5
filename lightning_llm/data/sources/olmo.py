"""loader=olmo: what `numpy.memmap` takes for an array, as in OLMo and OLMo-core (`MemMapDataset`, `NumpyDataset`)."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

READ_TOKENS = 1 << 24
LOOKED_AT_TOKENS = 4096


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
            raise ValueError("looks like uint32, and is read as uint16. Set dtype=uint32")
