"""Config groups `parallel`, `trainer`, `spikes`, `checkpoint`, `run`, `logger`, `launcher`, `cluster` and `distil`.

Figures of a cluster are per device. `plan.cluster` rejects combinations of figures that cannot be.
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
"""What a block recomputes in its backward pass."""


class ParallelConfig(Group):
    """`parallel`: how one step is spread over ranks."""

    name: str = Field(description="the file it was composed from, or your own name")
    dp_replicate: RankCount | None = Field(1, description="data-parallel groups that each hold all shards")
    dp_shard: RankCount | None = Field(1, description="data-parallel ranks that share one copy; null: the rest")
    cp: RankCount | None = Field(1, description="ranks that share a sequence")
    tp: RankCount | None = Field(1, description="ranks that share each weight's computation")
    pp: RankCount | None = Field(1, description="ranks that each hold some of the layers: a pipeline")
    sequence_parallel: bool = Field(
        True, description="with tp: norms and residuals hold a tp-th part of the tokens (arXiv 2205.05198)"
    )
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"] = Field(
        "1f1b", description="the order of micro-batches in the pipeline; `train` refuses the zero-bubble ones"
    )
    virtual_stages: PositiveInt = Field(1, description="pipeline stages per rank, for interleaved_1f1b")
    zero_stage: Literal[0, 1, 2, 3] = Field(
        0, description="what dp_shard shards: 1 the optimizer, 2 also gradients, 3 also parameters"
    )
    reduction: Literal["auto", "tree", "native"] = Field(
        "auto",
        description="how gradients are summed: tree to the same bits on any number of ranks, native by the library; "
        "auto: tree within a machine, and over several where one all-to-all sends no more; else native",
    )
    activation_checkpoint: Checkpointing = Field(
        "none", description="full: recompute blocks in the backward pass; selective: all but GEMMs and attention"
    )
    activation_checkpoint_every: PositiveInt = Field(1, description="full and selective: only every n-th block")
    activation_checkpoint_layers: Annotated[tuple[Checkpointing, ...], Field(strict=False)] | None = Field(
        None, description="what each block recomputes, a word per block; null: as the two keys above have it"
    )
    compile: bool | None = Field(
        None, description="torch.compile, one graph per kind of block; null: on CUDA, not on a CPU"
    )
    timeout_seconds: float = Field(1800.0, gt=0, le=31_536_000, description="how long a rank waits for its peers")

    def checkpointing_of(self, index: int) -> Checkpointing:
        """Return what block `index` recomputes, counted from 0 over all stages."""
        if self.activation_checkpoint_layers is not None:
            return self.activation_checkpoint_layers[index]
        return "none" if index % self.activation_checkpoint_every else self.activation_checkpoint


class TrainerConfig(Group):
    """`trainer`: how long, on what, and how often to look."""

    name: str = Field(description="the file it was composed from, or your own name")
    max_steps: PositiveInt = Field(description="optimizer steps; 20e9tokens: as many as come nearest to that")
    accelerator: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where there is a device")
    devices: ThreadCount = Field(1, description="ranks on this machine")
    validate_every_steps: PositiveInt | None = Field(
        description="optimizer steps between validations; null: at the end only"
    )
    compile: bool | None = Field(None, description="what parallel.compile takes unless set itself")
    deterministic: bool = Field(
        False, description="refuse kernels whose sums depend on timing: a run on CUDA repeats bit for bit, more slowly"
    )
    attention_kernel: Literal["auto", "flash", "flex", "cudnn", "efficient", "math", "short"] = Field(
        "auto",
        description="of softmax attention; auto: torch's choice, on CPU short up to 512 tokens, on CUDA flex for masks "
        "in compiled blocks; refused if not had",
    )
    threads: ThreadCount | None = Field(None, description="CPU threads per rank; null: torch's choice")
    max_time: str | None = Field(
        None, description="how long one start may take, HH:MM:SS or DD:HH:MM:SS: it then saves, and ends with 75"
    )
    max_restarts: int = Field(
        0,
        ge=0,
        le=1000,
        description="how often ranks here that are lost are started again, from the newest checkpoint",
    )
    health: bool = Field(
        False,
        description="check numbers and speed of all ranks for some seconds before training; refuse what is no good",
    )

    @field_validator("max_time")
    @classmethod
    def _is_time(cls, max_time: str | None) -> str | None:
        if max_time is not None:
            seconds_of(max_time)
        return max_time


class SpikesConfig(Group):
    """`spikes`: when a step is out of the ordinary, and what is done about it. Reasons: `conf/spikes/default.yaml`."""

    name: str = Field("default", description="the file it was composed from, or your own name")
    policy: Literal["log", "skip", "rollback", "stop"] = Field(
        "log",
        description="log: say so; skip: leave the update of a spike or non-finite step out; rollback: go back to the "
        "checkpoint before it and leave its samples out; stop: save and end",
    )
    window_steps: int = Field(128, ge=32, description="steps that the usual loss and its noise are taken from")
    level_steps: int = Field(16, ge=8, description="steps that the present level is taken from")
    loss_threshold: PositiveFloat = Field(7.0, description="a spike's rise over the level, in sigmas of the loss")
    grad_norm_threshold: PositiveFloat = Field(12.0, description="the same for the logarithm of the gradient norm")
    loss_noise_floor: PositiveFloat = Field(0.01, description="least sigma of the loss, nats")
    grad_norm_noise_floor: PositiveFloat = Field(0.1, description="least sigma of the logarithm of the gradient norm")
    shift_slack: PositiveFloat = Field(1.0, description="CUSUM: sigmas over the usual loss that a step has for free")
    shift_limit: PositiveFloat = Field(10.0, description="CUSUM: the sum at which the level has shifted, in sigmas")
    divergence_share: Fraction = Field(0.5, description="share of what was learned whose loss is called divergence")
    max_consecutive_skips: PositiveInt = Field(8, description="policy=skip: updates left out in a row before it ends")
    max_rollbacks: PositiveInt = Field(3, description="policy=rollback: how often a run may go back before it ends")
    rollback_skip_steps: PositiveInt = Field(
        2, description="policy=rollback: steps whose samples are left out, the one it goes back for and those before it"
    )

    @model_validator(mode="after")
    def _window_holds_levels(self) -> Self:
        if 2 * self.level_steps > self.window_steps:
            raise ValueError(
                f"window_steps {self.window_steps} must be at least twice level_steps {self.level_steps}: nothing is "
                "judged before"
            )
        return self


class CheckpointConfig(Group):
    """`checkpoint`: when the whole state is written, and how much of it is kept."""

    every_steps: PositiveInt | None = Field(description="optimizer steps between checkpoints; null: at the end only")
    keep_last: PositiveInt = Field(description="how many of the newest checkpoints stay")
    keep_every: PositiveInt | None = Field(None, description="each step that is a multiple of it stays; null: none")
    keep_best: PositiveInt | None = Field(None, description="how many of the lowest val_loss stay; null: none")
    asynchronous: bool | None = Field(
        None, description="write while training goes on, from copies on the CPU; null: on CUDA, not on a CPU"
    )


class RunConfig(Group):
    """`run`: where a run's folder lies."""

    root: str = Field(description="folder of all runs and of mlflow.db")
    experiment: str = Field(description="folder of runs that belong together, and MLflow's experiment")
    name: str = Field(description="the run's own folder in it")
    dir: str = Field(description="this run's folder, whole")


