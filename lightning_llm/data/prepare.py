"""Documents -> held-out rule -> tokenizer -> token streams. Each step is cached by the hash of its inputs.

A document is held out for validation by its 64-bit content key alone: keys below `fraction` of the key range, in every
source and for every seed. So a text that occurs twice, or in two sources, is never on both sides. A source without a
key in that range (too small) contributes its smallest key, which is then held out of all sources.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.keyed_hash import MASK_32
from lightning_llm.base.terminal import new_console
from lightning_llm.config.schema.data import TokenizerConfig
from lightning_llm.config.weight_folders import TOKENIZER
from lightning_llm.data.cache import build_once, disk_problem, token_bytes
from lightning_llm.data.sources.source import Document, Source
from lightning_llm.data.tokens.encode import encode_batches, process_count
from lightning_llm.data.tokens.token_files import TokenStream, TokenWriter
from lightning_llm.data.tokens.tokenizer import Tokenizer, train_bpe, write_bytes_tokenizer

KEY_RANGE = 1 << 64
BPE_SAMPLE_BYTES = 64 << 20  # a larger corpus trains its tokenizer on a sample of documents of about this size
ENCODE_BYTES = 1 << 20
SPLITS = ("train", "validation")

Advance = Callable[[int], None]


@contextmanager
def progress_task(description: str, total_bytes: int | None, shown: bool) -> Iterator[Advance]:
    """Yield a function `advance(bytes)` that moves a progress bar on stderr, or does nothing unless `shown`.

    `total_bytes`: length of the bar, None if unknown.
    """
    if not shown:
        yield lambda done_bytes: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=new_console(stderr=True)) as progress:
        task = progress.add_task(description, total=total_bytes)
        yield lambda done_bytes: progress.advance(task, done_bytes)


@dataclass(frozen=True)
class Scan:
    """Result of reading a source once: its size, and the range of its documents' keys.

    `left_out`: number of records without text. `largest_id`, `largest_at`: largest token id and its place, only for
    sources of tokens.
    """

    documents: int
    text_bytes: int
    smallest_key: int
    largest_key: int
    left_out: int = 0
    largest_id: int = -1
    largest_at: str = ""
    skipped_files: dict[str, str] = field(default_factory=dict)
    """{path: reason} of files that turned out not to be data while reading."""


@dataclass(frozen=True)
class HeldOut:
    """Rule for validation documents: those with a key below `threshold` or in `also`. `document in rule` tests one."""

    threshold: int
    also: frozenset[int]

    def __contains__(self, document: Document) -> bool:
        return document.key < self.threshold or document.key in self.also

    def of_keys(self, keys: np.ndarray) -> np.ndarray:
        """Return whether each document is held out, bool [documents], given the documents' `keys`, uint64."""
        below = keys < np.uint64(self.threshold) if self.threshold < KEY_RANGE else np.ones(len(keys), bool)
        return below | np.isin(keys, np.array(sorted(self.also), np.uint64))

    def identity(self) -> list[Any]:
        """Return the rule as JSON data, for the identity of cached products."""
        return [self.threshold, sorted(self.also)]


ALL_HELD_OUT = HeldOut(KEY_RANGE, frozenset())
"""Rule of validation-only sources."""


def scan(source: Source, cache_dir: Path, shown: bool) -> Scan:
    """Return the scan of `source`, read now unless cached; `shown`: show a progress bar.

    Raises ConfigError if a file cannot be read, or if there is no document.
    """

    def build(folder: Path) -> dict[str, Any]:
        documents, text_bytes, smallest, largest = 0, 0, KEY_RANGE, -1
        with progress_task(f"reading {source.name}", None, shown) as advance:
            for document in source.documents():
                documents, text_bytes = documents + 1, text_bytes + document.text_bytes
                smallest, largest = min(smallest, document.key), max(largest, document.key)
                advance(document.text_bytes)
        if not documents:
            where = source.where if source.files else f"loader={source.config.loader}"
            raise ConfigError(Problem(source.key, f"{where} contains no document: every text is empty or blank."))
        skipped = getattr(source.reader, "skipped", {})
        return asdict(Scan(documents, text_bytes, smallest, largest, source.left_out, skipped_files=skipped))

    _, manifest = build_once(cache_dir, "scan", source.identity(), build)
    return Scan(**{key: manifest[key] for key in Scan.__dataclass_fields__ if key in manifest})


