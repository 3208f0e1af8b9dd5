"""The strategy owns the step: one Lightning batch is one optimizer step of micro-batches, whatever the layout."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lightning_llm.data.corpus import Batch
from lightning_llm.optim.optimizer import initialise_state
from lightning_llm.parallel.fully_shard import reshard
from lightning_llm.parallel.layout import Layout
from lightning_llm.train.checkpoint.state import restore
from lightning_llm.train.progress import set_completed_steps


class TrainStrategy(ModelParallelStrategy):
    """Every layout's strategy. Ranks are started, and their process group joined, before the Trainer exists.

    Lightning's loop calls training_step, zero_grad and backward in that order. Forward and backward of all
    micro-batches happen in `training_step` (a pipeline's schedule runs both in one call), so `backward` only fires the
    hooks around it and the module's zero_grad does nothing.
    """

    def __init__(self, layout: Layout, device: torch.device, environment: ClusterEnvironment, resume_from: Any = None):
        """`device` is this rank's; `resume_from` the `Checkpoint` that the run continues from, or None."""
        super().__init__()
        self.layout = layout
        self.resume_from = resume_from
        self._asked_to_stop = self._agreed_to_stop = 0
        self._peak_rates: list[float] = []
        self._device = device
        self.cluster_environment = environment

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        return self._device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks that share a micro-batch share the data."""
        return {"num_replicas": self.layout.degrees.dp, "rank": self.layout.dp_rank}

    def _configure_launcher(self) -> None:
        """Have none: ranks are torch.distributed.run's, or Slurm's."""

    def setup_environment(self) -> None:
        if self.accelerator is None:
            raise RuntimeError("the Trainer connects an accelerator before it sets the environment up")
        self.accelerator.setup_device(self.root_device)

    def set_world_ranks(self) -> None:
        """Tell Lightning's rank-zero helpers who this is; the environment knows by itself."""
        rank_zero_only.rank = self.global_rank

    def setup(self, trainer: Any) -> None:
        if self.accelerator is None:
            raise RuntimeError("the Trainer connects an accelerator before it sets the strategy up")
        self.accelerator.setup(trainer)
        self.setup_optimizers(trainer)
        self._peak_rates = [group["lr"] for group in self.optimizers[0].param_groups]  # a checkpoint has the last ones
        initialise_state(self.optimizers[0])
        if self.resume_from is not None:
            module = self.lightning_module
            module.completed_steps = restore(self.resume_from, module, self.optimizers[0], self.precision_plugin)
            set_completed_steps(trainer, module.completed_steps)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Run forward and backward of every micro-batch; return the mean loss over the step's target tokens, fp32."""
        module, optimizer = self.lightning_module, self.optimizers[0]
        factor = module.learning_rate_factor()
        for group, peak in zip(optimizer.param_groups, self._peak_rates, strict=True):
            group["lr"] = peak * factor
        optimizer.zero_grad(set_to_none=True)
        module.quantisation.begin_step(module.model, module.completed_steps)
        loss = self._accumulate(batch)
        module.open_step_record(loss.item(), module.config.optim.learning_rate * factor)
        return {"loss": loss}

    def _accumulate(self, batch: Batch) -> Tensor:
        """Return the step's loss, the same on every rank: micro-batches are gathered before they are summed."""
        module = self.lightning_module
        targets = self.layout.reduce((batch.labels != -100).sum(), dist.ReduceOp.SUM).clamp(min=1)
        losses = self._pipelined(batch, targets) if module.pipeline else self._in_turn(batch, targets)
        for sync in module.gradient_syncs:
            sync.finish()
        if module.pipeline:
            module.pipeline.finish()
        self._agree_on_stop()
        losses = self.layout.reduce(losses, dist.ReduceOp.SUM, "cp")
        module.micro_batch_losses = self.layout.gather_micro_batches(losses)
        return module.micro_batch_losses.sum()

    def _in_turn(self, batch: Batch, targets: Tensor) -> Tensor:
        """Run one micro-batch after the other; return the share of each in the step's loss, [A]."""
        module, losses = self.lightning_module, []
        (sync,) = module.gradient_syncs
        count = batch.tokens.shape[0]
        for turn, index in enumerate(self.layout.micro_batches(count)):
            last = turn == count - 1
            sync.before_backward(turn, last)
            module.quantisation.begin_micro_batch(module.model, module.completed_steps, index)
            documents = batch.document_ids[turn] if batch.document_ids is not None else None
            loss = module.training_step(batch.tokens[turn], batch.labels[turn], documents) / targets
            (loss * self.precision_plugin.loss_scale).backward()
            sync.after_backward(turn, last)
            module.quantisation.end_micro_batch(module.model, self._largest_amax)
            losses.append(loss.detach())
        return torch.stack(losses)

    def _pipelined(self, batch: Batch, targets: Tensor) -> Tensor:
        """Run all micro-batches through the pipeline's schedule; return the share of each in the step's loss, [A]."""
        module = self.lightning_module
        indices = self.layout.micro_batches(batch.tokens.shape[0])

        def begin(stage: torch.nn.Module, turn: int) -> None:
            module.quantisation.begin_micro_batch(stage, module.completed_steps, indices[turn])

        def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
            share: Tensor = module.loss_sum(logits, labels) / targets
            return share

        scale = self.precision_plugin.loss_scale
        losses: Tensor = module.pipeline.step(batch.tokens, batch.labels, batch.document_ids, begin, loss_of, scale)
        return losses

    def run_again(self, batch: Batch) -> None:
        """Repeat forward and backward of the step in progress, leaving its gradients: to look into one that failed."""
        self.optimizers[0].zero_grad(set_to_none=True)
        self.lightning_module.quantisation.undo_step()
        self._accumulate(batch)

    def ask_to_stop(self, signal_number: int) -> None:
        """Note that this rank was sent a signal; all ranks stop after the same step."""
        self._asked_to_stop = signal_number

    @property
    def stop_signal(self) -> int:
        """The signal that all ranks have agreed to stop for, 0 if none; equal on every rank between two steps."""
        return self._asked_to_stop if self.layout.mesh is None else self._agreed_to_stop

    def _agree_on_stop(self) -> None:
        if self.layout.mesh is None:
            return
        flag = torch.tensor(self._asked_to_stop, device=self.root_device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        self._agreed_to_stop = int(flag.item())

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Take the step through the precision plugin, then set the delayed scales of the next one."""
        module = self.lightning_module
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        module.quantisation.end_step(module.model, self._largest_amax)
        module.completed_steps += 1
        return result

    def _largest_amax(self, amax: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks that hold the same layers."""
        return self.layout.reduce(amax, dist.ReduceOp.MAX, "dp", "cp", "tp")

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Fire the hooks around backward, which has run already."""
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def reshard(self) -> None:
        """Give back parameters that forward passes without a backward left gathered: after validating or sampling."""
        for sync in self.lightning_module.gradient_syncs:
            reshard(sync.model)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return `tensor` reduced over the data-parallel ranks; `reduce_op` is "sum", "mean" or a ReduceOp."""
        if not isinstance(tensor, Tensor):
            return tensor
        mean = reduce_op in ("mean", "avg", dist.ReduceOp.AVG)
        op = dist.ReduceOp.SUM if mean or reduce_op == "sum" else reduce_op
        reduced = self.layout.reduce(tensor, op)
        return reduced / self.layout.degrees.dp if mean else reduced

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any, decide so: of the whole world, whatever its axes."""
        flag = torch.tensor(int(decision), device=self.root_device)
        if dist.is_initialized():
            dist.all_reduce(flag, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(flag.item())

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Refuse to gather the model for a checkpoint in Lightning's format.

        Raises:
            RuntimeError: always; it is what trainer.save_checkpoint asks for first.
        """
        raise RuntimeError(
            "trainer.save_checkpoint writes what resume cannot read. Set checkpoint.every_steps; a callback's "
            "state_dict is saved with each checkpoint, and the last step's is always made"
        )

    def teardown(self) -> None:
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
