"""Opening a corpus: scan each source, tokenize it unless cached, choose documents, and map the tokens.

A mixture may choose how often each document occurs, and in which order. Tokens are not written again for that: a chosen
stream is an order of the source's documents, and joins their tokens on access.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.config.schema.data import DataConfig
from lightning_llm.data.cache import build_once
from lightning_llm.data.check import cache_dir_of
from lightning_llm.data.corpus import Corpus
from lightning_llm.data.mixing.weights import limit_problem, window_limits
from lightning_llm.data.prepare import ALL_HELD_OUT, HeldOut, Scan, hold_out, prepare_streams, prepare_tokenizer, scan
from lightning_llm.data.report import SourceAccount
from lightning_llm.data.sources.source import Source
from lightning_llm.data.tokens.token_files import JoinedTokens, TokenStream, map_array
from lightning_llm.data.tokens.tokenised import id_problem, scan_tokens, token_streams

KEYS = "documents.keys"  # uint64 [documents]


def open_corpus(
    config: DataConfig, seed: int, vocab_size: int, max_steps: int | None = None, progress: bool = False
) -> Corpus:
    """Return the corpus of `config`, memory-mapped; parts that are not cached are built first.

    Concurrent processes wait for the one that builds.

    Args:
        config: sources, tokenizer, mixture and batches, checked by `check_data`.
        seed: seed of the order of samples.
        vocab_size: the model's.
        max_steps: length of the run in optimizer steps, for mixtures that depend on it; None if unknown.
        progress: show progress bars on stderr while building.

    Raises:
        ConfigError: with all problems of one stage (files, tokenizer, token ids, lengths).
    """
    cache_dir = cache_dir_of(config)
    sources = {name: Source(name, source) for name, source in config.sources.items()}
    trained = {name: source for name, source in sources.items() if source.config.role is None}
    scans, token_files = _scan_all(sources, config, cache_dir, progress)
    held_out = hold_out({name: scans[name] for name in trained}, config.validation.fraction)
    texts = {name: source for name, source in trained.items() if name not in token_files}
    tokenizer = prepare_tokenizer(config.tokenizer, vocab_size, texts, scans, held_out, cache_dir, progress)
    found = (id_problem(sources[name], scans[name], tokenizer, vocab_size) for name in token_files)
    if problems := [problem for problem in found if problem is not None]:
        raise ConfigError(problems)
    streams, losses = {}, {}
    for name, source in sources.items():
        rule = held_out if name in trained else ALL_HELD_OUT
        if name in token_files:
            streams[name] = token_streams(
                source, token_files[name], rule, tokenizer, config.tokenizer, cache_dir, progress
            )
        else:
            processes = config.tokenize_processes
            made = prepare_streams(source, scans[name], rule, tokenizer, cache_dir, progress, processes)
            streams[name], losses[name] = made
    chosen = choose_documents(config, sources, streams, held_out, cache_dir)
    if problems := [each for name in config.drawn for each in _length_problems(name, streams[name], config)]:
        raise ConfigError(problems)
    accounts = {
        name: SourceAccount(
            files=len(source.files) - len(scans[name].skipped_files),
            endings=_endings(source),
            skipped_files=source.skipped_files | scans[name].skipped_files,
            blank_records=scans[name].left_out,
            documents=scans[name].documents,
            **losses.get(name, {}),
        )
        for name, source in sources.items()
    }
    return Corpus(config, seed, tokenizer, streams, accounts, max_steps, chosen)


def _scan_all(
    sources: Mapping[str, Source], config: DataConfig, cache_dir: Path, progress: bool
) -> tuple[dict[str, Scan], dict[str, Path]]:
    """Return the scan of each source, and the index folder of each pretokenized source.

    Raises ConfigError with the problems of all.
    """
    scans: dict[str, Scan] = {}
    token_files: dict[str, Path] = {}
    problems: list[Problem] = []
    for name, source in sources.items():
        with gathered(problems):
            if source.config.tokenised:
                token_files[name], scans[name] = scan_tokens(source, config.tokenizer, cache_dir, progress)
            else:
                scans[name] = scan(source, cache_dir, progress)
    if problems:
        raise ConfigError(problems)
    return scans, token_files


def _endings(source: Source) -> dict[str, int]:
    """Return {ending: number of files} of a text source, for the endings that its loader reads."""
    config = source.config
    if config.tokenised or not config.suffixes:
        return {}
    names = [file.name.lower() for file in source.files]
    return dict(Counter(next((e for e in config.suffixes if name.endswith(e)), "others") for name in names))


def _length_problems(name: str, streams: dict[str, TokenStream], config: DataConfig) -> Iterator[Problem]:
    needed, available = config.sequence_length + 1, len(streams["train"].tokens)
    if available < needed:
        yield Problem(
            "data.sequence_length",
            f"{config.sequence_length:,} needs {needed:,} training tokens, and source {name!r} has {available:,}. "
            f"Shorten it to {max(1, available - 1):,} or less, or give the source more text.",
        )
    elif (limits := window_limits(config)) and (problem := limit_problem(name, limits[name], available, config)):
        yield problem


class Chooser(Protocol):
    """Choice and order of training documents by a mixture; `MixtureConfig.chooser` builds it."""

    def orders(self, keys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return {source: numbers of its training documents in training order, int64 [chosen]}.

        A number may occur several times, or never. `keys`: {source: `Document.key` of each training document, uint64
        [documents]}, in reading order; numbers count from 0 in it. Raises ConfigError.
        """

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return facts about the last choice for a run's summary, by source, as JSON data."""