def hold_out(scans: Mapping[str, Scan], fraction: float) -> HeldOut:
    """Return the rule that holds out `fraction` of the documents of each scanned source.

    Raises ConfigError if a source would have no documents for training or for validation.
    """
    if not fraction:
        return HeldOut(0, frozenset())
    threshold = int(fraction * KEY_RANGE)
    problems, also = [], set()
    for name, found in scans.items():
        if found.smallest_key == found.largest_key:
            text = (
                f"has one distinct document ({found.documents:,} in all), so none can be held out for validation. "
                "Give it more (loader=text: sample_by=paragraph or line), or set data.validation.fraction=0."
            )
            problems.append(Problem(f"data.sources.{name}", text))
        elif found.largest_key < threshold:
            text = f"{fraction} would hold out all {found.documents:,} documents of source {name!r}. Lower it."
            problems.append(Problem("data.validation.fraction", text))
        elif found.smallest_key >= threshold:
            also.add(found.smallest_key)
    if problems:
        raise ConfigError(problems)
    return HeldOut(threshold, frozenset(also))


def prepare_tokenizer(
    config: TokenizerConfig,
    vocab_size: int,
    sources: Mapping[str, Source],
    scans: Mapping[str, Scan],
    held_out: HeldOut,
    cache_dir: Path,
    shown: bool,
) -> Tokenizer:
    """Return the tokenizer of the corpus; kind `bpe` is trained now on the training documents, unless cached.

    It does not depend on the sources' weights, so runs that compare mixes share it.

    Args:
        config: the `data.tokenizer` keys.
        vocab_size: the model's; default size of a trained tokenizer.
        sources: the text sources that are trained on.
        scans: scan of each source.
        held_out: rule of the validation documents, which are not used for training.
        cache_dir: folder of the caches.
        shown: show a progress bar.

    Raises:
        ConfigError: the file cannot be read, or it has more tokens than the model.
    """
    total_bytes = sum(scans[name].text_bytes for name in sources)
    sampled_below = int(min(1.0, BPE_SAMPLE_BYTES / max(1, total_bytes)) * (MASK_32 + 1))

    def sample(advance: Advance) -> Iterator[str]:
        for source in sources.values():
            for document in source.documents():
                if document not in held_out and document.key & MASK_32 < sampled_below:
                    yield document.text
                    advance(document.text_bytes)

    def build(folder: Path) -> dict[str, Any]:
        if config.kind == "bytes":
            write_bytes_tokenizer(folder / TOKENIZER)
        elif config.kind == "file":
            given = Tokenizer(config.path or "", config.end_of_document)
            given.save(folder)
            given.declare_end(folder)
        else:
            expected = min(total_bytes, BPE_SAMPLE_BYTES)
            with progress_task(f"training a tokenizer of {size:,}", expected, shown) as advance:
                train_bpe(sample(advance), size, folder / TOKENIZER)
        return {}

    size = config.vocab_size or vocab_size
    folder, _ = build_once(cache_dir, "tokenizer", _tokenizer_identity(config, size, sources, held_out), build)
    tokenizer = Tokenizer(folder, config.end_of_document if config.kind == "file" else None)
    if tokenizer.vocab_size > vocab_size:
        text = f"the tokenizer has {tokenizer.vocab_size:,} tokens, but model.vocab_size is {vocab_size:,}. Raise it."
        raise ConfigError(Problem(f"data.tokenizer.{'vocab_size' if config.kind == 'bpe' else 'path'}", text))
    return tokenizer


