"""Bytes per parameter of the training state, by formula: needs neither torch nor a model."""

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_llm.config.schema.optim import AlgorithmConfig, OptimConfig, ParameterShard
from lightning_llm.config.schema.precision import PrecisionConfig

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class StateBytes:
    """Bytes by kind. Step counts, one number per tensor, and delayed scaling's histories are left out."""

    parameters: int
    gradients: int
    optimizer: int
    """The training algorithm's state, too."""

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint: gradients are not in it."""
        return self.parameters + self.optimizer


def state_bytes(
    shards: Iterable[ParameterShard], optim: OptimConfig, algorithm: AlgorithmConfig, recipe: PrecisionConfig
) -> StateBytes:
    """Return the bytes of the state of `shards`, padding included, that train by `optim` under `recipe`."""
    master, held = DTYPE_BYTES[recipe.master_dtype], list(shards)
    compensation = master if recipe.update.rounding == "kahan" else 0
    elements = sum(shard.elements for shard in held)
    return StateBytes(
        parameters=master * elements,
        gradients=DTYPE_BYTES[recipe.main_grad_dtype] * elements,
        optimizer=sum(
            optim.state_bytes(shard, master) + algorithm.state_bytes(shard, master) + compensation * shard.elements
            for shard in held
        ),
    )
