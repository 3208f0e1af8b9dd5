"""mixture=curriculum: static weights, and each source from its easy documents to its hard ones."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.base import PositiveInt
from lightning_llm.config.schema.data import MIXTURES, Pace
from lightning_llm.data.mixing.static import StaticMixture
from lightning_llm.data.scoring.table import scores_digest, scores_of, scores_problems


@MIXTURES.register
class Curriculum(StaticMixture):
    """Curriculum (Bengio et al. 2009): each epoch takes the documents in the order of a score.

    The order does not change which windows are used; `order=shuffled` is the baseline with the same windows.
    """

    chooses_documents: ClassVar[bool] = True

    kind: Literal["curriculum"] = "curriculum"  # type: ignore[assignment]
    scores: str = Field(description="the Parquet file that `prepare --score` wrote")
    by: Literal["text_bytes", "quality", "diversity"] = Field("text_bytes", description="the score that is gone by")
    order: Literal["ascending", "descending", "shuffled"] = Field(
        "ascending", description="from small scores to large ones, or back; shuffled: the same windows in no order"
    )
    blocks: PositiveInt = Field(20, description="stretches of an epoch within which the order is shuffled")
    total_steps: PositiveInt | None = Field(
        None, description="steps of the run that is put in order, or phases are shares of; null: trainer.max_steps"
    )

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
    """`data.mixing.chosen.Chooser` that takes each document once, sorted by ascending score.

    Documents with equal scores keep their reading order.
    """

    def __init__(self, file: Path, by: str):
        self.file, self.by = file, by

    def orders(self, keys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `Chooser`."""
        scored = scores_of(self.file, keys, (self.by,))
        return {name: np.argsort(each[self.by], kind="stable") for name, each in scored.items()}

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return {}, because every document is used once."""
        return {}
