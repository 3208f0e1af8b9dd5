"""`Corpus`: tokens by address. Every batch is a function of (config, seed, step), so nothing is ever resumed.

The training documents of a source are concatenated, each followed by the end-of-document token. Window w of a source
is its tokens w*T .. (w+1)*T inclusive: T inputs and, shifted by one, T targets. Neighboring windows share one token.
The last tokens of a source that do not fill a window (fewer than T+1) are not trained on.

Letters: A micro-batches per rank and step (gradient accumulation), B micro-batch size, T sequence length.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from lightning_llm.config.schema.data import DataConfig
from lightning_llm.data.cache import digest_of
from lightning_llm.data.mixing.addressing import Mixture, SampleOrder, index_of, largest_remainder, merged
from lightning_llm.data.mixing.weights import window_limits
from lightning_llm.data.report import SourceAccount
from lightning_llm.data.tokens.token_files import TokenStream
from lightning_llm.data.tokens.tokenizer import Tokenizer

IGNORED = -100  # a label that is no target: what torch's cross entropy ignores by default


@dataclass(frozen=True)
class _Tensors:
    """Named tensors; some may be None."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Return the batch on `device`; `non_blocking`: see `Tensor.to`."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return a copy in page-locked memory, which allows asynchronous copies to CUDA. Called by `DataLoader`."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(value) for name, value in tensors.items() if value is not None})


@dataclass(frozen=True)
class Batch(_Tensors):
    """One rank's share of an optimizer step, int64 [A, B, T] each.

    `labels[..., t]` is the token after `tokens[..., t]`. `document_ids` numbers the documents within each row from 0;
    None unless `data.document_mask`.
    """

    tokens: Tensor
    labels: Tensor
    document_ids: Tensor | None


@dataclass(frozen=True)
class ValidationBatch(_Tensors):
    """One validation micro-batch, int64 [B, T] as in `Batch`; labels are -100 where there is no target.

    `sources`: index of each row's source, int64 [B]. Rows that pad the last batch have no target, and source 0.
    """

    tokens: Tensor
    labels: Tensor
    document_ids: Tensor | None
    sources: Tensor


@dataclass(frozen=True)
class Sample:
    """One training window and its address; `source` is the index of a training source.

    `tokens`: int64 [T+1], inputs and targets. `document_ids`: int64 [T], from 0 within the window; None unless
    `data.document_mask`.
    """

    source: int
    window: int
    epoch: int
    tokens: np.ndarray
    document_ids: np.ndarray | None


@dataclass(frozen=True)
class Origin:
    """Origin of a training window: tokens `start` .. `start` + T (inclusive) of the training tokens of `source`.

    They belong to the documents `first_document` .. `last_document` of the source, counted from 0 in reading order
    without held-out documents.
    """

    source: str
    epoch: int
    start: int
    first_document: int
    last_document: int


