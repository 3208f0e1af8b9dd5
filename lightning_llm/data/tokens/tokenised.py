"""Sources of token ids: each file is read once to find its documents, and then mapped in place.

The cache contains the documents' places and keys, 56 bytes each, and no tokens. A document is held out by a hash of its
token ids (as uint32), so the held-out set depends neither on the loader nor on the width of ids in the file.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.integrity import file_mark
from lightning_llm.config.schema.data import TokenizerConfig
from lightning_llm.data.cache import build_once
from lightning_llm.data.prepare import KEY_RANGE, SPLITS, HeldOut, Scan, progress_task
from lightning_llm.data.sources.source import Source
from lightning_llm.data.tokens.token_files import JoinedTokens, TokenStream, map_array
from lightning_llm.data.tokens.tokenizer import (
    BYTES_VOCAB_SIZE,
    Tokenizer,
    find_end_of_document,
    read_vocabulary,
    tokenizer_file,
)

PLACES = "documents.places"  # int64 [documents, 3]: number of the file, first token, tokens
KEYS = "documents.keys"  # uint64 [documents]
READ_TOKENS = 1 << 20


class TokenReader(Protocol):
    """Interface of a token source's reader, which `SourceConfig.build` returns if `tokenised`.

    It can be pickled, and a data loader process maps the files itself.
    """

    def token_files(self) -> list[Path]:
        """Return the files with token ids, in order."""

    def tokens(self, number: int) -> np.ndarray:
        """Return the token ids of file `number`, an integer array [tokens], mapped."""

    def documents(self, number: int, end_of_document: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (first token, number of tokens) of each document in file `number`, int64 [documents] each.

        The end-of-document token is not counted. Raises ValueError for a damaged file, or one of another format.
        """


def end_of_document_of(config: TokenizerConfig) -> int:
    """Return the end-of-document id of a tokenizer that needs no training (kind `bytes` or `file`).

    Raises ConfigError if the file has no such token.
    """
    if config.kind == "bytes":
        return BYTES_VOCAB_SIZE - 1
    file = tokenizer_file(config.path or "")
    found = find_end_of_document(read_vocabulary(file), config.end_of_document, file)
    if found is None:
        raise ConfigError(Problem("data.tokenizer.end_of_document", "is not a token of the tokenizer."))
    return found


def scan_identity(source: Source, config: TokenizerConfig) -> dict[str, Any]:
    """Return JSON data that identifies the documents of a token source: its files, and the end-of-document token."""
    mark = file_mark(tokenizer_file(config.path))[:3] if config.kind == "file" and config.path else []
    found = [config.kind, config.end_of_document, *mark]
    return source.identity() | {"tokenizer": found}


@dataclass
class _Ids:
    """The range of the token ids read so far, and the places of its ends."""

    smallest: int = 0
    smallest_at: str = ""
    largest: int = -1
    largest_at: str = ""

    def note(self, tokens: np.ndarray, file: Path, start: int) -> None:
        low, high = int(tokens.min()), int(tokens.max())
        if low < self.smallest:
            self.smallest, self.smallest_at = low, f"token {start + int(tokens.argmin()):,} of {file}"
        if high > self.largest:
            self.largest, self.largest_at = high, f"token {start + int(tokens.argmax()):,} of {file}"


def scan_tokens(source: Source, config: TokenizerConfig, cache_dir: Path, shown: bool) -> tuple[Path, Scan]:
    """Return (folder with the places of the documents, scan) of a token source, which is read now unless cached.

    `shown`: show a progress bar. Raises ConfigError for damaged files or files of another format, and for a source
    without documents.
    """

    def build(folder: Path) -> dict[str, Any]:
        ids, documents, smallest_key, largest_key, empty = _Ids(), 0, KEY_RANGE, -1, 0
        total_bytes = sum(file.stat().st_size for file in source.reader.token_files())
        with (
            (folder / PLACES).open("wb") as places,
            (folder / KEYS).open("wb") as keys,
            progress_task(f"reading {source.name}", total_bytes, shown) as advance,
        ):
            for number, file, tokens, starts, lengths in _files(source, end_of_document_of(config)):
                kept = lengths > 0
                empty += len(kept) - int(kept.sum())
                for firsts, counts in _groups(starts[kept], lengths[kept]):
                    read = tokens[firsts[0] : firsts[-1] + counts[-1]]
                    ids.note(read, file, int(firsts[0]))
                    found = _keys(read, firsts - firsts[0], counts)
                    smallest_key, largest_key = min(smallest_key, int(found.min())), max(largest_key, int(found.max()))
                    np.stack([np.full_like(firsts, number), firsts, counts], 1).astype("<i8").tofile(places)
                    found.tofile(keys)
                    documents += len(found)
                    advance(read.nbytes)
        source.check_unchanged()
        if ids.smallest < 0:
            raise ConfigError(
                Problem(f"{source.key}.path", f"{ids.smallest_at} is {ids.smallest}: token ids must be 0 or more.")
            )
        if not documents:
            raise ConfigError(Problem(source.key, f"{source.where} contains no document."))
        return asdict(Scan(documents, total_bytes, smallest_key, largest_key, empty, ids.largest, ids.largest_at))

    folder, manifest = build_once(cache_dir, "scan", scan_identity(source, config), build)
    return folder, Scan(**{key: manifest[key] for key in Scan.__dataclass_fields__})


