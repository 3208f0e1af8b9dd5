"""The typed schema of all config groups. Imports neither torch nor Hydra, so that config errors are found fast."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PrivateAttr
from pydantic.fields import FieldInfo

from lightning_llm.config.schema.aliases import ADDED
from lightning_llm.config.schema.base import Group, RankCount
from lightning_llm.config.schema.data import DataConfig
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.config.schema.optim import (
    ALGORITHMS,
    OPTIMIZERS,
    SCHEDULES,
    AlgorithmConfig,
    OptimConfig,
    ScheduleConfig,
)
from lightning_llm.config.schema.precision import PrecisionConfig
from lightning_llm.config.schema.run import (
    Callbacks,
    CheckpointConfig,
    ClusterConfig,
    DistilConfig,
    Hardware,
    LauncherConfig,
    LoggerConfig,
    ParallelConfig,
    RunConfig,
    SpikesConfig,
    TrainerConfig,
)


class Config(Group):
    """The config of one run, the content of `config.yaml`."""

    model: ModelConfig
    data: DataConfig
    optim: Annotated[OptimConfig, OPTIMIZERS]
    schedule: Annotated[ScheduleConfig, SCHEDULES]
    algorithm: Annotated[AlgorithmConfig, ALGORITHMS] | None = Field(
        None, description="a registered training algorithm by `name`, and its keys; null: synchronous"
    )
    distil: DistilConfig | None = Field(
        None, description="distillation from trained teachers; null: train on next tokens only"
    )
    precision: PrecisionConfig
    parallel: ParallelConfig
    trainer: TrainerConfig
    spikes: SpikesConfig = SpikesConfig()
    checkpoint: CheckpointConfig
    callbacks: Callbacks = Field(description="Lightning callbacks, each under a name of your choice; null removes one")
    logger: LoggerConfig
    run: RunConfig
    launcher: LauncherConfig = LauncherConfig()
    recipe: str | None = Field(None, description="the preset in recipes/ that the config was composed with")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of all random numbers")
    resume: str | None = Field(
        None, description="auto: resume from run.dir's newest complete checkpoint; a path: from that checkpoint or run"
    )
    resume_strict: bool = Field(
        False,
        description="refuse to resume if code, versions, device, threads, libraries, flags or variables differ",
    )
    branch_from: str | None = Field(
        None, description="a run or one of its checkpoints/step=N: start a new run from it, with keys changed"
    )
    world: RankCount | None = Field(None, description="total number of ranks, for plan; null: trainer.devices")
    hardware: Hardware | None = Field(
        None,
        description="device that `plan` assumes for native casts and memory; null: this machine's; ignored by `train`",
    )

    # The file of cluster=none is empty.
    cluster: Annotated[ClusterConfig | None, BeforeValidator(lambda given: given or None)] = Field(
        None, description="the machines that `plan` times a step on; null (cluster=none): no times"
    )

    _step_law: Any = PrivateAttr(None)
    """For `plan` to print. Not part of the config, which has the resulting numbers."""

    @property
    def step_law(self) -> Any:
        """The `plan.step_law.StepLaw` if a key is `step_law`; None if all keys are numbers."""
        return self._step_law

    @property
    def planned_hardware(self) -> Hardware | None:
        """The planned device: `hardware`, or else the cluster's; None: this machine's."""
        return self.hardware or (self.cluster.hardware if self.cluster else None)

    @property
    def chosen_algorithm(self) -> AlgorithmConfig:
        """The training algorithm; `synchronous` by default."""
        return self.algorithm or ALGORITHMS.default("synchronous")


def add_degree(name: str, description: str) -> None:
    """Add the degree of a mesh axis to `parallel`. The default 1 is not part of the config hash."""
    if name in ParallelConfig.model_fields:
        return
    degree: Any = RankCount | None
    key: Any = Field(1, description=description)
    ParallelConfig.__pydantic_fields__[name] = FieldInfo.from_annotated_attribute(degree, key)
    ADDED[f"parallel.{name}"] = 1
    for group in (ParallelConfig, Config):  # already built if a config was read before
        if group.__pydantic_complete__:
            group.model_rebuild(force=True)


__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "DistilConfig",
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
    "add_degree",
]