def choose_documents(
    config: DataConfig,
    sources: Mapping[str, Source],
    streams: dict[str, dict[str, TokenStream]],
    held_out: HeldOut,
    cache_dir: Path,
) -> dict[str, dict[str, Any]]:
    """Replace the training streams in `streams`, in place, if the mixture chooses documents; return its `facts`.

    Returns {} for mixtures that use each document once, in order.

    Raises:
        ConfigError: the mixture has no scores of a document.
    """
    chooser: Chooser | None = config.chosen_mixture.chooser()
    if chooser is None:
        return {}
    keys = {name: _training_keys(sources[name], held_out, cache_dir) for name in config.drawn}
    for name, order in chooser.orders(keys).items():
        streams[name]["train"] = ChosenStream.from_stream(streams[name]["train"], order)
    return chooser.facts()


def _training_keys(source: Source, held_out: HeldOut, cache_dir: Path) -> np.ndarray:
    """Return the keys of the training documents of `source` in the order of its stream, uint64 [documents]."""

    def build(folder: Path) -> dict[str, Any]:
        keys = np.fromiter((document.key for document in source.documents()), "<u8")
        keys.tofile(folder / KEYS)
        return {"documents": len(keys)}

    folder, _ = build_once(cache_dir, "keys", source.identity(), build)
    keys = map_array(folder / KEYS, np.dtype("<u8"))
    return keys[~held_out.of_keys(keys)]


@dataclass
class ChosenStream(TokenStream):
    """`TokenStream` of chosen documents of the stream `base`; `order`: their numbers in it, int64 [chosen]."""

    base: TokenStream
    order: np.ndarray

    @classmethod
    def from_stream(cls, base: TokenStream, order: np.ndarray) -> "ChosenStream":
        """Return the stream of the documents `order` of `base`, with a digest of both."""
        digest = blake2b(base.digest.encode() + order.astype("<i8").tobytes(), digest_size=16).hexdigest()
        return cls(base.folder, base.split, base.dtype, digest, base, order)

    def __post_init__(self) -> None:
        begins = np.asarray(self.base.starts)
        lengths = np.diff(np.append(begins, len(self.base.tokens)))[self.order]  # [chosen]
        ends = lengths.cumsum()
        self.starts = ends - lengths
        begins = begins[self.order]

        def read(document: int, first: int, last: int) -> np.ndarray:
            begin = int(begins[document])
            return self.base.tokens[begin + first : begin + last]

        tokens: Any = JoinedTokens(self.starts, int(ends[-1]) if len(ends) else 0, self.dtype, read)
        self.tokens = tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return ChosenStream, (self.folder, self.split, self.dtype, self.digest, self.base, self.order)
