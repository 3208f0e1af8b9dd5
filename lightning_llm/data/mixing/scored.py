"""Mixtures by the scores of documents: `samplemix` sets their number of copies, `curriculum` their order.

SampleMix: arXiv 2503.01506, section 3. Curriculum: Bengio et al. 2009. `prepare --score` writes the scores.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.keyed_hash import name_word
from lightning_llm.config.schema.base import Fraction, PositiveFloat, PositiveInt
from lightning_llm.config.schema.data import MIXTURES, MixtureConfig, Pace
from lightning_llm.data.mixing.addressing import SMALLEST_SHARE, Shares
from lightning_llm.data.mixing.weights import StaticMixture
from lightning_llm.data.scoring import scores_digest, scores_of, scores_problems

SHOWN_CLUSTERS = 64
MOST_COPIES = 2**28
"""Maximum number of documents in a training stream: its order takes about 32 bytes each, 8 GiB on every rank."""
LEAST_TEMPERATURE = 1e-3
LARGEST_RATIO = 1000.0
"""Largest `ratio`: rounding the copies to integers then changes them by 0.1% only, so a larger one has no effect."""


@MIXTURES.register
class SampleMix(MixtureConfig):
    """SampleMix (Xi et al. 2025, arXiv 2503.01506): scores set the copies of documents, and so the sources' shares.

    A document's weight is the softmax, over all training documents, of `(alpha diversity + (1 - alpha) quality) / tau`.
    Its expected number of copies in the training stream is `ratio x documents x weight`. It gets the integer part of
    that, and one more with the fraction as probability, drawn by a hash of the document's key.
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
                f"is {self.ratio:g}: must be at most {LARGEST_RATIO:g}. A stream that ends before the run is repeated, "
                "so a longer one only takes memory. Lower it."
            )
            yield Problem(f"{key}.ratio", text)
        yield from scores_problems(f"{key}.scores", Path(self.scores))
        for name, weight in weights.items():
            if weight not in (0, 1):
                text = f"is {weight:g}, but scores decide here. Set 1 (the default), or 0 to use none of the source."
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
                "Raise tau, or omit the source (weight 0)."
            )
            raise ConfigError(Problem("data.mixture", text))
        return Shares(weights)


class ScoredCopies:
    """`data.opening.Chooser` of SampleMix, with a softmax over the documents of all sources."""

    def __init__(self, config: SampleMix):
        self.config = config
        self._facts: dict[str, dict[str, Any]] = {}

    def orders(self, keys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return each source's documents in training order, with copies; see `Chooser.orders`.

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
        """Return {source: counts} of the last `orders`, as JSON data.

        `documents`: training documents. `copies`: of all, `expected` by the scores, and the `most` of one document.
        `dropped`: documents without a copy. `clusters`: {cluster: its share of the copies of all sources}.
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
    """Return integers with the expectation `expected`, int64 [documents]; `draws` are uniform in [0, 1)."""
    whole = np.floor(expected)
    return (whole + (draws < expected - whole)).astype(np.int64)


def document_draws(source: str, keys: np.ndarray) -> np.ndarray:
    """Return a uniform draw in [0, 1) per document, a hash of `source` and the document's key (uint64 [documents]).

    Draws are equal in every run. Documents with equal keys get different draws, by their order.
    """
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.searchsorted(ordered, ordered, side="left")
    occurrence = np.empty(len(keys), np.uint32)
    occurrence[order] = np.arange(len(keys)) - first
    low, high = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32), (keys >> np.uint64(32)).astype(np.uint32)
    return hashed_words(low, high, occurrence, seed=name_word(source)) / 2.0**32


def hashed_words(*words: np.ndarray, seed: int) -> np.ndarray:
    """Return `keyed_hash.hash_words` for arrays: uint32 [documents], one hash per row of the `words` [documents]."""
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
    """Return document numbers (int64) in rounds: all once, then those with two copies or more once again, and so on.

    So copies of a document are as far apart as possible, and only windows of a tiny corpus contain two.
    """
    left = np.flatnonzero(copies)
    rounds, made = [np.empty(0, np.int64)], 0
    for level in np.unique(copies[left]):  # rounds up to it contain the same documents
        left = left[copies[left] > made]
        rounds.append(np.tile(left, int(level) - made))
        made = int(level)
    return np.concatenate(rounds)


@MIXTURES.register
class Curriculum(StaticMixture):
    """Curriculum (Bengio et al. 2009): static weights; each source's epoch is ordered by a score of its documents.

    The windows are the same in any order, so `order=shuffled` is the baseline.
    """

    chooses_documents: ClassVar[bool] = True

    kind: Literal["curriculum"] = "curriculum"  # type: ignore[assignment]
    scores: str = Field(description="the Parquet file that `prepare --score` wrote")
    by: Literal["text_bytes", "quality", "diversity"] = Field("text_bytes", description="the score to sort by")
    order: Literal["ascending", "descending", "shuffled"] = Field(
        "ascending", description="order of the scores; shuffled: the same windows in random order"
    )
    blocks: PositiveInt = Field(20, description="number of parts of an epoch within which the order is shuffled")
    total_steps: PositiveInt | None = Field(None, description="number of steps to order; null: trainer.max_steps")

    @property
    def follows_max_steps(self) -> bool:
        """Whether the samples of a step depend on the length of the run."""
        return self.total_steps is None and self.order != "shuffled"

    def paced_steps(self, max_steps: int | None) -> int | None:
        return self.total_steps or max_steps

    @property
    def pace(self) -> Pace | None:
        return None if self.order == "shuffled" else Pace(self.blocks, self.order == "descending")

    def problems(self, key: str, weights: Mapping[str, float]) -> Iterator[Problem]:
        yield from super().problems(key, weights)
        yield from scores_problems(f"{key}.scores", Path(self.scores))

    def identity(self) -> Any:
        return self.model_dump() | {"scores": scores_digest(self.scores)}

    def chooser(self) -> Any:
        return SortedDocuments(Path(self.scores), self.by)


class SortedDocuments:
    """`data.opening.Chooser` that takes each document once, sorted by ascending score.

    Documents with equal scores keep their reading order.
    """

    def __init__(self, file: Path, by: str):
        self.file, self.by = file, by

    def orders(self, keys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return each source's documents sorted by score; see `Chooser.orders`."""
        scored = scores_of(self.file, keys, (self.by,))
        return {name: np.argsort(each[self.by], kind="stable") for name, each in scored.items()}

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return {}, because every document is used once."""
        return {}
