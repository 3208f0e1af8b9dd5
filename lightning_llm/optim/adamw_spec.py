"""AdamW (Loshchilov & Hutter 2019) for every parameter."""

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from lightning_llm.config.schema.base import PositiveFloat
from lightning_llm.config.schema.optim import OPTIMIZERS, Beta, OptimConfig, ParameterShard


class AdamWFields(OptimConfig):
    """The keys of AdamW, of the optimizers that take it for some parameters, too."""

    beta1: Beta = Field(0.9, description="decay of the mean of gradients")
    beta2: Beta = Field(0.95, description="decay of the mean of squared gradients")
    eps: PositiveFloat = Field(1e-8, description="added to the root of the second moment")

    @property
    def takes_adamw_rates(self) -> bool:
        return True

    def state_bytes(self, shard: ParameterShard, dtype_bytes: int) -> int:
        """Return the bytes of AdamW's two moments, in the parameter's shape and dtype."""
        return 2 * dtype_bytes * shard.elements


@OPTIMIZERS.register
class AdamWConfig(AdamWFields):
    """torch.optim.AdamW."""

    name: Literal["adamw"] = "adamw"

    def build(self, parameters: Iterable[tuple[str, Any]], on_whole: Any) -> Any:
        from lightning_llm.optim.optimizer import adamw

        return adamw(parameters, self)