class Corpus:
    """The token streams of all sources of a run, from which it draws its batches. Build it with `open_corpus`.

    Cheap to pickle: data loader processes map the same files.
    """

    def __init__(
        self,
        config: DataConfig,
        seed: int,
        tokenizer: Tokenizer,
        streams: dict[str, dict[str, TokenStream]],
        accounts: Mapping[str, SourceAccount],
        max_steps: int | None = None,
        chosen: Mapping[str, Mapping[str, Any]] | None = None,
    ):
        """Order the windows of prepared streams; `data.opening` builds and checks all arguments.

        Args:
            config: sources, mixture and batch sizes.
            seed: seed of the order of samples.
            tokenizer: the one that made the tokens.
            streams: {source: {"train": stream, "validation": stream}}; trained sources have at least one window.
            accounts: {source: counts of its files and documents}.
            max_steps: length of the run in optimizer steps; None if unknown.
            chosen: result of `choose_documents`.
        """
        self.accounts, self.chosen = dict(accounts), dict(chosen or {})
        self.config = config
        self.tokenizer = tokenizer
        self.names = list(config.sources)
        weights = config.trained_weights
        self.trained = list(weights)
        self.train = [streams[name]["train"] for name in self.trained]
        self.held_out = [streams[name]["validation"] for name in self.names]
        length = config.sequence_length
        windows = {name: (len(s.tokens) - 1) // length for name, s in zip(self.trained, self.train, strict=True)}
        kind = config.chosen_mixture
        drawn = {name: windows[name] if name in config.drawn else 0 for name in self.trained}
        shares = drawn if kind.shares_by_tokens else weights
        mixture: Mixture = kind.build(shares, config.global_batch_size, max_steps)
        self.skipped = merged(config.skip_samples or ())
        self.limits = window_limits(config)
        steps = kind.paced_steps(max_steps)
        total = None if steps is None else steps * config.global_batch_size
        self.order = SampleOrder(mixture, windows, seed, config.shuffle, self.skipped, self.limits, kind.pace, total)
        self.shares = [weight / sum(weights.values()) for weight in weights.values()]
        self.mix_shares = [share / sum(shares.values()) for share in shares.values()]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the training data (32 hex digits), equal for runs that train on the same data.

        It covers the tokenizer, the mixture, `data.max_tokens`, and the name, share and tokens of each source that is
        trained on. It does not depend on paths, seed or batch sizes, nor on sources without training samples.
        """
        held_out = dict(zip(self.names, self.held_out, strict=True))
        streams = zip(self.trained, self.shares, self.train, strict=True)
        drawn = self.config.drawn
        learned = [
            [name, share, train.digest, held_out[name].digest] for name, share, train in streams if name in drawn
        ]
        mixture = self.config.chosen_mixture.identity()
        further = [] if mixture is None else [mixture]
        if self.limits is not None:
            further.append(["max_tokens", self.limits, self.config.sequence_length, self.config.shuffle])
        return digest_of([self.tokenizer.fingerprint, learned, *further])

    @cached_property
    def validation_fingerprint(self) -> str:
        """Hash (32 hex digits) of the tokens that `val_loss` scores and their contexts.

        Validation-only sources count only if no other source is scored, as in the average of `train.validation`.
        """
        scored = {self.names[source] for source, _ in self._validation_windows}
        unwatched = [name for name in self.names if name not in self.config.watched]
        return self._scored_fingerprint(unwatched if scored & {*unwatched} else self.names)

    @cached_property
    def source_fingerprints(self) -> dict[str, str]:
        """{source: hash (32 hex digits) of the tokens that `val_loss/SOURCE` scores}."""
        scored = {source for source, _ in self._validation_windows}
        return {self.names[source]: self._scored_fingerprint([self.names[source]]) for source in sorted(scored)}

    def _scored_fingerprint(self, names: Sequence[str]) -> str:
        """Return 32 hex digits of the scored tokens of the sources `names`, given in the corpus' order."""
        held_out = dict(zip(self.names, self.held_out, strict=True))
        streams = [[name, held_out[name].digest] for name in names]
        place = {self.names.index(name): number for number, name in enumerate(names)}
        windows = [(place[source], window) for source, window in self._validation_windows if source in place]
        settings = [self.config.sequence_length, self.config.document_mask]
        return digest_of([self.tokenizer.fingerprint, streams, windows, settings])

    def sample(self, position: int) -> Sample:
        """Return the training sample at `position`: row r of step s is at position s * global_batch_size + r.

        Positions count from 0 and have no upper limit, since sources are repeated.
        """
        address = self.order.locate(position)
        length = self.config.sequence_length
        stream, start = self.train[address.source], address.window * length
        tokens = stream.tokens[start : start + length + 1].astype(np.int64)  # [T+1]
        ids = stream.document_ids(start, length) if self.config.document_mask else None  # [T]
        return Sample(address.source, address.window, address.epoch, tokens, ids)

    def index_of(self, position: int) -> int:
        """Return the number (as in `data.skip_samples`) of the sample at `position`; equal unless some are skipped."""
        return index_of(position, self.skipped)

    def origin(self, position: int) -> Origin:
        """Return the origin of the training sample at `position`."""
        address = self.order.locate(position)
        start, stream = address.window * self.config.sequence_length, self.train[address.source]
        ends = start, start + self.config.sequence_length
        first, last = (int(index) - 1 for index in np.searchsorted(stream.starts, ends, side="right"))
        return Origin(self.trained[address.source], address.epoch, start, first, last)

    def micro_batches(self, step: int, indices: Sequence[int] | None = None) -> Batch:
        """Return the micro-batches `indices` of optimizer step `step` (from 0), in that order; None: all of them.

        Micro-batch m is rows m*B to (m+1)*B - 1 of the global batch, in every parallel layout.
        """
        size, length, width = self.config.global_batch_size, self.config.sequence_length, self.config.micro_batch_size
        rows = [range(m * width, (m + 1) * width) for m in (range(size // width) if indices is None else indices)]
        shape = len(rows), width, length
        windows = np.empty((*shape[:2], length + 1), np.int64)  # [A, B, T+1]
        ids = np.empty(shape, np.int64) if self.config.document_mask else None  # [A, B, T]
        for m, micro_batch in enumerate(rows):
            for b, row in enumerate(micro_batch):
                sample = self.sample(step * size + row)
                windows[m, b] = sample.tokens
                if ids is not None and sample.document_ids is not None:
                    ids[m, b] = sample.document_ids
        both = torch.from_numpy(windows)  # [A, B, T+1]
        return Batch(
            both[..., :-1].contiguous(), both[..., 1:].contiguous(), None if ids is None else torch.from_numpy(ids)
        )

    @cached_property
    def _validation_windows(self) -> list[tuple[int, int]]:
        """(source, window) of each scored sequence: distributed by weight, evenly spaced, unique, at least one.

        The weights are `data.validation.weights`, or the sources' own; validation-only sources get no share.
        The last window of a source may be short.
        """
        length, sequences = self.config.sequence_length, self.config.validation.sequences
        weights = self.config.validation.weights
        shares = [weights[name] for name in self.trained] if weights else self.shares
        wanted = dict(zip(self.trained, largest_remainder(shares, sequences), strict=True))
        chosen = []
        for source, (name, stream) in enumerate(zip(self.names, self.held_out, strict=True)):
            count = wanted.get(name, sequences)
            available = -(-(len(stream.tokens) - 1) // length) if len(stream.tokens) > 1 else 0
            count = min(max(count, 1), available)
            chosen += [(source, i * available // count) for i in range(count)]
        return chosen

    @property
    def validation_sequences(self) -> int:
        """Number of sequences that a validation scores; 0 if nothing is held out (`data.validation.fraction=0`)."""
        return len(self._validation_windows)

    @cached_property
    def validation_unigram_nats(self) -> float | None:
        """Entropy of the frequencies of the validation tokens in nats: the lowest loss of a model without context.

        Includes the bias correction for a finite sample (G. A. Miller, "Note on the bias of information estimates",
        1955). None if nothing is held out.
        """
        length = self.config.sequence_length
        scored = [self.held_out[s].tokens[w * length + 1 : (w + 1) * length + 1] for s, w in self._validation_windows]
        if not scored:
            return None
        _, counts = np.unique(np.concatenate(scored), return_counts=True)
        shares = counts / counts.sum()
        return float(-(shares * np.log(shares)).sum() + (len(counts) - 1) / (2 * counts.sum()))

    def validation_text(self) -> dict[str, tuple[int, int | None]]:
        """Return {source: (number of tokens that a validation scores, their bytes of text)}.

        The bytes are None if they were not counted when the source was tokenized.
        """
        length = self.config.sequence_length
        sizes = [stream.sizes() for stream in self.held_out]
        found: dict[str, tuple[int, int | None]] = {
            name: (0, None if its is None else 0) for name, its in zip(self.names, sizes, strict=True)
        }
        for source, window in self._validation_windows:
            first, last = window * length + 1, (window + 1) * length + 1
            tokens, size = found[self.names[source]]
            its, count = sizes[source], len(self.held_out[source].tokens[first:last])
            more = None if its is None or size is None else size + int(its[first:last].sum())
            found[self.names[source]] = tokens + count, more
        return found

    def validation(self, indices: Sequence[int], micro_batch_size: int) -> ValidationBatch:
        """Return a batch of the validation sequences `indices`, padded to `micro_batch_size` rows without targets."""
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
        """Yield this rank's validation batches: all ranks have equally many, and together each sequence once."""
        for first in range(0, self.validation_sequences, micro_batch_size * world):
            start = first + rank * micro_batch_size
            yield self.validation(range(start, start + micro_batch_size), micro_batch_size)
