"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for the blocks' matrices, AdamW for all else."""

import math
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from lightning_llm.config.schema.base import PositiveFloat
from lightning_llm.config.schema.optim import OPTIMIZERS, Beta, ParameterShard
from lightning_llm.optim.adamw_spec import AdamWFields


@OPTIMIZERS.register
class MuonConfig(AdamWFields):
    """torch.optim.Muon on every matrix of a block; embeddings, head, norms and biases take AdamW.

    Momentum is sharded as its parameter is. A sharded matrix goes to one rank to be orthogonalised, and back.
    """

    name: Literal["muon"] = "muon"
    adamw_learning_rate: PositiveFloat | None = Field(
        None, description="peak learning rate of what AdamW updates; null: learning_rate"
    )
    momentum: Beta = Field(0.95, description="decay of the momentum that is orthogonalised")
    nesterov: bool = Field(True, description="Nesterov's form of it")
    newton_schulz_steps: int = Field(5, ge=1, lt=100, description="iterations that orthogonalise the update")
    adjust_learning_rate: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw", description="how a matrix's shape scales its learning rate"
    )

    @property
    def takes_adamw_rates(self) -> bool:
        return self.adjust_learning_rate == "match_rms_adamw"

    def learning_rate_scale(self, rows: int, columns: int) -> float:
        """Return what the learning rate of a [rows, columns] matrix is multiplied by.

        `match_rms_adamw`: 0.2 sqrt(max(rows, columns)), which gives updates the root mean square of AdamW's, so that
        its learning rate and weight decay serve (Liu et al. 2025, arXiv 2502.16982, eq. 4). `original`:
        sqrt(max(1, rows / columns)) (Jordan et al. 2024), for learning rates about 0.02.
        """
        if self.adjust_learning_rate == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns))

    def state_bytes(self, shard: ParameterShard, dtype_bytes: int) -> int:
        """Return the bytes of a hidden matrix's momentum, or of AdamW's moments."""
        return dtype_bytes * shard.elements if shard.role == "hidden" else super().state_bytes(shard, dtype_bytes)

    def exchanged_bytes(self, shard: ParameterShard) -> int:
        """Return the bytes of a hidden matrix's update, which is orthogonalised in bf16."""
        return 2 * shard.elements if shard.role == "hidden" else 0

    def build(self, parameters: Iterable[tuple[str, Any]], on_whole: Any) -> Any:
        from lightning_llm.optim.muon import Muon

        return Muon(parameters, self, on_whole)
