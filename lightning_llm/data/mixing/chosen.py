"""Training streams of chosen documents: a mixture decides how often each document occurs, and in which order.

Tokens are not written again: a chosen stream is an order of the source's documents, and joins their tokens on access.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lightning_llm.config.schema.data import DataConfig
from lightning_llm.data.cache import build_once
from lightning_llm.data.prepare import HeldOut
from lightning_llm.data.sources.source import Source
from lightning_llm.data.tokens.token_files import JoinedTokens, TokenStream, map_array

KEYS = "documents.keys"  # uint64 [documents]


class Chooser(Protocol):
    """Chooser of training documents, built by `MixtureConfig.chooser`."""

    def orders(self, keys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return int64 [chosen] by source: the numbers of training documents in their new order.

        `keys` are those of the training documents, uint64 [documents] by source, in the order in which they are read.
        Raises ConfigError.
        """

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return facts about the choice by source, as JSON data."""


def choose_documents(
    config: DataConfig,
    sources: Mapping[str, Source],
    streams: dict[str, dict[str, TokenStream]],
    held_out: HeldOut,
    cache_dir: Path,
) -> dict[str, dict[str, Any]]:
    """Replace the training streams in `streams` by chosen ones if the mixture chooses documents; return `facts`.

    Raises:
        ConfigError: the mixture knows nothing of some document.
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
    """Documents of the stream `base`, by their numbers in `order`, int64 [chosen]: some several times, some never."""

    base: TokenStream
    order: np.ndarray

    @classmethod
    def from_stream(cls, base: TokenStream, order: np.ndarray) -> "ChosenStream":
        """Return the stream; its digest is of the base stream's digest and the order."""
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
