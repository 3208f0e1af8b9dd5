"""How many rows of logits are there at once, of a micro-batch that is trained on. Imports no torch."""

from typing import NamedTuple

from lightning_llm.config.schema import Config
from lightning_llm.model.loss_spec import rows_at_once
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.memory.activations import tokens_of


class LossChunks(NamedTuple):
    """A micro-batch's `rows` of `width` logits on a rank, of which `at_once` are there at once, in `number` chunks."""

    rows: int
    width: int
    at_once: int

    @property
    def number(self) -> int:
        """Chunks, 1 where logits are there whole."""
        return -(-self.rows // self.at_once)


def loss_chunks(config: Config, degrees: Degrees, on_gpu: bool) -> LossChunks:
    """Return them: whole where others want logits, a pipeline's schedule or a distillation."""
    rows, width = tokens_of(config, degrees), config.model.padded_vocab_size // degrees.tp
    whole = degrees.pp > 1 or config.distil is not None
    kind = "cuda" if on_gpu else "cpu"
    return LossChunks(rows, width, rows if whole else rows_at_once(rows, config.model.hidden_size, width, kind))
