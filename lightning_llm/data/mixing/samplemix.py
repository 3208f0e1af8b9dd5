"""mixture=samplemix: copies of each document by its quality and diversity (SampleMix, arXiv 2503.01506, section 3)."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.keyed_hash import name_word
from lightning_llm.config.schema.base import Fraction, PositiveFloat
from lightning_llm.config.schema.data import MIXTURES, MixtureConfig
from lightning_llm.data.mixing.addressing import SMALLEST_SHARE, Shares
from lightning_llm.data.scoring.table import scores_digest, scores_of, scores_problems

SHOWN_CLUSTERS = 64
MOST_COPIES = 2**28
"""Documents in a training stream: its order and their places are some 32 bytes each, 8 GiB, on every rank."""
LEAST_TEMPERATURE = 1e-3
LARGEST_RATIO = 1000.0
"""At this ratio, rounding copies to whole numbers changes them by a tenth of a percent: a larger one gains nothing."""


@MIXTURES.register
class SampleMix(MixtureConfig):
    """SampleMix (Xi et al. 2025, arXiv 2503.01506): a document's scores decide its copies, and so the sources' shares.

    A document's weight is the softmax, over all training documents, of `(alpha diversity + (1 - alpha) quality) / tau`;
    `ratio x documents x weight` is how often it is expected in the training stream: the whole part of that, and once
    more with the rest as probability, by a hash of the document's key.
    """

    shares_by_tokens: ClassVar[bool] = True
    chooses_documents: ClassVar[bool] = True

    kind: Literal["samplemix"] = "samplemix"
    scores: str = Field(description="the Parquet file that `prepare --score` wrote")
    alpha: Fraction = Field(0.8, description="share of diversity in a document's score; the rest is quality")
    tau: Annotated[float, Field(ge=LEAST_TEMPERATURE, le=1e6)] = Field(
        0.2, description="temperature of the softmax: the smaller, the more copies of the best"
    )
    ratio: PositiveFloat = Field(1.0, description="documents in the training stream over those there are; at most 1000")

    def problems(self, key: str, weights: Mapping[str, float]) -> Iterator[Problem]:
        if self.ratio > LARGEST_RATIO:
            text = (
                f"is {self.ratio:g}, at most {LARGEST_RATIO:g}: the stream is gone through again, as epochs, where it "
                "ends before the run, and a longer one only takes memory. Lower it."
            )
            yield Problem(f"{key}.ratio", text)
        yield from scores_problems(f"{key}.scores", Path(self.scores))
        for name, weight in weights.items():
            if weight not in (0, 1):
                text = f"is {weight:g}, and documents are drawn by their scores. Leave it out (1), or 0 for none of it."
                yield Problem(f"data.sources.{name}.weight", text)
        if not any(weights.values()):
            yield Problem(
                f"data.sources.{next(iter(weights))}.weight",
                "is 0, like all others. Give at least one source a weight above 0.",
            )

    def drawn(self, weights: Mapping[str, float]) -> tuple[str, ...]:
        return tuple(name for name, weight in weights.items() if weight)

    def identity(self) -> Any:
        return self.model_dump() | {"scores": scores_digest(self.scores)}

    def chooser(self) -> Any:
        return ScoredCopies(self)

    def build(self, weights: Mapping[str, float], step_samples: int, max_steps: int | None) -> Any:
        total = sum(weights.values())
        small = [name for name, weight in weights.items() if 0 < weight < SMALLEST_SHARE * total]
        if small:
            text = (
                f"gives {', '.join(small)} a share of the tokens below {SMALLEST_SHARE:.0e}, the smallest possible. "
                "Raise tau, or leave the source out (weight 0)."
            )
            raise ConfigError(Problem("data.mixture", text))
        return Shares(weights)


class ScoredCopies:
    """The `data.mixing.chosen.Chooser` of SampleMix: the softmax goes over the documents of all sources."""

    def __init__(self, config: SampleMix):
        self.config = config
        self._facts: dict[str, dict[str, Any]] = {}

    def orders(self, keys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `Chooser`.

        Raises:
            ConfigError: scores are missing or wrong, or there would be more copies than an order can hold.
        """
        scored = scores_of(Path(self.config.scores), keys, ("quality", "diversity", "cluster"))
        quality = np.concatenate([scored[name]["quality"] for name in keys])
        diversity = np.concatenate([scored[name]["diversity"] for name in keys])
        weights = sampling_weights(quality, diversity, self.config.alpha, self.config.tau)
        expected = self.config.ratio * len(weights) * weights  # [documents of all sources]
        if (total := expected.sum()) > MOST_COPIES:
            text = (
                f"asks for {total:,.0f} documents in the training stream, but its order must fit in memory: at most "
                f"{MOST_COPIES:,}. Lower it: a stream that ends before the run is repeated."
            )
            raise ConfigError(Problem("data.mixture.ratio", text))
        orders, at = {}, 0
        for name, its in keys.items():
            own = expected[at : at + len(its)]
            copies = realised_copies(own, document_draws(name, its))
            orders[name] = in_rounds(copies)
            self._facts[name] = _facts(own, copies, scored[name]["cluster"])
            at += len(its)
        return orders

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return counts by source, and each cluster's share of all copies.

        Counted are `documents`, their `copies`, those `expected`, the `most` of one document, and `dropped` documents.
        """
        total = max(1, sum(each["copies"] for each in self._facts.values()))
        return {
            name: {**each, "clusters": {cluster: count / total for cluster, count in each["clusters"].items()}}
            for name, each in self._facts.items()
        }


def _facts(expected: np.ndarray, copies: np.ndarray, clusters: np.ndarray) -> dict[str, Any]:
    of_cluster = {str(each): int(copies[clusters == each].sum()) for each in np.unique(clusters)[:SHOWN_CLUSTERS]}
    return {
        "documents": len(copies),
        "copies": int(copies.sum()),
        "expected": float(expected.sum()),
        "most": int(copies.max(initial=0)),
        "dropped": int((copies == 0).sum()),
        "clusters": of_cluster,
    }


def sampling_weights(quality: np.ndarray, diversity: np.ndarray, alpha: float, tau: float) -> np.ndarray:
    """Return the softmax of `(alpha diversity + (1 - alpha) quality) / tau`, float64 [documents]."""
    scores = (alpha * diversity + (1 - alpha) * quality) / tau
    powers = np.exp(scores - scores.max())
    return np.asarray(powers / powers.sum())


def realised_copies(expected: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return whole numbers with the expectation `expected`, int64 [documents], from `draws` uniform in [0, 1)."""
    whole = np.floor(expected)
    return (whole + (draws < expected - whole)).astype(np.int64)


