"""Config groups `parallel`, `trainer`, `spikes`, `checkpoint`, `run`, `logger`, `launcher`, `cluster` and `distil`.

Figures of a cluster are per device. `plan.cluster` rejects impossible combinations.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from lightning_llm.base.signals import seconds_of
from lightning_llm.config.schema.base import Fraction, Group, PositiveFloat, PositiveInt, RankCount, ThreadCount

Hardware = Literal[
    "cpu", "a100", "l4", "l40", "l40s", "rtx4090", "h100", "h200", "gh200", "b200", "gb200", "rtx5090", "mi250x"
]  # fmt: skip
"""Devices that a run can be planned for."""

Checkpointing = Literal["none", "full", "selective"]
"""Recomputation of a block in its backward pass."""


class ParallelConfig(Group):
    """`parallel`: distribution of a step over ranks."""

    name: str = Field(description="the file it was composed from, or your own name")
    dp_replicate: RankCount | None = Field(1, description="data-parallel replicas, each with all shards")
    dp_shard: RankCount | None = Field(
        1, description="data-parallel ranks that shard one copy of the state; null: all remaining ranks"
    )
    cp: RankCount | None = Field(1, description="context-parallel ranks, which split sequences")
    tp: RankCount | None = Field(1, description="tensor-parallel ranks, which split each layer's weights")
    pp: RankCount | None = Field(1, description="pipeline ranks, which split the layers")
    ep: RankCount = Field(
        1,
        description="expert-parallel ranks among those of dp_shard (dp_replicate if that is 1) and cp, which split a "
        "block's experts",
    )
    sequence_parallel: bool = Field(
        True, description="with tp: norms and residuals have 1/tp of the tokens (arXiv 2205.05198)"
    )
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"] = Field(
        "1f1b", description="pipeline schedule; the zero-bubble schedules are not supported by `train`"
    )
    virtual_stages: PositiveInt = Field(1, description="pipeline stages per rank, for interleaved_1f1b")
    zero_stage: Literal[0, 1, 2, 3] = Field(
        0, description="state that dp_shard shards: 1: optimizer, 2: also gradients, 3: also parameters"
    )
    reduction: Literal["auto", "tree", "native"] = Field(
        "auto",
        description="order of gradient sums: tree: the same bits on any number of ranks; native: the library's; "
        "auto: tree within a machine, and between machines if it sends no more bytes; else native",
    )
    activation_checkpoint: Checkpointing = Field(
        "none",
        description="full: recompute whole blocks in the backward pass; selective: all except GEMMs and attention",
    )
    activation_checkpoint_every: PositiveInt = Field(
        1, description="full and selective: apply only to every n-th block"
    )
    activation_checkpoint_layers: Annotated[tuple[Checkpointing, ...], Field(strict=False)] | None = Field(
        None, description="recomputation per block, one entry each; null: set by the two keys above"
    )
    compile: bool | None = Field(None, description="torch.compile, one graph per kind of block; null: only on CUDA")
    timeout_seconds: float = Field(1800.0, gt=0, le=31_536_000, description="seconds a rank waits for its peers")

    def checkpointing_of(self, index: int) -> Checkpointing:
        """Return the recomputation of block `index`, counted from 0 over all stages."""
        if self.activation_checkpoint_layers is not None:
            return self.activation_checkpoint_layers[index]
        return "none" if index % self.activation_checkpoint_every else self.activation_checkpoint


class TrainerConfig(Group):
    """`trainer`: length, devices, validation, restarts."""

    name: str = Field(description="the file it was composed from, or your own name")
    max_steps: PositiveInt = Field(description="optimizer steps; 20e9tokens: the nearest number of steps")
    accelerator: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA if there is a device")
    devices: ThreadCount = Field(1, description="ranks on this machine")
    validate_every_steps: PositiveInt | None = Field(
        description="optimizer steps between validations; null: at the end only"
    )
    compile: bool | None = Field(None, description="default of parallel.compile")
    deterministic: bool = Field(
        False, description="use only deterministic kernels: runs on CUDA repeat bit for bit, but slower"
    )
    attention_kernel: Literal["auto", "flash", "flex", "cudnn", "efficient", "math", "short"] = Field(
        "auto",
        description="kernel of softmax attention; auto: torch's choice, on CPU short up to 512 tokens, on CUDA flex "
        "for masks in compiled blocks; refused if not available",
    )
    threads: ThreadCount | None = Field(None, description="CPU threads per rank; null: torch's choice")
    max_time: str | None = Field(
        None, description="time limit per start, HH:MM:SS or DD:HH:MM:SS; the run then saves and exits with 75"
    )
    max_restarts: int = Field(
        0,
        ge=0,
        le=1000,
        description="number of restarts of lost ranks on this machine, from the newest checkpoint",
    )
    health: bool = Field(
        False,
        description="check numerics and speed of all ranks for some seconds before training; refuse to start on faults",
    )

    @field_validator("max_time")
    @classmethod
    def _is_time(cls, max_time: str | None) -> str | None:
        if max_time is not None:
            seconds_of(max_time)
        return max_time


class SpikesConfig(Group):
    """`spikes`: detection of loss spikes and the response. `conf/spikes/default.yaml` explains the defaults."""

    name: str = Field("default", description="the file it was composed from, or your own name")
    policy: Literal["log", "skip", "rollback", "stop"] = Field(
        "log",
        description="log: report; skip: omit the update of a spike or non-finite step; rollback: go back to the "
        "checkpoint before it and skip its samples; stop: save and end",
    )
    window_steps: int = Field(128, ge=32, description="steps that the typical loss and its noise are estimated from")
    level_steps: int = Field(16, ge=8, description="steps that the current level is estimated from")
    loss_threshold: PositiveFloat = Field(
        7.0, description="minimum rise of a spike over the level, in sigmas of the loss"
    )
    grad_norm_threshold: PositiveFloat = Field(12.0, description="the same for the logarithm of the gradient norm")
    loss_noise_floor: PositiveFloat = Field(0.01, description="minimum sigma of the loss, in nats")
    grad_norm_noise_floor: PositiveFloat = Field(0.1, description="minimum sigma of the logarithm of the gradient norm")
    shift_slack: PositiveFloat = Field(1.0, description="CUSUM: sigmas above the typical loss that do not count")
    shift_limit: PositiveFloat = Field(10.0, description="CUSUM: sum in sigmas that counts as a shift of the level")
    divergence_share: Fraction = Field(
        0.5, description="fraction of the training progress that must be lost to count as divergence"
    )
    max_consecutive_skips: PositiveInt = Field(
        8, description="policy=skip: consecutive skipped updates before the run ends"
    )
    max_rollbacks: PositiveInt = Field(3, description="policy=rollback: number of rollbacks before the run ends")
    rollback_skip_steps: PositiveInt = Field(
        2, description="policy=rollback: number of steps with skipped samples, up to the one that caused it"
    )

    @model_validator(mode="after")
    def _window_holds_levels(self) -> Self:
        if 2 * self.level_steps > self.window_steps:
            raise ValueError(
                f"window_steps={self.window_steps}: must be at least twice level_steps={self.level_steps}, because "
                "nothing is detected before"
            )
        return self


class CheckpointConfig(Group):
    """`checkpoint`: when the full state is saved, and which checkpoints are kept."""

    every_steps: PositiveInt | None = Field(description="optimizer steps between checkpoints; null: at the end only")
    keep_last: PositiveInt = Field(description="number of newest checkpoints to keep")
    keep_every: PositiveInt | None = Field(
        None, description="also keep every step that is a multiple of this; null: none"
    )
    keep_best: PositiveInt | None = Field(
        None, description="also keep this number with the lowest val_loss; null: none"
    )
    asynchronous: bool | None = Field(
        None, description="write during training, from copies in CPU memory; null: only on CUDA"
    )


class RunConfig(Group):
    """`run`: the folder of a run."""

    root: str = Field(description="folder of all runs and of mlflow.db")
    experiment: str = Field(description="folder of related runs, and MLflow's experiment")
    name: str = Field(description="name of the run's folder")
    dir: str = Field(description="full path of the run's folder")


class LoggerConfig(Group):
    """`logger`: tracking of runs in addition to their folder."""

    name: Literal["mlflow", "csv", "tensorboard", "wandb", "none"] = Field(description="tracker")
    tracking_uri: str | None = Field(None, description="mlflow: null: MLFLOW_TRACKING_URI, else run.root/mlflow.db")
    tags: dict[str, str] = Field({}, description="mlflow: tags of the run")
    project: str | None = Field(None, description="wandb: null: run.experiment")
    offline: bool = Field(True, description="wandb: write only to the run's folder")


OF_SLURM = ("cluster", "partition", "account", "qos", "constraint", "setup", "container")
OF_EITHER = ("cpus_per_task", "gpus_per_node", "memory_gb")


class LauncherConfig(Group):
    """`launcher`: where the jobs of a sweep (`train -m`) run; `ray` also places the ranks of a single run."""

    name: Literal["local", "slurm", "ray"] = Field(
        "local", description="local: processes here; slurm: job arrays by submitit; ray: ranks placed by Ray"
    )
    at_once: PositiveInt = Field(1, description="number of jobs that run at the same time")
    address: str | None = Field(
        None, description="Ray's HOST:PORT, or auto; null: RAY_ADDRESS, or else a Ray started on this machine"
    )
    cluster: Literal["slurm", "local"] = Field("slurm", description="local: test a submission without Slurm")
    partition: str | None = Field(None, description="Slurm's --partition")
    account: str | None = Field(None, description="Slurm's --account")
    qos: str | None = Field(None, description="Slurm's --qos")
    constraint: str | None = Field(None, description="Slurm's --constraint")
    timeout_minutes: PositiveInt = Field(
        1440, description="time limit of a Slurm job; time that ranks wait for resources in Ray"
    )
    cpus_per_task: PositiveInt | None = Field(
        None, description="CPU cores per job and machine; null: Slurm's default; with Ray one per rank"
    )
    gpus_per_node: PositiveInt | None = Field(
        None, description="GPUs per job and machine; null: none requested from Slurm; with Ray one per rank on CUDA"
    )
    memory_gb: PositiveInt | None = Field(None, description="memory per machine in GB")
    setup: list[str] = Field([], description="Slurm: shell lines before the job, e.g. to load modules")
    container: str | None = Field(
        None, description="container image for the ranks of `plan --script` (pyxis); null: none"
    )

    def idle_keys(self) -> dict[str, str]:
        """Return {key: launchers that read it} of the keys that are set, but that this launcher does not read."""
        effective = {"address": "ray", **dict.fromkeys(("timeout_minutes", *OF_EITHER), "slurm or ray")}
        effective |= dict.fromkeys(OF_SLURM, "slurm")
        fields = type(self).model_fields
        return {
            key: names
            for key, names in effective.items()
            if self.name not in names.split(" or ") and getattr(self, key) != fields[key].get_default()
        }


Callbacks = dict[str, dict[str, Any] | None]


Bandwidth = Annotated[float, Field(ge=1e-3, le=1e6)]
"""GB/s: from a megabyte to a petabyte per second."""
Tflops = Annotated[float, Field(ge=1e-4, le=1e5)]
"""10^12 FLOP/s: wide limits, from one emulating thread up; `plan.cluster` compares with the data sheet."""
Microseconds = Annotated[float, Field(ge=0, le=1e6)]


class LinkConfig(Group):
    """Speed of a device's links to other devices: all its links together, in one direction."""

    gb_per_second: Bandwidth = Field(description="10^9 bytes per second sent by a device")
    latency_microseconds: Microseconds = Field(description="latency of one hop of a collective")


