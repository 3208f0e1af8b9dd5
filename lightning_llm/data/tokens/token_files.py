"""Tokens of one split of a source: written document by document, memory-mapped, or joined on access from elsewhere."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

FLUSH_BYTES = 8 << 20
SIZES = ".sizes"
"""Ending of a file with the UTF-8 bytes of text per token, uint32 [tokens]; only for the validation split."""


class TokenWriter:
    """Writer of one split of a source: the concatenated tokens of its documents, and the start of each document.

    At most `FLUSH_BYTES` of tokens and one document are in memory, for splits of any length.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], end_of_document: int):
        self.folder, self.split, self.dtype = folder, split, dtype
        self.end = np.array([end_of_document], dtype)
        self.tokens = self.documents = 0
        self._starts: list[int] = []  # of the documents that wait
        self._pending: list[np.ndarray] = []
        self._pending_tokens = 0
        self._digest = blake2b(digest_size=16)
        self._file = (folder / f"{split}.bin").open("wb")
        self._starts_file = (folder / f"{split}.starts").open("wb")
        self._sizes_file = (folder / f"{split}{SIZES}").open("wb") if split == "validation" else None

    def add(self, document: np.ndarray, sizes: np.ndarray | None = None) -> None:
        """Append one document's token ids and the end-of-document token.

        `sizes`: bytes of text of each token, uint32 [tokens + 1], for documents of the validation split.
        """
        if self._sizes_file is not None and sizes is not None:
            self._sizes_file.write(sizes.astype("<u4").tobytes())
        self._starts.append(self.tokens)
        self._pending += [document.astype(self.dtype), self.end]
        self.tokens += len(document) + 1
        self.documents += 1
        self._pending_tokens += len(document) + 1
        if self._pending_tokens * self.dtype.itemsize >= FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            content = np.concatenate(self._pending).astype(self.dtype.newbyteorder("<")).tobytes()
            self._digest.update(content)
            self._file.write(content)
            self._starts_file.write(np.array(self._starts, "<i8").tobytes())
        self._pending, self._pending_tokens, self._starts = [], 0, []

    def close(self) -> dict[str, Any]:
        """Write buffered tokens, sync and close the files; return the split's entry in the manifest.

        The entry has the numbers of `tokens` and `documents`, and the `digest` of the tokens.
        """
        self._flush()
        for file in (self._file, self._starts_file, self._sizes_file):
            if file is None:
                continue
            file.flush()
            os.fsync(file.fileno())
            file.close()
        return {"tokens": self.tokens, "documents": self.documents, "digest": self._digest.hexdigest()}


@dataclass
class TokenStream:
    """One split of a source, memory-mapped: its concatenated documents, each with an end-of-document token.

    `tokens`: uint16 or uint32 [tokens]. `starts`: position of each document's first token, int64 [documents]. It is
    pickled as a path, so that a data loader process maps the file itself.
    """

    folder: Path
    split: str
    dtype: str
    digest: str
    tokens: np.ndarray = field(init=False, repr=False)
    starts: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.tokens = map_array(self.folder / f"{self.split}.bin", np.dtype(self.dtype))
        self.starts = map_array(self.folder / f"{self.split}.starts", np.dtype("<i8"))

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStream, (self.folder, self.split, self.dtype, self.digest)

    def sizes(self) -> np.ndarray | None:
        """Return the bytes of text of each token, uint32 [tokens]; None if they were not counted.

        They are counted for the validation split, unless the source was tokenized elsewhere or by an earlier release.
        """
        file = self.folder / f"{self.split}{SIZES}"
        return map_array(file, np.dtype("<u4")) if file.is_file() else None

    def document_ids(self, start: int, length: int) -> np.ndarray:
        """Return the document number of each token of the window `start` .. `start + length - 1`, int64 [length].

        Numbers count from 0 within the window.
        """
        first, last = np.searchsorted(self.starts, (start, start + length - 1), side="right")
        ids = np.zeros(length, np.int64)  # [length]
        ids[self.starts[first:last] - start] = 1
        return ids.cumsum()


class JoinedTokens:
    """Concatenated tokens of documents that are read on access. Supports `len` and slicing, like an array."""

    def __init__(
        self,
        starts: np.ndarray,
        length: int,
        dtype: str,
        read: Callable[[int, int, int], np.ndarray],
        closing: int | None = None,
    ):
        """Describe the documents.

        Args:
            starts: position of each document's first token, int64 [documents].
            length: number of tokens of all documents.
            dtype: dtype of returned tokens.
            read: `read(document, first, last)` returns tokens `first` .. `last` - 1 of one document.
            closing: token to add after each document; None if `read` returns it.
        """
        self._starts, self._length, self._dtype = starts, length, np.dtype(dtype)
        self._read, self._closing = read, closing

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: slice) -> np.ndarray:
        first, stop, _ = where.indices(self._length)
        found = np.full(max(0, stop - first), self._closing or 0, self._dtype)
        document = int(np.searchsorted(self._starts, first, side="right")) - 1
        position = first
        while position < stop:
            begin = int(self._starts[document])
            after = int(self._starts[document + 1]) if document + 1 < len(self._starts) else self._length
            last = min(stop, after if self._closing is None else after - 1)
            if position < last:
                found[position - first : last - first] = self._read(document, position - begin, last - begin)
            position, document = after, document + 1
        return found


def map_array(file: Path, dtype: np.dtype[Any]) -> np.ndarray:
    """Return the content of a file as a memory-mapped array [elements] of `dtype`."""
    if file.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(file, dtype, mode="r"))  # a plain view: slicing a memmap object is several times slower
