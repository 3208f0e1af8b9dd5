"""Bytes of what training keeps of every parameter, by formula: neither torch nor a model is needed."""

from dataclasses import dataclass

from lightning_llm.config.schema.precision import PrecisionConfig

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MOMENTS = 2
"""Tensors that AdamW keeps of each parameter, in the parameter's shape and dtype."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes by kind. AdamW's step counts, one number per tensor, and delayed scaling's histories are left out."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint: gradients are not in it."""
        return self.parameters + self.optimizer


def state_bytes(parameters: int, recipe: PrecisionConfig) -> StateBytes:
    """Return the bytes of the state of so many `parameters`, padding included, that trains under `recipe`."""
    master = DTYPE_BYTES[recipe.master_dtype]
    return StateBytes(
        parameters=master * parameters,
        gradients=DTYPE_BYTES[recipe.main_grad_dtype] * parameters,
        optimizer=MOMENTS * master * parameters,
    )
