"""`Corpus`: tokens by address. Every batch is a function of (config, seed, step), so nothing is ever resumed.

The training documents of a source lie end to end, each closed by the end-of-document token. Window w of a source is
its tokens w*T .. (w+1)*T inclusive: T inputs and, one further, T targets. Windows do not overlap but in that one
token; the last tokens of a source that fill no window are not trained on (fewer than T+1).

Letters: A micro-batches per rank and step (gradient accumulation), B micro-batch size, T sequence length.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lightning_llm.config.schema.data import DataConfig
from lightning_llm.data.addressing import SampleOrder, largest_remainder
from lightning_llm.data.cache import TokenStream, digest_of
from lightning_llm.data.check import cache_dir_of
from lightning_llm.data.prepare import hold_out, prepare_streams, prepare_tokenizer, scan
from lightning_llm.data.source import Source
from lightning_llm.data.tokenizer import Tokenizer
from lightning_llm.errors import ConfigError, Problem

IGNORED = -100  # a label that is no target: what torch's cross entropy ignores by default


@dataclass(frozen=True)
class Sample:
    """One training window: `tokens` int64 [T+1], and `document_ids` int64 [T] (from 0, within the window) or None."""

    source: int
    window: int
    epoch: int
    tokens: np.ndarray
    document_ids: np.ndarray | None


@dataclass(frozen=True)
class Origin:
    """Where a training window lies: tokens `start` .. `start` + T inclusive of the training tokens of `source`.

    They belong to its training documents `first_document` .. `last_document`, counted from 0 in the order they are
    read, those held out left out.
    """

    source: str
    epoch: int
    start: int
    first_document: int
    last_document: int


@dataclass(frozen=True)
class Batch:
    """What one rank computes in one step: int64 [A, B, T] each; `labels[..., t]` is the token after `tokens[..., t]`.

    `document_ids` counts documents from 0 within each row, None unless `data.document_mask`.
    """

    tokens: Tensor
    labels: Tensor
    document_ids: Tensor | None


@dataclass(frozen=True)
class ValidationBatch:
    """Like one micro-batch of `Batch`: int64 [B, T], labels -100 where there is no target; `sources` int64 [B].

    Rows that only fill up the last batch have no target at all, and source 0.
    """

    tokens: Tensor
    labels: Tensor
    document_ids: Tensor | None
    sources: Tensor


@dataclass(frozen=True)
class SourceReport:
    """What a run takes from one source: `share` as asked, `achieved_share` as drawn; `epochs` may be fractional."""

    name: str
    share: float
    achieved_share: float
    available_tokens: int
    drawn_tokens: int
    epochs: float
    documents: int
    validation_tokens: int


class Corpus:
    """The prepared sources of one run. Cheap to pickle: loader processes map the same files."""

    def __init__(
        self,
        config: DataConfig,
        seed: int,
        tokenizer: Tokenizer,
        streams: dict[str, dict[str, TokenStream]],
        left_out: Mapping[str, int],
    ):
        """`streams` holds for each source its "train" and "validation" stream; each has at least one training window.

        `left_out` counts for each source the records whose text is null, empty or blank. `open_corpus` makes and
        checks all of it.
        """
        self.left_out = dict(left_out)
        self.config = config
        self.tokenizer = tokenizer
        self.names = list(config.sources)
        self.train = [streams[name]["train"] for name in self.names]
        self.held_out = [streams[name]["validation"] for name in self.names]
        length = config.sequence_length
        weights = {name: source.weight for name, source in config.sources.items()}
        windows = {name: (len(s.tokens) - 1) // length for name, s in zip(self.names, self.train, strict=True)}
        self.order = SampleOrder(weights, windows, seed, config.shuffle)
        self.shares = [weight / sum(weights.values()) for weight in weights.values()]

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits of what there is to learn: tokenizer, and each source's name, share, and tokens of both splits.

        Free of paths, seed and batch sizes.
        """
        streams = zip(self.names, self.shares, self.train, self.held_out, strict=True)
        return digest_of([self.tokenizer.fingerprint, [[n, w, t.digest, v.digest] for n, w, t, v in streams]])

    @cached_property
    def validation_fingerprint(self) -> str:
        """32 hex digits of what a validation scores: the same tokens, each after the same context."""
        streams = [[name, stream.digest] for name, stream in zip(self.names, self.held_out, strict=True)]
        settings = [self.config.sequence_length, self.config.document_mask]
        return digest_of([self.tokenizer.fingerprint, streams, self._validation_windows, settings])

    def sample(self, index: int) -> Sample:
        """Return global training sample `index` (from 0, without end); row r of step s is s * global_batch_size + r."""
        address = self.order.locate(index)
        length = self.config.sequence_length
        stream, start = self.train[address.source], address.window * length
        tokens = stream.tokens[start : start + length + 1].astype(np.int64)  # [T+1]
        ids = stream.document_ids(start, length) if self.config.document_mask else None  # [T]
        return Sample(address.source, address.window, address.epoch, tokens, ids)

    def origin(self, index: int) -> Origin:
        """Return where global training sample `index` comes from."""
        address = self.order.locate(index)
        start, stream = address.window * self.config.sequence_length, self.train[address.source]
        ends = start, start + self.config.sequence_length
        first, last = (int(index) - 1 for index in np.searchsorted(stream.starts, ends, side="right"))
        return Origin(self.names[address.source], address.epoch, start, first, last)

    def micro_batches(self, step: int, indices: Sequence[int] | None = None) -> Batch:
        """Return the micro-batches `indices` of optimizer step `step` (from 0), in that order; all of them for None.

        Micro-batch m is rows m*B .. (m+1)*B of the global batch; row r of step s is global sample s * global_batch_size
        + r. So every layout cuts the same batch.
        """
        size, length, width = self.config.global_batch_size, self.config.sequence_length, self.config.micro_batch_size
        rows = [range(m * width, (m + 1) * width) for m in (range(size // width) if indices is None else indices)]
        shape = len(rows), width, length
        windows = np.empty((*shape[:2], length + 1), np.int64)  # [A, B, T+1]
        ids = np.empty(shape, np.int64) if self.config.document_mask else None  # [A, B, T]
        for m, micro_batch in enumerate(rows):
            for b, row in enumerate(micro_batch):
                address = self.order.locate(step * size + row)
                stream, start = self.train[address.source], address.window * length
                windows[m, b] = stream.tokens[start : start + length + 1]
                if ids is not None:
                    ids[m, b] = stream.document_ids(start, length)
        both = torch.from_numpy(windows)  # [A, B, T+1]
        return Batch(
            both[..., :-1].contiguous(), both[..., 1:].contiguous(), None if ids is None else torch.from_numpy(ids)
        )

    @cached_property
    def _validation_windows(self) -> list[tuple[int, int]]:
        """(source, window) of each sequence scored: shared out by weight, evenly spaced, none twice, one at least.

        The weights are `data.validation.weights`, or those of the mix.
        The last window of a source may be short.
        """
        length = self.config.sequence_length
        weights = self.config.validation.weights
        shares = [weights[name] for name in self.names] if weights else self.shares
        wanted = largest_remainder(shares, self.config.validation.sequences)
        chosen = []
        for source, (stream, count) in enumerate(zip(self.held_out, wanted, strict=True)):
            available = -(-(len(stream.tokens) - 1) // length) if len(stream.tokens) > 1 else 0
            count = min(max(count, 1), available)
            chosen += [(source, i * available // count) for i in range(count)]
        return chosen

    @property
    def validation_sequences(self) -> int:
        """How many sequences a validation scores; 0 where nothing is held out (`data.validation.fraction=0`)."""
        return len(self._validation_windows)

    @cached_property
    def validation_unigram_nats(self) -> float | None:
        """Entropy of the frequencies of the tokens that a validation scores, in nats: the least loss without context.

        With the correction for rare tokens that so few do not show (G. A. Miller, "Note on the bias of information
        estimates", 1955). None where nothing is held out.
        """
        length = self.config.sequence_length
        scored = [self.held_out[s].tokens[w * length + 1 : (w + 1) * length + 1] for s, w in self._validation_windows]
        if not scored:
            return None
        _, counts = np.unique(np.concatenate(scored), return_counts=True)
        shares = counts / counts.sum()
        return float(-(shares * np.log(shares)).sum() + (len(counts) - 1) / (2 * counts.sum()))

    def validation(self, indices: Sequence[int], micro_batch_size: int) -> ValidationBatch:
        """Return the sequences `indices` of the fixed validation order; rows beyond them or it have no target."""
        length = self.config.sequence_length
        tokens = np.full((micro_batch_size, length), self.tokenizer.end_of_document, np.int64)  # [B, T]
        labels = np.full((micro_batch_size, length), IGNORED, np.int64)  # [B, T]
        ids = np.zeros((micro_batch_size, length), np.int64) if self.config.document_mask else None  # [B, T]
        sources = np.zeros(micro_batch_size, np.int64)  # [B]
        for row, index in enumerate(indices):
            if index >= self.validation_sequences:
                continue
            sources[row], window = self._validation_windows[index]
            stream, start = self.held_out[sources[row]], window * length
            found = stream.tokens[start : start + length + 1]  # [T+1], shorter at the end of the source
            targets = len(found) - 1
            tokens[row, :targets], labels[row, :targets] = found[:-1], found[1:]
            if ids is not None:
                ids[row] = stream.document_ids(start, length)
        return ValidationBatch(
            torch.from_numpy(tokens),
            torch.from_numpy(labels),
            None if ids is None else torch.from_numpy(ids),
            torch.from_numpy(sources),
        )

    def validation_batches(self, micro_batch_size: int, rank: int = 0, world: int = 1) -> Iterator[ValidationBatch]:
        """Yield every validation sequence once over all ranks, in the same number of batches on each."""
        for first in range(0, self.validation_sequences, micro_batch_size * world):
            start = first + rank * micro_batch_size
            yield self.validation(range(start, start + micro_batch_size), micro_batch_size)

    def report(self, total_samples: int) -> list[SourceReport]:
        """Return for each source what a run of `total_samples` sequences (steps x global_batch_size) takes of it."""
        length = self.config.sequence_length
        drawn = self.order.drawn(total_samples)
        return [
            SourceReport(
                name=name,
                share=self.shares[s],
                achieved_share=drawn[s] / total_samples if total_samples else 0.0,
                available_tokens=self.order.windows[s] * length,
                drawn_tokens=drawn[s] * length,
                epochs=drawn[s] / self.order.windows[s],
                documents=len(self.train[s].starts),
                validation_tokens=len(self.held_out[s].tokens),
            )
            for s, name in enumerate(self.names)
        ]


def open_corpus(config: DataConfig, seed: int, vocab_size: int, progress: bool = False) -> Corpus:
    """Prepare (where not cached) and map the corpus of `config`; `vocab_size` is the model's.

    `progress` shows bars on stderr while something is built. Processes that ask at once wait for the one that builds.
    `config` has passed `check_data`. Raises ConfigError with every problem that the same stage finds.
    """
    problems: list[Problem] = []
    cache_dir = cache_dir_of(config)
    sources = {name: Source(name, source) for name, source in config.sources.items()}
    scans = {}
    for name, source in sources.items():
        try:
            scans[name] = scan(source, cache_dir, progress)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    held_out = hold_out(scans, config.validation.fraction)
    tokenizer = prepare_tokenizer(config.tokenizer, vocab_size, sources, scans, held_out, cache_dir, progress)
    streams = {
        name: prepare_streams(source, scans[name], held_out, tokenizer, cache_dir, progress)
        for name, source in sources.items()
    }
    problems = [p for name, s in streams.items() for p in _length_problems(name, s, config)]
    if problems:
        raise ConfigError(problems)
    return Corpus(config, seed, tokenizer, streams, {name: scans[name].left_out for name in sources})


def _length_problems(name: str, streams: dict[str, TokenStream], config: DataConfig) -> Iterator[Problem]:
    needed, available = config.sequence_length + 1, len(streams["train"].tokens)
    if available < needed:
        yield Problem(
            "data.sequence_length",
            f"{config.sequence_length:,} needs {needed:,} training tokens, and source {name!r} has {available:,}. "
            f"Shorten it to {max(1, available - 1):,} or less, or give the source more text.",
        )
