"""A stand-in for a judge of quality that needs no model: long documents with an even use of bytes are good ones."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from lightning_llm.config.schema.score import SCORERS, Measure, ScorerConfig


@SCORERS.register
class LengthEntropy(ScorerConfig):
    """The mean of a document's log length and of its bytes' entropy, each brought to [0, 1] over all documents."""

    measures: ClassVar[Measure] = "quality"

    kind: Literal["length_entropy"] = "length_entropy"

    def score(self, texts: Sequence[str]) -> tuple[Any, Any]:
        import numpy as np

        from lightning_llm.data.scoring.scale import to_unit

        lengths, entropies = np.zeros(len(texts)), np.zeros(len(texts))
        for index, text in enumerate(texts):
            counts = np.bincount(np.frombuffer(text.encode(), np.uint8), minlength=256)
            shares = counts[counts > 0] / counts.sum()
            lengths[index], entropies[index] = np.log(counts.sum()), -(shares * np.log2(shares)).sum()
        return (to_unit(lengths) + to_unit(entropies)) / 2, None
