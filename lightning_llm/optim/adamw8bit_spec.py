"""AdamW with both moments in 8 bits (Dettmers et al. 2022, arXiv 2110.02861): 2 bytes per parameter, and scales."""

import math
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from lightning_llm.config.schema.base import PositiveInt
from lightning_llm.config.schema.optim import OPTIMIZERS, ParameterShard
from lightning_llm.optim.adamw_spec import AdamWFields


@OPTIMIZERS.register
class AdamW8bitConfig(AdamWFields):
    """Block-wise 8-bit moments of the matrices of blocks and head; embeddings, norms and biases keep theirs whole.

    Embeddings do so in the paper, too (section 2.3). A block is `block_size` neighbours within a row of the whole
    matrix, the last of a row being shorter, so that shards of rows hold whole blocks whatever the layout.
    """

    name: Literal["adamw8bit"] = "adamw8bit"
    block_size: PositiveInt = Field(256, description="elements of a row that share one scale")

    def state_bytes(self, shard: ParameterShard, dtype_bytes: int) -> int:
        """Return two bytes per element and two fp32 scales per block, or the bytes of AdamW's moments."""
        if shard.role not in ("hidden", "head"):
            return super().state_bytes(shard, dtype_bytes)
        return 2 * shard.elements + 2 * 4 * shard.rows * -(-shard.columns // self.block_size)

    def shard_problem(self, columns: int, parts: int) -> str | None:
        """Return what is wrong where parts of a row would end within a block."""
        part, rest = divmod(columns, parts)
        if parts == 1 or rest or part % self.block_size == 0:
            return None
        return (
            f"of {columns} / {parts} = {part} elements, no multiple of optim.block_size={self.block_size}: a block "
            f"would lie on two ranks. Set optim.block_size={math.gcd(part, self.block_size)}"
        )

    def build(self, parameters: Iterable[tuple[str, Any]], on_whole: Any) -> Any:
        from lightning_llm.optim.adamw8bit import AdamW8bit

        return AdamW8bit(parameters, self)
