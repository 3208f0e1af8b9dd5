"""Documents from small scores to large ones, each once: a curriculum's training stream, whichever way it is gone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lightning_llm.data.scoring.table import scores_of


class SortedDocuments:
    """A `data.mixing.chosen.Chooser`: equal scores stay in the order they are read in."""

    def __init__(self, file: Path, by: str):
        self.file, self.by = file, by

    def orders(self, keys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `Chooser`."""
        scored = scores_of(self.file, keys, (self.by,))
        return {name: np.argsort(each[self.by], kind="stable") for name, each in scored.items()}

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return nothing: all documents are there."""
        return {}
