"""The typed schema of every config group. Imports neither torch nor Hydra, so that a config error costs no start-up."""

from lightning_llm.schema.base import Group, PositiveInt
from lightning_llm.schema.data import DataConfig
from lightning_llm.schema.model import ModelConfig
from lightning_llm.schema.optim import OptimConfig, ScheduleConfig
from lightning_llm.schema.precision import PrecisionConfig
from lightning_llm.schema.run import (
    Callbacks,
    CheckpointConfig,
    LauncherConfig,
    LoggerConfig,
    ParallelConfig,
    RunConfig,
    SpikesConfig,
    TrainerConfig,
)


class Config(Group):
    """One run, whole: what `config.yaml` holds."""

    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    precision: PrecisionConfig
    parallel: ParallelConfig
    trainer: TrainerConfig
    spikes: SpikesConfig = SpikesConfig()
    checkpoint: CheckpointConfig
    callbacks: Callbacks
    logger: LoggerConfig
    run: RunConfig
    launcher: LauncherConfig = LauncherConfig()
    recipe: str | None = None
    seed: int = 0
    resume: str | None = None
    world: PositiveInt | None = None


__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LauncherConfig",
    "LoggerConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RunConfig",
    "ScheduleConfig",
    "SpikesConfig",
    "TrainerConfig",
]
