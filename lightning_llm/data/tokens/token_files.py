"""Tokens of a split: files written document by document and mapped, or joined from documents elsewhere."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

FLUSH_BYTES = 8 << 20
SIZES = ".sizes"
"""Ending of the validation split's file of UTF-8 bytes of text per token, uint32 [tokens]."""


class TokenWriter:
    """Writes one split of one source: its documents' tokens end to end, and where each begins.

    At most `FLUSH_BYTES` of tokens and one document are in memory, however long the split is.
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

        `sizes`, of held-out documents: the bytes of text of each, uint32 [tokens + 1].
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
        """Flush buffered tokens, sync and close the files; return the split's manifest entry."""
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
    """One split of one source, memory-mapped: `tokens` uint16 or uint32 [tokens], `starts` int64 [documents].

    `starts` holds the position of each document's first token; the documents lie end to end, each closed by the
    end-of-document token. Pickles as its path, so that a loader process maps the file itself.
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

        They exist for the validation split, unless the source was tokenized elsewhere or by an earlier release.
        """
        file = self.folder / f"{self.split}{SIZES}"
        return map_array(file, np.dtype("<u4")) if file.is_file() else None

    def document_ids(self, start: int, length: int) -> np.ndarray:
        """Return int64 [length]: for each position from `start`, its document, counted from 0 in this window."""
        first, last = np.searchsorted(self.starts, (start, start + length - 1), side="right")
        ids = np.zeros(length, np.int64)  # [length]
        ids[self.starts[first:last] - start] = 1
        return ids.cumsum()


class JoinedTokens:
    """Concatenated tokens of documents, read on access. Supports `len` and slicing, like an array."""

    def __init__(
        self,
        starts: np.ndarray,
        length: int,
        dtype: str,
        read: Callable[[int, int, int], np.ndarray],
        closing: int | None = None,
    ):
        """`starts` int64 [documents]; `read(document, first, last)` returns these tokens of one document.

        `closing`: the token that ends each document, where `read` does not have it.
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
    """Return a file as a one-dimensional, memory-mapped array."""
    if file.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(file, dtype, mode="r"))  # a plain view: slicing a memmap object is several times slower