def _tokenizer_identity(
    config: TokenizerConfig, size: int, sources: Mapping[str, Source], held_out: HeldOut
) -> dict[str, Any]:
    """Return all inputs of the tokenizer, by whose hash it is cached. Raises ConfigError for a file that is invalid."""
    if config.kind == "bpe":
        return {
            "kind": config.kind,
            "vocab_size": size,
            "sample_bytes": BPE_SAMPLE_BYTES,
            "held_out": held_out.identity(),
            "tokenizers": version("tokenizers"),
            "sources": [source.identity() for source in sources.values()],
        }
    if config.kind != "file":
        return {"kind": config.kind}
    try:
        return {"kind": config.kind, "fingerprint": Tokenizer(config.path or "", config.end_of_document).fingerprint}
    except (OSError, ValueError) as error:
        raise ConfigError(Problem("data.tokenizer.path", f"{config.path!r}: {error}")) from error


def prepare_streams(
    source: Source,
    found: Scan,
    held_out: HeldOut,
    tokenizer: Tokenizer,
    cache_dir: Path,
    shown: bool,
    processes: int | None = None,
) -> tuple[dict[str, TokenStream], dict[str, int]]:
    """Return (the "train" and "validation" stream of a text source, counts of text without tokens).

    The source is tokenized now, unless cached. Memory does not grow with its size.

    Args:
        source: a text source.
        found: its scan.
        held_out: rule of the validation documents.
        tokenizer: the corpus' tokenizer.
        cache_dir: folder of the caches.
        shown: show a progress bar.
        processes: `data.tokenize_processes`; None: chosen by the size of the source.

    Returns:
        The streams by split, and counts for the fields of `SourceAccount`, e.g. {"dropped_characters": 3}.

    Raises:
        ConfigError: the disk is too small, or the source cannot be read or tokenized.
    """
    dtype = tokenizer.token_dtype
    count = process_count(processes, found.text_bytes, tokenizer)

    def build(folder: Path) -> dict[str, Any]:
        problem = disk_problem(cache_dir, token_bytes(found.text_bytes, tokenizer.is_bytes, tokenizer.vocab_size))
        if problem:
            raise ConfigError(problem)
        writers = {split: TokenWriter(folder, split, dtype, tokenizer.end_of_document) for split in SPLITS}
        losses: Counter[str] = Counter()
        with (
            progress_task(f"tokenising {source.name}", found.text_bytes, shown) as advance,
            closing(encode_batches(tokenizer, _batches(source), count)) as encoded,
        ):
            for batch, all_tokens, all_dropped in encoded:
                measured = iter(tokenizer.byte_counts([each.text for each in batch if each in held_out]))
                for document, tokens, dropped in zip(batch, all_tokens, all_dropped, strict=True):
                    losses += _losses(tokens, dropped, tokenizer.unknown)
                    if document in held_out:
                        writers["validation"].add(tokens, next(measured))
                    else:
                        writers["train"].add(tokens)
                advance(sum(document.text_bytes for document in batch))
        splits = {split: writer.close() for split, writer in writers.items()}
        return {"dtype": dtype.str, "splits": splits, "losses": dict(losses)}

    identity = {"source": source.identity(), "held_out": held_out.identity(), "tokenizer": tokenizer.fingerprint}
    folder, manifest = build_once(cache_dir, "tokens", identity, build)
    splits = manifest["splits"]
    streams = {split: TokenStream(folder, split, manifest["dtype"], splits[split]["digest"]) for split in SPLITS}
    return streams, manifest["losses"]


def _losses(tokens: np.ndarray, dropped: int, unknown: int | None) -> Counter[str]:
    """Return the counts of `SourceAccount` for one document with `dropped` characters without a token."""
    found: Counter[str] = Counter()
    if dropped:
        found["dropped_characters"] = dropped
        found["shortened_documents" if len(tokens) else "emptied_documents"] = 1
    if unknown is not None and (count := int(np.count_nonzero(tokens == unknown))):
        found["unknown_tokens"] = count
    return found


def _batches(source: Source) -> Iterator[list[Document]]:
    """Yield documents in lists of about `ENCODE_BYTES`."""
    batch: list[Document] = []
    size = 0
    for document in source.documents():
        batch.append(document)
        size += document.text_bytes
        if size >= ENCODE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
