"""The mixture of documents by their own quality and diversity, whatever source they are of."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema.base import Fraction, PositiveFloat
from lightning_llm.config.schema.data import MIXTURES, MixtureConfig

LEAST_TEMPERATURE = 1e-3
LARGEST_RATIO = 1000.0
"""At which copies are whole numbers to a tenth of a percent: what more would tell documents apart by is lost in it."""


@MIXTURES.register
class SampleMix(MixtureConfig):
    """SampleMix (Xi et al. 2025, arXiv 2503.01506): copies of a document follow its scores, and sources' shares those.

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
        from lightning_llm.data.scoring.table import scores_problems

        yield from scores_problems(f"{key}.scores", Path(self.scores))
        for name, weight in weights.items():
            if weight not in (0, 1):
                text = f"is {weight:g}, and documents are drawn by their scores. Leave it out (1), or 0 for none of it."
                yield Problem(f"data.sources.{name}.weight", text)
        if not any(weights.values()):
            yield Problem(f"data.sources.{next(iter(weights))}.weight", "is 0, as all are: give one source a weight.")

    def drawn(self, weights: Mapping[str, float]) -> tuple[str, ...]:
        return tuple(name for name, weight in weights.items() if weight)

    def identity(self) -> Any:
        from lightning_llm.data.scoring.table import scores_digest

        return self.model_dump() | {"scores": scores_digest(self.scores)}

    def chooser(self) -> Any:
        from lightning_llm.data.mixing.copies import ScoredCopies

        return ScoredCopies(self)

    def build(self, weights: Mapping[str, float], step_samples: int, max_steps: int | None) -> Any:
        from lightning_llm.data.mixing.addressing import SMALLEST_SHARE, Shares

        total = sum(weights.values())
        small = [name for name, weight in weights.items() if 0 < weight < SMALLEST_SHARE * total]
        if small:
            text = (
                f"gives {', '.join(small)} a share of the tokens below {SMALLEST_SHARE:.0e}, the smallest possible. "
                "Raise tau, or leave the source out (weight 0)."
            )
            raise ConfigError(Problem("data.mixture", text))
        return Shares(weights)