def _groups(starts: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (first tokens, lengths) of groups of at least one document and up to `READ_TOKENS` tokens."""
    ends, first = starts + lengths, 0
    while first < len(starts):
        last = max(first + 1, int(np.searchsorted(ends, starts[first] + READ_TOKENS, side="right")))
        yield starts[first:last], lengths[first:last]
        first = last


def _keys(tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the key of each document in `tokens`, uint64 [documents]: BLAKE2b of its ids as uint32."""
    content = memoryview(tokens.astype("<u4").tobytes())
    spans = zip((4 * starts).tolist(), (4 * (starts + lengths)).tolist(), strict=True)
    return np.frombuffer(b"".join(blake2b(content[a:b], digest_size=8).digest() for a, b in spans), "<u8")


def _files(source: Source, end_of_document: int) -> Iterator[tuple[int, Path, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield number, path, tokens, and the documents' first tokens and lengths of each file."""
    reader: TokenReader = source.reader
    for number, file in enumerate(reader.token_files()):
        try:
            yield number, file, reader.tokens(number), *reader.documents(number, end_of_document)
        except (ValueError, OSError) as error:
            raise ConfigError(Problem(f"{source.key}.path", f"{file} {error}.")) from error


def id_problem(source: Source, found: Scan, tokenizer: Tokenizer, model_vocab_size: int) -> Problem | None:
    """Return a problem if the source contains an id that the tokenizer does not have; else None."""
    if found.largest_id < tokenizer.vocab_size:
        return None
    text = (
        f"{found.largest_at} is {found.largest_id:,}, but data.tokenizer has {tokenizer.vocab_size:,} tokens "
        f"(model.vocab_size is {model_vocab_size:,}). Give the tokenizer that the files were made with."
    )
    return Problem(f"{source.key}.path", text)


def token_streams(
    source: Source,
    scanned: Path,
    held_out: HeldOut,
    tokenizer: Tokenizer,
    config: TokenizerConfig,
    cache_dir: Path,
    shown: bool,
) -> dict[str, TokenStream]:
    """Return the "train" and "validation" stream of a token source, with its documents split now unless cached.

    `scanned`: the folder that `scan_tokens` returned. `held_out`: rule of the validation documents. `shown`: show a
    progress bar.
    """
    reader: TokenReader = source.reader
    dtype = tokenizer.token_dtype

    def build(folder: Path) -> dict[str, Any]:
        places = np.memmap(scanned / PLACES, "<i8", mode="r").reshape(-1, 3)
        keys = np.memmap(scanned / KEYS, "<u8", mode="r")
        is_held_out = held_out.of_keys(keys)  # [documents]
        splits = {}
        with progress_task(f"splitting {source.name}", None, shown) as advance:
            for split, chosen in zip(SPLITS, (~is_held_out, is_held_out), strict=True):
                lengths = places[chosen, 2] + 1  # and the token that ends it
                ends = lengths.cumsum()
                (ends - lengths).astype("<i8").tofile(folder / f"{split}.starts")
                places[chosen, :2].astype("<i8").tofile(folder / f"{split}.places")
                tokens = int(ends[-1]) if len(ends) else 0
                np.array([tokens], "<i8").tofile(folder / f"{split}.tokens")
                stream = MappedStream(folder, split, dtype.str, "", reader, tokenizer.end_of_document)
                digest = blake2b(digest_size=16)
                for first in range(0, tokens, READ_TOKENS):
                    content = stream.tokens[first : first + READ_TOKENS].tobytes()
                    digest.update(content)
                    advance(len(content))
                splits[split] = {"tokens": tokens, "documents": len(ends), "digest": digest.hexdigest()}
        source.check_unchanged()
        return {"dtype": dtype.str, "splits": splits}

    identity = {
        "held_out": held_out.identity(),
        "tokenizer": tokenizer.fingerprint,
        "source": scan_identity(source, config),
    }
    folder, manifest = build_once(cache_dir, "places", identity, build)
    return {
        split: MappedStream(
            folder, split, manifest["dtype"], manifest["splits"][split]["digest"], reader, tokenizer.end_of_document
        )
        for split in SPLITS
    }


@dataclass
class MappedStream(TokenStream):
    """`TokenStream` of a token source: tokens are read on access from the source's files."""

    reader: TokenReader
    end_of_document: int

    def __post_init__(self) -> None:
        self.starts = map_array(self.folder / f"{self.split}.starts", np.dtype("<i8"))
        places = map_array(self.folder / f"{self.split}.places", np.dtype("<i8")).reshape(-1, 2)
        files: dict[int, np.ndarray] = {}

        def read(document: int, first: int, last: int) -> np.ndarray:
            number, offset = places[document].tolist()
            if number not in files:
                files[number] = self.reader.tokens(number)
            return files[number][offset + first : offset + last]

        length = int(np.fromfile(self.folder / f"{self.split}.tokens", "<i8")[0])
        tokens: Any = JoinedTokens(self.starts, length, self.dtype, read, closing=self.end_of_document)
        self.tokens = tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedStream, (self.folder, self.split, self.dtype, self.digest, self.reader, self.end_of_document)
