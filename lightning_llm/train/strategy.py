"""Lightning's strategy for any `Layout`: ranks, devices, reductions, loading of a checkpoint and requests to stop."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lightning_llm.optim.optimizer import initialise_state
from lightning_llm.parallel.layout import Layout
from lightning_llm.train.checkpoint.manifest import Checkpoint
from lightning_llm.train.checkpoint.restoring import restore
from lightning_llm.train.module import set_completed_steps


class TrainStrategy(ModelParallelStrategy):
    """Lightning strategy of all runs, for any layout. Ranks and their process group exist before the Trainer is
    created."""

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        environment: ClusterEnvironment,
        resume_from: Checkpoint | None,
        own_options: bool = False,
    ):
        """`device`: of this rank. `resume_from`: checkpoint to resume from, None for a new run.

        `own_options`: use the optimizer options of the config instead of the saved ones.
        """
        super().__init__()
        self.layout = layout
        self.resume_from = resume_from
        self.own_options = own_options
        self.save_failed_here: Callable[[], bool] = lambda: False
        """Whether an asynchronous save has failed on this rank."""
        self._asked_to_stop = self._agreed_to_stop = 0
        self._agreed_on_failure = False
        self._device = device
        self.cluster_environment = environment

    @property
    def root_device(self) -> torch.device:
        """Device of this rank."""
        return self._device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks that share a micro-batch share the data."""
        return {"num_replicas": self.layout.degrees.dp, "rank": self.layout.dp_rank}

    def _configure_launcher(self) -> None:
        """Configure no launcher, because torch.distributed.run or Slurm has started the ranks."""

    def setup_environment(self) -> None:
        if self.accelerator is None:
            raise RuntimeError("the Trainer connects an accelerator before it sets the environment up")
        self.accelerator.setup_device(self.root_device)

    def set_world_ranks(self) -> None:
        """Set this rank in Lightning's rank-zero helpers; the environment knows it already."""
        rank_zero_only.rank = self.global_rank

    def setup(self, trainer: Any) -> None:
        if self.accelerator is None:
            raise RuntimeError("the Trainer connects an accelerator before it sets the strategy up")
        self.accelerator.setup(trainer)
        self.setup_optimizers(trainer)
        initialise_state(self.optimizers[0])
        if self.resume_from is not None:
            restore(self.resume_from, self.lightning_module, self.optimizers[0], self.own_options)
            set_completed_steps(trainer, self.lightning_module.completed_steps)

    def ask_to_stop(self, signal_number: int) -> None:
        """Record that this rank has received a signal; all ranks stop after the same step."""
        self._asked_to_stop = signal_number

    @property
    def stop_signal(self) -> int:
        """Signal for which all ranks will stop, 0 if none; equal on every rank between two steps."""
        return self._asked_to_stop if self.layout.mesh is None else self._agreed_to_stop

    @property
    def save_failed(self) -> bool:
        """Whether an asynchronous save has failed on any rank; equal on every rank between two steps."""
        return self.save_failed_here() if self.layout.mesh is None else self._agreed_on_failure

    def vote(self) -> dict[str, Tensor]:
        """Exchange requests to stop and failed saves with all ranks, once in every step. Collective.

        Return {"stop": the signal that any rank has received, or 0; "save_failed": 1 if a save failed on any rank, else
        0} as tensors on the device; pass the numbers to `agree` once they are read. {} for a single rank.
        """
        if self.layout.mesh is None:
            return {}
        here = self._asked_to_stop, int(self.save_failed_here())
        flags = torch.stack([torch.full((), each, device=self.root_device) for each in here])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return {"stop": flags[0], "save_failed": flags[1]}

    def agree(self, votes: Mapping[str, int]) -> None:
        """Take the numbers that `vote` has returned: `stop_signal` and `save_failed` then have them on all ranks."""
        self._agreed_to_stop = votes.get("stop", 0)
        self._agreed_on_failure = bool(votes.get("save_failed", 0))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return `tensor` reduced over the data-parallel ranks; `reduce_op` is "sum", "mean" or a ReduceOp."""
        if not isinstance(tensor, Tensor):
            return tensor
        mean = reduce_op in ("mean", "avg", dist.ReduceOp.AVG)
        op = dist.ReduceOp.SUM if mean or reduce_op == "sum" else reduce_op
        reduced = self.layout.reduce(tensor, op)
        return reduced / self.layout.degrees.dp if mean else reduced

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether `decision` is true on all ranks of the world (`all=True`) or on any of them. Collective."""
        flag = torch.tensor(int(decision), device=self.root_device)
        if dist.is_initialized():
            dist.all_reduce(flag, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(flag.item())

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Reject checkpoints in Lightning's format.

        Raises:
            RuntimeError: always; trainer.save_checkpoint calls this first.
        """
        raise RuntimeError(
            "trainer.save_checkpoint is not supported: resume cannot read its files. Set checkpoint.every_steps; each "
            "checkpoint includes the callbacks' state_dict, and the last step is always saved"
        )

    def teardown(self) -> None:
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