class LoggerConfig(Group):
    """`logger`: where runs are tracked beside their own folder."""

    name: Literal["mlflow", "csv", "tensorboard", "wandb", "none"] = Field(description="what runs are tracked by")
    tracking_uri: str | None = Field(None, description="mlflow: null: MLFLOW_TRACKING_URI, else run.root/mlflow.db")
    tags: dict[str, str] = Field({}, description="mlflow: tags of the run")
    project: str | None = Field(None, description="wandb: null: run.experiment")
    offline: bool = Field(True, description="wandb: write to the run's folder alone")


OF_SLURM = ("cluster", "partition", "account", "qos", "constraint", "setup", "container")
OF_EITHER = ("cpus_per_task", "gpus_per_node", "memory_gb")


class LauncherConfig(Group):
    """`launcher`: where the jobs of a sweep (`train -m`) run, and with `ray` the ranks of one run, too."""

    name: Literal["local", "slurm", "ray"] = Field(
        "local", description="processes here, Slurm arrays by submitit, or ranks that Ray places"
    )
    at_once: PositiveInt = Field(1, description="jobs that run at the same time")
    address: str | None = Field(
        None, description="of Ray: HOST:PORT, or auto; null: RAY_ADDRESS, else a Ray of this machine alone is started"
    )
    cluster: Literal["slurm", "local"] = Field("slurm", description="local: try a submission without Slurm")
    partition: str | None = Field(None, description="Slurm's --partition")
    account: str | None = Field(None, description="Slurm's --account")
    qos: str | None = Field(None, description="Slurm's --qos")
    constraint: str | None = Field(None, description="Slurm's --constraint")
    timeout_minutes: PositiveInt = Field(
        1440, description="after which Slurm ends a job; how long ranks wait for Ray to have room"
    )
    cpus_per_task: PositiveInt | None = Field(
        None, description="CPU cores per job, of each machine; null: Slurm's default, with Ray one per rank"
    )
    gpus_per_node: PositiveInt | None = Field(
        None, description="GPUs per job, of each machine; null: none asked of Slurm, of Ray one per rank on CUDA"
    )
    memory_gb: PositiveInt | None = Field(None, description="per node")
    setup: list[str] = Field([], description="Slurm: shell lines before the job, say to load modules")
    container: str | None = Field(
        None, description="image in which srun starts the ranks of a `plan --script` (pyxis); null: none"
    )

    def idle_keys(self) -> dict[str, str]:
        """Return {key: launchers that it has an effect with} of keys that are set and have none with this launcher."""
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
"""10^12 FLOP/s: from what one thread emulates to more than any device has; `plan.cluster` asks the data sheet."""
Microseconds = Annotated[float, Field(ge=0, le=1e6)]