def document_draws(source: str, keys: np.ndarray) -> np.ndarray:
    """Return uniform draws in [0, 1) by `source` and uint64 `keys` [documents]: the same in every run.

    Documents with equal keys are distinguished by their number among these.
    """
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.searchsorted(ordered, ordered, side="left")
    occurrence = np.empty(len(keys), np.uint32)
    occurrence[order] = np.arange(len(keys)) - first
    low, high = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32), (keys >> np.uint64(32)).astype(np.uint32)
    return hashed_words(low, high, occurrence, seed=name_word(source)) / 2.0**32


def hashed_words(*words: np.ndarray, seed: int) -> np.ndarray:
    """Return `keyed_hash.hash_words` of each row of uint32 `words` [documents]: uint32 [documents]."""
    h = np.full(len(words[0]), seed, np.uint32)
    for word in words:
        k = word * np.uint32(0xCC9E2D51)
        k = (k << np.uint32(15) | k >> np.uint32(17)) * np.uint32(0x1B873593)
        h = h ^ k
        h = (h << np.uint32(13) | h >> np.uint32(19)) * np.uint32(5) + np.uint32(0xE6546B64)
    h = h ^ np.uint32(4 * len(words))
    h = (h ^ h >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    h = (h ^ h >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return h ^ h >> np.uint32(16)


def in_rounds(copies: np.ndarray) -> np.ndarray:
    """Return the numbers of the documents in rounds, int64: each once, then those of two copies once more, and so on.

    So copies of a document are as far apart as possible, and only windows of a tiny corpus contain two.
    """
    left = np.flatnonzero(copies)
    rounds, made = [np.empty(0, np.int64)], 0
    for level in np.unique(copies[left]):  # rounds up to it contain the same documents
        left = left[copies[left] > made]
        rounds.append(np.tile(left, int(level) - made))
        made = int(level)
    return np.concatenate(rounds)
