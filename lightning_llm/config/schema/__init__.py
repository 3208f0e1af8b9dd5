"""The typed schema of every config group. Imports neither torch nor Hydra, so that a config error costs no start-up."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PrivateAttr
from pydantic.fields import FieldInfo

from lightning_llm.config.schema.base import Group, RankCount
from lightning_llm.config.schema.data import DataConfig
from lightning_llm.config.schema.migrations import ADDED
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
    """One run, whole: what `config.yaml` holds."""

    model: ModelConfig
    data: DataConfig
    optim: Annotated[OptimConfig, OPTIMIZERS]
    schedule: Annotated[ScheduleConfig, SCHEDULES]
    algorithm: Annotated[AlgorithmConfig, ALGORITHMS] | None = Field(
        None, description="name: a registered training algorithm, and its own keys; null: synchronous"
    )
    distil: DistilConfig | None = Field(
        None, description="teachers: models that are there, whose predictions are learned; null: the next tokens are"
    )
    precision: PrecisionConfig
    parallel: ParallelConfig
    trainer: TrainerConfig
    spikes: SpikesConfig = SpikesConfig()
    checkpoint: CheckpointConfig
    callbacks: Callbacks = Field(description="Lightning callbacks by a name of your choice; null leaves one out")
    logger: LoggerConfig
    run: RunConfig
    launcher: LauncherConfig = LauncherConfig()
    recipe: str | None = Field(None, description="the file of recipes/ that the config was composed with")
    seed: int = Field(0, ge=0, lt=2**32, description="of all random numbers; hashed as one 32-bit word")
    resume: str | None = Field(
        None, description="auto: go on where run.dir's newest whole checkpoint is; a path: from that checkpoint or run"
    )
    resume_strict: bool = Field(
        False,
        description="refuse to go on where code, versions, device, threads, libraries, flags or variables are others",
    )
    branch_from: str | None = Field(
        None, description="a run or one of its checkpoints/step=N: go on from there as a run of its own, keys changed"
    )
    world: RankCount | None = Field(None, description="ranks in all, for plan; null: trainer.devices")
    hardware: Hardware | None = Field(
        None,
        description="the device `plan` judges native casts and memory by; null: this machine's. `train` looks itself",
    )

    # The file of cluster=none is empty.
    cluster: Annotated[ClusterConfig | None, BeforeValidator(lambda given: given or None)] = Field(
        None, description="the machines that `plan` times a step on; null (cluster=none): none, and no times"
    )

    _step_law: Any = PrivateAttr(None)
    """For `plan` to print; no part of the config, which holds the numbers."""

    @property
    def step_law(self) -> Any:
        """The `plan.step_law.StepLaw` that a key asked for, None where all were given as numbers."""
        return self._step_law

    @property
    def planned_hardware(self) -> Hardware | None:
        """The device that is planned for: `hardware`, or else the cluster's; None: this machine's."""
        return self.hardware or (self.cluster.hardware if self.cluster else None)

    @property
    def chosen_algorithm(self) -> AlgorithmConfig:
        """The training algorithm, `synchronous` where none is given."""
        return self.algorithm or ALGORITHMS.default("synchronous")


def add_degree(name: str, description: str) -> None:
    """Add the degree of a mesh axis to `parallel`: 1 unless set, and 1 is left out of the config hash."""
    if name in ParallelConfig.model_fields:
        return
    degree: Any = RankCount | None
    key: Any = Field(1, description=description)
    ParallelConfig.__pydantic_fields__[name] = FieldInfo.from_annotated_attribute(degree, key)
    ADDED[f"parallel.{name}"] = 1
    for group in (ParallelConfig, Config):  # built already where a config was read before
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