class LinkConfig(Group):
    """What joins a device to others: in one direction, with all its links together."""

    gb_per_second: Bandwidth = Field(description="10^9 bytes per second that a device sends")
    latency_microseconds: Microseconds = Field(description="what one hop of a collective takes, however few its bytes")


class ClusterConfig(Group):
    """Machines of equal devices, and what joins these within a machine and between machines."""

    name: str = Field(description="the file it was composed from, or your own name")
    hardware: Hardware = Field(description="the device: whose peaks and memory `plan` takes, as hardware= does")
    devices_per_node: ThreadCount = Field(description="devices, and so ranks, of a machine")
    memory_gb_per_second: Bandwidth = Field(description="10^9 bytes per second that a device reads or writes")
    within_node: LinkConfig = Field(description="between devices of a machine")
    between_nodes: LinkConfig = Field(description="between machines, a device's share")
    devices_per_package: ThreadCount = Field(1, description="devices that share a package, closer than others")
    within_package: LinkConfig | None = Field(None, description="between those; null: as within the machine")
    start_microseconds: Microseconds = Field(description="what a collective takes before its first hop")
    operator_microseconds: Microseconds = Field(
        0.0, description="what an operator takes beside its bytes and FLOPs; 0 where a queue of kernels hides it"
    )
    overlap: bool = Field(True, description="whether collectives run beside computation, where the code lets them")
    peak_tflops: dict[Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp4"], Tflops] | None = Field(
        None, description="measured GEMM speed by format, 10^12 FLOP/s; null: the data sheet's of `hardware`"
    )


class DistilConfig(Group):
    """Knowledge distillation (Hinton et al. 2015, arXiv 1503.02531) from one teacher, or from an ensemble of them.

    The loss of a token is `(1 - weight) CE(label) + weight temperature^2 KL(teachers || student)`, both distributions
    at the temperature. `loss` and `val_loss` stay the cross entropy of the labels; the divergence is `distil_kl`.
    """

    teachers: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = Field(
        description="runs, checkpoints, imported or Hugging Face folders of the student's vocabulary"
    )
    weight: Fraction = Field(1.0, description="share of the teachers in the loss; the rest is the next tokens'")
    temperature: PositiveFloat = Field(1.0, description="divides the logits of both in the divergence")
    combine: Literal["probabilities", "logits"] = Field(
        "probabilities", description="what the mean is taken of, where there are several teachers"
    )