class ClusterConfig(Group):
    """`cluster`: machines with equal devices, with the speeds of devices and links, for step times in `plan`."""

    name: str = Field(description="the file it was composed from, or your own name")
    hardware: Hardware = Field(description="the device, which sets peaks and memory in `plan`, as hardware= does")
    devices_per_node: ThreadCount = Field(description="devices (and ranks) per machine")
    memory_gb_per_second: Bandwidth = Field(description="memory bandwidth of a device, 10^9 bytes per second")
    within_node: LinkConfig = Field(description="links between the devices of a machine")
    between_nodes: LinkConfig = Field(description="links between machines, per device")
    devices_per_package: ThreadCount = Field(1, description="devices that share a package with faster links")
    within_package: LinkConfig | None = Field(None, description="links within a package; null: as within the machine")
    start_microseconds: Microseconds = Field(description="start-up time of a collective before its first hop")
    operator_microseconds: Microseconds = Field(
        0.0, description="overhead per operator beyond bytes and FLOPs; 0 if a queue of kernels hides it"
    )
    overlap: bool = Field(True, description="whether collectives can overlap with computation")
    peak_tflops: dict[Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp4"], Tflops] | None = Field(
        None, description="measured GEMM peak by format, 10^12 FLOP/s; null: from the data sheet of `hardware`"
    )


class DistilConfig(Group):
    """Knowledge distillation (Hinton et al. 2015, arXiv 1503.02531) from one teacher or an ensemble.

    The loss of a token is `(1 - weight) CE(label) + weight temperature^2 KL(teachers || student)`, with both
    distributions at `temperature`. `loss` and `val_loss` remain the cross entropy of the labels; the divergence is
    logged as `distil_kl`.
    """

    teachers: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = Field(
        description="runs, checkpoints, imported or Hugging Face folders with the student's vocabulary"
    )
    weight: Fraction = Field(1.0, description="weight of the divergence in the loss; the rest is that of next tokens")
    temperature: PositiveFloat = Field(1.0, description="divisor of both models' logits in the divergence")
    combine: Literal["probabilities", "logits"] = Field(
        "probabilities", description="quantity that is averaged over several teachers"
    )
