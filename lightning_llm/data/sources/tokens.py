"""Loaders of files of token ids: `megatron` and `olmo`.

Megatron-LM's format (`megatron/core/datasets/indexed_dataset.py`, index version 1) is a pair of files, both
little-endian. PREFIX.bin has the token ids of all sequences, one after another. PREFIX.idx has the magic
`MMIDIDX\\0\\0`, uint64 version, uint8 code of the tokens' dtype, uint64 number of sequences S, uint64 number of
document indices D; then int32 [S] tokens of each sequence, int64 [S] its first byte in PREFIX.bin, int64 [D] the first
sequence of each document and, last, S; in multimodal datasets also int8 [S] modes.

OLMo's and OLMo-core's format (`MemMapDataset`, `NumpyDataset`) is a raw array without a header, as `numpy.memmap` reads
it.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.data import LOADERS, TokenSourceConfig
from lightning_llm.data.sources.files import FoundFiles, LocalFiles, file_problems, find_files, local_path

INDEX, TOKENS = ".idx", ".bin"
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
NUMPY_MAGIC = b"\x93NUMPY"
READ_TOKENS = 1 << 24
LOOKED_AT_TOKENS = 4096


@LOADERS.register
class MegatronSource(TokenSourceConfig):
    """loader=megatron: output of Megatron-LM's `tools/preprocess_data.py`, pairs of PREFIX.bin and PREFIX.idx.

    `path` is a prefix, a file of a pair, a folder or a glob. Documents may end with the end-of-document token
    (`--append-eod`) or not.
    """

    suffixes: ClassVar[tuple[str, ...]] = (INDEX, TOKENS)

    loader: Literal["megatron"] = "megatron"

    def problems(self, key: str) -> Iterator[Problem]:
        yield from file_problems(key, self)
        for prefix in sorted({file.with_suffix("") for file in self.files()}):
            if problem := index_problem(prefix):
                yield Problem(f"{key}.path", f"{problem}.")

    def files(self) -> list[Path]:
        """Return both files of each pair, absolute and sorted; missing ones are omitted."""
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
        return MegatronReader([file.with_suffix("") for file in files if file.suffix == INDEX])


@dataclass(frozen=True)
class Header:
    """Header of PREFIX.idx: dtype of the tokens, number of sequences, number of document indices."""

    dtype: np.dtype
    sequences: int
    document_indices: int


def read_header(prefix: Path) -> Header:
    """Return the header of PREFIX.idx. Raises OSError, or ValueError if it is damaged or not such an index."""
    index = Path(f"{prefix}.idx")
    with index.open("rb") as opened:
        content = opened.read(HEADER.size)
    if len(content) < HEADER.size or not content.startswith(MAGIC):
        raise ValueError(f"{index} is not a Megatron-LM index: it does not begin with MMIDIDX and a header")
    _, version, code, sequences, document_indices = HEADER.unpack(content)
    if version != 1:
        raise ValueError(f"{index} has version {version}: only version 1 is supported")
    if code not in DTYPES or DTYPES[code][1] == "f":
        raise ValueError(f"{index} has dtype code {code}, which is not an integer type. Supported codes: 1 to 5 and 8")
    stored = index.stat().st_size
    needed = HEADER.size + sequences * 12 + document_indices * 8
    if stored not in (needed, needed + sequences):  # with modes, as multimodal datasets have them
        text = f"{sequences:,} sequences and {document_indices:,} document indices take {needed:,}: it is damaged"
        raise ValueError(f"{index} has {stored:,} bytes, and {text}")
    return Header(np.dtype(DTYPES[code]), sequences, document_indices)


def index_problem(prefix: Path) -> str | None:
    """Return the problem of a pair, a missing file or a wrong header or size, as text; None if there is none."""
    for file in (Path(f"{prefix}.idx"), Path(f"{prefix}.bin")):
        if not file.is_file():
            return f"there is no {file}, and a dataset of Megatron-LM is a pair of .idx and .bin"
    try:
        read_header(prefix)
    except (OSError, ValueError) as error:
        return str(error)
    return None


@dataclass
class MegatronReader:
    """`TokenReader` of Megatron-LM's pairs of files, given by their prefixes."""

    prefixes: list[Path]

    def token_files(self) -> list[Path]:
        """Return the `.bin` files."""
        return [Path(f"{prefix}.bin") for prefix in self.prefixes]

    def tokens(self, number: int) -> np.ndarray:
        """Return the token ids of file `number`, [tokens]."""
        prefix, file = self.prefixes[number], self.token_files()[number]
        dtype = read_header(prefix).dtype
        if not file.stat().st_size:
            raise ValueError("is empty")
        return np.asarray(np.memmap(file, dtype, mode="r", shape=(file.stat().st_size // dtype.itemsize,)))

    def documents(self, number: int, end_of_document: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (starts, lengths) of the documents in file `number`, int64 [documents], in tokens.

        The end-of-document token is not counted. Raises ValueError if the index does not match the tokens.
        """
        prefix = self.prefixes[number]
        header, index = read_header(prefix), Path(f"{prefix}.idx")
        lengths = np.fromfile(index, "<i4", header.sequences, offset=HEADER.size).astype(np.int64)
        at = HEADER.size + 4 * header.sequences
        first_bytes = np.fromfile(index, "<i8", header.sequences, offset=at)
        firsts = np.fromfile(index, "<i8", header.document_indices, offset=at + 8 * header.sequences)
        ends = lengths.cumsum()  # [sequences], in tokens
        size, item = self.token_files()[number].stat().st_size, header.dtype.itemsize
        if (lengths < 0).any() or (first_bytes != (ends - lengths) * item).any():
            raise ValueError(f"does not match {index.name}, which must cover it end to end: the index is damaged")
        needed = int(ends[-1]) * item if len(ends) else 0
        if size != needed:
            raise ValueError(f"has {size:,} bytes, and {index.name} counts {needed:,}: truncated, or not of this index")
        if not len(firsts) or firsts[0] or firsts[-1] != header.sequences or (np.diff(firsts) < 0).any():
            raise ValueError(f"does not match the documents of {index.name}: its document indices are damaged")
        bounds = np.append(0, ends)[firsts]  # [documents + 1], in tokens
        starts, stops = bounds[:-1], bounds[1:]
        closed = stops > starts
        closed[closed] = self.tokens(number)[stops[closed] - 1] == end_of_document
        return starts, stops - starts - closed


@LOADERS.register
class OlmoSource(LocalFiles, TokenSourceConfig):
    """loader=olmo: OLMo's `.npy` files of token ids, each document followed by the end-of-document token."""

    suffixes: ClassVar[tuple[str, ...]] = (".npy",)

    loader: Literal["olmo"] = "olmo"
    dtype: Literal["uint16", "uint32"] = Field("uint16", description="dtype of a token in the file, little-endian")

    def problems(self, key: str) -> Iterator[Problem]:
        yield from file_problems(key, self)
        size = int(self.dtype[-2:]) // 8
        for file in self.files():
            stored = file.stat().st_size
            with file.open("rb") as opened:
                head = opened.read(len(NUMPY_MAGIC))
            if head == NUMPY_MAGIC:
                text = f"{file} has a NumPy header, but OLMo's files have none. Write it again with numpy's tofile."
                yield Problem(f"{key}.path", text)
            elif stored % size or not stored:
                text = f"{file} has {stored:,} bytes, not a multiple of {size} ({self.dtype}). It is truncated."
                yield Problem(f"{key}.path", text if stored else f"{file} is empty.")

    def build(self, key: str, files: Sequence[Path]) -> Any:
        return OlmoReader(list(files), self.dtype)


@dataclass
class OlmoReader:
    """`TokenReader` of OLMo's files of token ids with dtype `dtype`."""

    files: list[Path]
    dtype: str

    def token_files(self) -> list[Path]:
        """Return the files."""
        return self.files

    def tokens(self, number: int) -> np.ndarray:
        """Return the token ids of file `number`, [tokens]."""
        return np.asarray(np.memmap(self.files[number], np.dtype(self.dtype).newbyteorder("<"), mode="r"))

    def documents(self, number: int, end_of_document: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (starts, lengths) of the documents in file `number`, int64 [documents], in tokens.

        The end-of-document token is not counted; tokens after the last one are a document, too. Raises ValueError if no
        document ends, or if ids look like halves of wider integers.
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
        """Raise ValueError for uint32 ids that are read as uint16: every second value is then almost zero."""
        high = tokens[1::2]
        if self.dtype == "uint16" and len(high) > 1 and high.max() < 16 <= tokens[::2].max():
            raise ValueError("looks like uint32, but is read as uint16. Set dtype=uint32")
