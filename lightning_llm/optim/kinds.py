"""Optimizers, schedules and training algorithms that a config chooses, and bytes of training state. Imports no torch.

`adamw`: Loshchilov & Hutter 2019. `adamw8bit`: Dettmers et al. 2022, arXiv 2110.02861. `muon`: Jordan et al. 2024,
kellerjordan.github.io/posts/muon.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, ClassVar, Literal

from pydantic import Field

from lightning_llm.config.schema.base import PositiveFloat, PositiveInt
from lightning_llm.config.schema.optim import (
    ALGORITHMS,
    OPTIMIZERS,
    SCHEDULES,
    AlgorithmConfig,
    Beta,
    OptimConfig,
    ParameterShard,
    ScheduleConfig,
)
from lightning_llm.config.schema.precision import PrecisionConfig


class AdamWFields(OptimConfig):
    """Base config of optimizers that use AdamW for all or some parameters: its keys and the bytes of its moments."""

    rounds_weights: ClassVar[bool] = True

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
    """torch.optim.AdamW for every parameter."""

    module: ClassVar[str] = "lightning_llm.optim.optimizer:adamw"
    name: Literal["adamw"] = "adamw"
    umup_depth: PositiveInt | None = Field(
        None,
        description="number of layers: u-muP's learning rates for AdamW (arXiv 2407.17465), times 1 / sqrt(inputs) "
        "for matrices but the head, and times 1 / sqrt(umup_depth) within blocks; null: one rate",
        exclude_if=lambda depth: depth is None,  # configs from before the key keep their hash
    )


@OPTIMIZERS.register
class AdamW8bitConfig(AdamWFields):
    """AdamW with block-wise 8-bit moments for matrices of blocks and head; embeddings, norms and biases use full
    precision.

    So do embeddings in the paper (section 2.3). A block is `block_size` neighbors within a row of the whole matrix (the
    last of a row may be shorter), so that shards of rows contain whole blocks under every layout.
    """

    module: ClassVar[str] = "lightning_llm.optim.adamw8bit:AdamW8bit"
    name: Literal["adamw8bit"] = "adamw8bit"
    block_size: PositiveInt = Field(256, description="elements of a row that share one scale")

    def state_bytes(self, shard: ParameterShard, dtype_bytes: int) -> int:
        """Return two bytes per element and two fp32 scales per block, or the bytes of AdamW's moments."""
        if shard.role not in ("hidden", "head"):
            return super().state_bytes(shard, dtype_bytes)
        return 2 * shard.elements + 2 * 4 * shard.rows * -(-shard.columns // self.block_size)

    def shard_problem(self, columns: int, parts: int) -> str | None:
        """Return the problem if `parts` of a row would end within a block, else None."""
        part, rest = divmod(columns, parts)
        if parts == 1 or rest or part % self.block_size == 0:
            return None
        return (
            f"of {columns} / {parts} = {part} elements, not a multiple of optim.block_size={self.block_size}: a block "
            f"would lie on two ranks. Set optim.block_size={math.gcd(part, self.block_size)}"
        )


@OPTIMIZERS.register
class MuonConfig(AdamWFields):
    """torch.optim.Muon on every matrix of a block; embeddings, head, norms and biases take AdamW.

    Momentum is sharded as its parameter is. A sharded matrix goes to one rank to be orthogonalised, and back.
    """

    module: ClassVar[str] = "lightning_llm.optim.muon:Muon"
    name: Literal["muon"] = "muon"
    adamw_learning_rate: PositiveFloat | None = Field(
        None, description="peak learning rate of the parameters that AdamW updates; null: learning_rate"
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
        """Return the factor of the learning rate of a [rows, columns] matrix.

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
        return resolve_name(self.module)(parameters, self, on_whole)


def learning_rate_factor(config: ScheduleConfig, updates: int, max_steps: int) -> float:
    """Return the factor of `optim.learning_rate` for the update after `updates` previous ones.

    Warm-up is linear, to `config.peak`, and its first update is not zero: (updates + 1) / warmup_steps of that. What
    follows is the schedule's. `config` is `relative_to` the learning rate.
    """
    if updates < config.warmup_steps:
        return config.peak * ((updates + 1) / config.warmup_steps)
    return config.peak * config.after_warmup(updates, config.total_steps or max_steps)


def progress(updates: int, start: int, total: int) -> float:
    """Return how far a decay has come, from 0 (up to `start` updates) to 1 (at the last of `total` updates)."""
    if updates < start:
        return 0.0
    return min(1.0, (updates - start + 1) / max(1, total - start))


@SCHEDULES.register
class ConstantConfig(ScheduleConfig):
    """Constant schedule: the peak learning rate after the warm-up."""

    name: Literal["constant"] = "constant"

    def after_warmup(self, updates: int, total: int) -> float:
        return 1.0


@SCHEDULES.register
class CosineConfig(ScheduleConfig):
    """Cosine schedule from the peak to `floor` at `total_steps` (Loshchilov & Hutter 2017, eq. 5).

    The factor of the peak is f + (1 - f) (1 + cos(pi t)) / 2 with f = `floor` and t from 0 to 1 after the warm-up.
    """

    name: Literal["cosine"] = "cosine"

    def after_warmup(self, updates: int, total: int) -> float:
        falling = (1 + math.cos(math.pi * progress(updates, self.warmup_steps, total))) / 2
        return self.floor + (1 - self.floor) * falling


@SCHEDULES.register
class WSDConfig(ScheduleConfig):
    """Warmup-stable-decay schedule: the peak, then a linear decay to `floor` (MiniCPM: Hu et al. 2024, section 4.2).

    The decay takes the last `decay_fraction` of all updates.
    """

    name: Literal["wsd"] = "wsd"

    def after_warmup(self, updates: int, total: int) -> float:
        start = max(self.warmup_steps, round(total * (1 - self.decay_fraction)))
        return 1 - (1 - self.floor) * progress(updates, start, total)


@ALGORITHMS.register
class SynchronousConfig(AlgorithmConfig):
    """Synchronous training: all ranks update the same weights with the sum of their gradients."""

    module: ClassVar[str] = "lightning_llm.train.step:Synchronous"
    name: Literal["synchronous"] = "synchronous"

    def state_bytes(self, shard: ParameterShard, dtype_bytes: int) -> int:
        return 0

    def build(self, parameters: Iterable[tuple[str, Any]], layout: Any) -> Any:
        return resolve_name(self.module)()


DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the training state. Step counts (one number per tensor) and histories of delayed scaling are left
    out."""

    parameters: int
    gradients: int
    optimizer: int
    """Bytes of the optimizer's state and of the training algorithm's."""

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint, which contains everything but the gradients."""
        return self.parameters + self.optimizer


def state_bytes(
    shards: Iterable[ParameterShard], optim: OptimConfig, algorithm: AlgorithmConfig, recipe: PrecisionConfig
) -> StateBytes:
    """Return the bytes of the training state of `shards`, padding included, with this optimizer, algorithm and
    recipe."""
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
