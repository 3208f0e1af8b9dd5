"""One optimizer step, from a batch to an update of the weights, under every layout and precision recipe.

`TrainStep.__call__` is the whole step, top to bottom. All its dependencies are passed in, and it does not depend on
Lightning: `module.py` creates it and calls it once per batch. An `Algorithm` may change the weights after the update.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_llm.config.schema import Config
from lightning_llm.data.corpus import Batch
from lightning_llm.linalg.grouped import mark_stacks
from lightning_llm.model.loss import IGNORED_LABEL, LossReduction
from lightning_llm.optim.optimizer import LearningRate
from lightning_llm.parallel.grad_norm import clip_gradients, gradient_norm
from lightning_llm.parallel.pp import Pipeline
from lightning_llm.parallel.whole_matrices import WholeMatrices
from lightning_llm.train.distillation import RECORD, Distillation
from lightning_llm.train.parallel_model import ParallelModel
from lightning_llm.train.quantization import LossScaler
from lightning_llm.train.routing import Routing
from lightning_llm.train.spikes import SpikePolicy
from lightning_llm.train.weight_rounding import WeightRounding

_library = torch.library.Library("lightning_llm", "FRAGMENT")
_library.define("read_numbers(Tensor[] values) -> float[]")


def _read_numbers(values: Sequence[Tensor]) -> list[float]:
    numbers: list[float] = torch.stack([value.detach().double() for value in values]).tolist()
    return numbers


_library.impl("read_numbers", _read_numbers, "CompositeExplicitAutograd")
READ_NUMBERS: Any = torch.ops.lightning_llm.read_numbers.default
"""A custom operator, so that `dry_run.counting` counts it as one operation of a step."""


def read_numbers(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Return scalar tensors of one device as {name: float}, converted to fp64, in one read.

    Every read waits for all work queued on the device, so a step reads all of its numbers at once.
    """
    return dict(zip(values, READ_NUMBERS(list(values.values())), strict=True)) if values else {}


@dataclass
class TrainState:
    """Progress of a run and metrics of its newest step, the same on every rank. A checkpoint stores the counts."""

    step_tokens: int
    """Number of tokens of one step, over all ranks."""
    completed_steps: int = 0
    """Optimizer steps since the first start, including those before resumes."""
    skipped_steps: int = 0
    """Completed steps without an update, skipped by the loss scaler or `spikes`: they do not advance the schedule."""
    skipped_in_a_row: int = 0
    """Consecutive skipped updates up to the last step; 0 after an update."""
    record: dict[str, Any] = field(default_factory=dict)
    """Metrics of the step in progress, or of the last one: a line of metrics.jsonl."""
    micro_batch_losses: Tensor = field(default_factory=lambda: torch.zeros(0))
    """Contribution of each global micro-batch to the step's loss, [micro-batches], fp32."""

    @property
    def updates(self) -> int:
        """Number of updates of the weights."""
        return self.completed_steps - self.skipped_steps

    def open_record(self, learning_rate: float) -> dict[str, Any]:
        """Start the record of the next step and return it; its `loss` is None until the step has read it."""
        step = self.completed_steps + 1
        self.record = {"step": step, "tokens": step * self.step_tokens, "loss": None, "lr": learning_rate}
        return self.record

    def count_step(self, skipped: bool) -> None:
        """Count the step in progress as completed; `skipped`: without an update."""
        self.completed_steps += 1
        self.skipped_steps += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0


class Algorithm(Protocol):
    """Protocol of training algorithms: changes of the weights after each optimizer update, and their state.

    Local-update methods are examples: DiLoCo's outer step every H inner steps (Douillard et al. 2023, arXiv
    2311.08105), or Streaming DiLoCo's of one fragment at a time, overlapped with its communication (arXiv 2501.18512).
    The config class chooses the axes over which gradients are summed in every step (`AlgorithmConfig.summed_axes`).
    """

    def after_update(self, step: int, record: dict[str, Any]) -> None:
        """Act on the weights after the inner update of step number `step`, from 1, in place, without gradients.

        Called on every rank in every completed step, including skipped ones, so collectives are allowed. Add values to
        log to the step's `record`.
        """

    def tensors(self) -> dict[str, Tensor]:
        """Return the state tensors by layout-independent names, sharded like the parameters they belong to.

        A checkpoint saves these tensors and loads into them, so the same names must exist before the first step. Wait
        for pending communication first.
        """

    def numbers(self) -> dict[str, Any]:
        """Return the remaining state as JSON data, the same on every rank."""

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Restore the result of `numbers`, after the tensors have been loaded."""


class Synchronous:
    """Synchronous training as an `Algorithm`: changes nothing after the optimizer's update and keeps no state."""

    def after_update(self, step: int, record: dict[str, Any]) -> None:
        """Do nothing."""

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def numbers(self) -> dict[str, Any]:
        return {}

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Do nothing."""


@dataclass
class TrainStep:
    """One optimizer step as a callable: gradients of all micro-batches are summed over ranks and update the weights."""

    parallel: ParallelModel
    optimizer: torch.optim.Optimizer
    algorithm: Algorithm
    learning_rate: LearningRate
    scaler: LossScaler
    spikes: SpikePolicy
    clip_norm: float | None
    """Largest global gradient norm; None: no clipping."""
    state: TrainState
    before_zero_grad: Callable[[], None]
    """Called while the gradients of the previous step still exist."""
    on_gradients: list[Callable[[Tensor], None]]
    """Functions called in turn with the step's loss, between reduction and update. Gradients are then those of the
    whole step, times the loss scale and not clipped. They may be changed, identically on all ranks that hold them."""
    vote: Callable[[], dict[str, Tensor]] = dict
    """Collective. Named integers, identical on all ranks, fetched to the host together with the step's metrics."""
    agree: Callable[[dict[str, int]], None] = lambda votes: None
    """Called with these integers before the update."""
    distillation: Distillation | None = None
    """Distillation objective; None trains on the next-token loss only."""
    routing: Routing | None = None
    """Counts and biases of the routers of experts; None: no such metrics."""

    @classmethod
    def build(
        cls,
        config: Config,
        parallel: ParallelModel,
        state: TrainState,
        scaler: LossScaler,
        spikes: SpikePolicy,
        before_zero_grad: Callable[[torch.optim.Optimizer], None],
        on_gradients: list[Callable[[Tensor], None]],
        distillation: Distillation | None = None,
    ) -> "TrainStep":
        """Return the step over `parallel` with the optimizer, schedule and algorithm of `config`."""
        hints = config.precision.optimizer.model_dump(exclude_none=True)  # a recipe may need its own eps or beta2
        named = [(name, each) for name, each in parallel.model.named_parameters() if each.requires_grad]
        mark_stacks(parallel.model)
        optimizer: torch.optim.Optimizer = config.optim.model_copy(update=hints).build(
            named, WholeMatrices(parallel.layout)
        )
        if (rounding := config.precision.update.rounding) != "even":
            written: Any = optimizer
            optimizer = written.with_rounding(WeightRounding(rounding, named, config.seed, lambda: state.updates))
        schedule = config.schedule.relative_to(config.optim.learning_rate)
        return cls(
            parallel=parallel,
            optimizer=optimizer,
            algorithm=config.chosen_algorithm.build(named, parallel.layout),
            learning_rate=LearningRate(optimizer, schedule, config.trainer.max_steps),
            scaler=scaler,
            spikes=spikes,
            clip_norm=config.optim.gradient_clip_norm,
            state=state,
            before_zero_grad=lambda: before_zero_grad(optimizer),
            on_gradients=on_gradients,
            distillation=distillation,
            routing=Routing(parallel.decoders, config.model, parallel.layout),
        )

    def __call__(self, batch: Batch) -> Tensor:
        """Make one step on this rank's micro-batches [A, B, T]; return its mean loss over target tokens, fp32.

        Raises:
            StepNotMadeError: the loss or the gradient norm is not finite, or spikes.policy ends the run. Weights,
                moments and counts are those of the previous step.
        """
        state, model, layout = self.state, self.parallel.model, self.parallel.layout
        quantization = self.parallel.quantization
        rate = self.learning_rate.set(state.updates)
        self.before_zero_grad()
        self.optimizer.zero_grad(set_to_none=True)
        quantization.begin_step(model, state.completed_steps)

        with quantization.weights_held(model):
            losses = self._forward_backward(batch)
        self._reduce_gradients()
        loss = self._reduce_losses(losses)
        record, auxiliary = state.open_record(rate), self._reduce_auxiliary_losses() | self._reduce_divergences()
        auxiliary |= {} if self.routing is None else self.routing.figures()
        for act in self.on_gradients:
            act(loss)

        parameters = list(model.parameters())
        found = self.scaler.unscale(parameters, layout, quantization.take_overflow())
        norm = gradient_norm(parameters, layout, self.parallel.copied_parameters)
        judged = layout.reduce(norm.clone(), dist.ReduceOp.MAX, *layout.left_out) if layout.left_out else norm
        overflow = self._read({"loss": loss, **auxiliary, "grad_norm": judged}, found)
        if not overflow and self.clip_norm is not None:
            clip_gradients(parameters, record["grad_norm"] if judged is norm else norm.item(), self.clip_norm)

        skipped = self._is_skipped(record, overflow)
        if skipped:
            record["skipped"] = True
        else:
            self.optimizer.step()
            if self.routing is not None:
                self.routing.update_biases()
        self.algorithm.after_update(state.completed_steps + 1, record)
        self.scaler.update(overflow)
        quantization.end_step(model, self._largest_amax)
        state.count_step(skipped)
        return loss

    def repeat(self, batch: Batch) -> None:
        """Repeat forward and backward of the step in progress and keep the gradients, to diagnose a failed step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.parallel.quantization.undo_step()
        self._forward_backward(batch)
        self._reduce_gradients()

    def _forward_backward(self, batch: Batch) -> Tensor:
        """Run forward and backward of all micro-batches; return their contributions to the step's loss, [A], fp32."""
        if self.distillation is not None:
            self.distillation.begin_step()
        if self.routing is not None:
            self.routing.begin_step()
        targets = (batch.labels != IGNORED_LABEL).sum()
        layout, degrees = self.parallel.layout, self.parallel.layout.degrees
        targets = layout.reduce(targets, dist.ReduceOp.SUM, *layout.summed).clamp(min=1)
        means = len(batch.tokens) * degrees.over("data", "sequence", "width") // layout.sums
        for decoder in self.parallel.decoders:
            decoder.auxiliary.begin_step(1 / means, self.scaler.scale)
        if (pipeline := self.parallel.pipeline) is None:
            return self._run_micro_batches(batch, targets)
        return self._run_pipeline(pipeline, batch, targets)

    def _run_micro_batches(self, batch: Batch, targets: Tensor) -> Tensor:
        """Run the micro-batches one after another, without a pipeline."""
        parallel, model, quantization = self.parallel, self.parallel.model, self.parallel.quantization
        (sync,), losses = parallel.syncs, []
        indices = parallel.layout.micro_batches(len(batch.tokens))
        at_once = parallel.layout.micro_batches_at_once(len(batch.tokens))
        for micro_batch, index in enumerate(indices):
            last = micro_batch == len(indices) - 1
            sync.before_backward(micro_batch, last)
            quantization.begin_micro_batch(model, self.state.completed_steps, index, at_once[micro_batch])
            documents = batch.document_ids[micro_batch] if batch.document_ids is not None else None
            whole = batch.tokens[micro_batch], batch.labels[micro_batch], documents
            tokens, labels, positions, documents = parallel.sequence_sharder(*whole)
            learned, loss = self._losses(tokens, labels, positions, documents, targets)
            losses.append(loss)
            (learned * self.scaler.scale).backward()
            sync.after_backward(micro_batch, last)
            quantization.end_micro_batch(model, self._largest_amax)
        return torch.stack(losses)

    def _losses(
        self, tokens: Tensor, labels: Tensor, positions: Tensor | None, documents: Tensor | None, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (objective, detached cross-entropy) of one micro-batch, both divided by the step's target tokens."""
        model, loss_sum, distil = self.parallel.model, self.parallel.loss_sum, self.distillation
        if distil is None:  # logits are needed for the loss only
            scale = torch.full_like(targets, self.scaler.scale, dtype=torch.float32) / targets
            loss = model(tokens, positions, documents, LossReduction(labels, loss_sum, scale)) / targets
            return loss, loss.detach()
        taught = distil.targets(tokens, documents)
        logits = model(tokens, positions, documents)
        loss = loss_sum(logits, labels) / targets
        return distil.loss(loss, logits, taught, labels, targets), loss.detach()

    def _run_pipeline(self, pipeline: Pipeline, batch: Batch, targets: Tensor) -> Tensor:
        """Run all micro-batches through the pipeline's schedule."""
        indices = self.parallel.layout.micro_batches(len(batch.tokens))
        at_once = self.parallel.layout.micro_batches_at_once(len(batch.tokens))

        def begin(stage: torch.nn.Module, micro_batch: int) -> None:
            places = indices[micro_batch], at_once[micro_batch]
            self.parallel.quantization.begin_micro_batch(stage, self.state.completed_steps, *places)

        def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
            return self.parallel.loss_sum(logits, labels) / targets

        return pipeline.step(batch.tokens, batch.labels, batch.document_ids, begin, loss_of, self.scaler.scale)

    def _reduce_gradients(self) -> None:
        """Reduce gradients over ranks, as far as the backward passes have not done so."""
        for sync in self.parallel.syncs:
            sync.finish()
        if self.parallel.pipeline is not None:
            self.parallel.pipeline.finish()

    def _reduce_losses(self, losses: Tensor) -> Tensor:
        """Return the step's loss, the same on every rank, because micro-batches are gathered before they are summed."""
        layout = self.parallel.layout
        losses = layout.gather_micro_batches(layout.reduce(losses, dist.ReduceOp.SUM, "sequence"))
        self.state.micro_batch_losses = losses / layout.sums if layout.sums > 1 else losses
        return self.state.micro_batch_losses.sum()

    def _read(self, figures: dict[str, Tensor], overflow: Tensor | None) -> bool:
        """Add `figures` to the record; return whether any rank saw an overflow.

        This is the only place in a step where the host waits for the device; the following decisions need the values.
        """
        votes = self.vote()
        numbers = read_numbers(figures | votes | ({} if overflow is None else {"overflow": overflow}))
        self.agree({name: int(numbers.pop(name)) for name in votes})
        seen = bool(numbers.pop("overflow", 0.0))
        norm = numbers.pop("grad_norm")
        self.state.record.update(numbers, **self.scaler.describe(), grad_norm=norm)
        return seen

    def _is_skipped(self, record: dict[str, Any], overflow: bool) -> bool:
        """Return whether the update is skipped, the same on all ranks; raise if the run must end.

        An overflow of gradients is skipped without judging the step, because a smaller loss scale may fix it. A loss
        that is not finite, or an overflow at the minimum scale, is judged like any other step, because a smaller scale
        cannot fix it. The update of an overflow is skipped in any case.
        """
        if overflow and self.scaler.can_back_off and math.isfinite(record["loss"]):
            return True
        return self.spikes.judge(record) or overflow

    def _reduce_auxiliary_losses(self) -> dict[str, Tensor]:
        """Return the step's auxiliary losses for its record, the same on every rank. Collective."""
        layout, decoders = self.parallel.layout, self.parallel.decoders
        if not (names := decoders[0].auxiliary.names):
            return {}
        zero = torch.zeros((), device=next(self.parallel.model.parameters()).device)
        own = [sum((each.auxiliary.sums.get(name, zero) for each in decoders), start=zero) for name in names]
        total = layout.reduce(torch.stack(own), dist.ReduceOp.SUM, "dp", "sequence", "width", "layers") / layout.sums
        return {f"auxiliary/{name}": value for name, value in zip(names, total, strict=True)}

    def _reduce_divergences(self) -> dict[str, Tensor]:
        """Return the divergence from the teachers for the step's record, summed like losses."""
        if self.distillation is None:
            return {}
        layout = self.parallel.layout
        return {RECORD: layout.gather_micro_batches(self.distillation.divergences()).sum() / layout.sums}

    def _largest_amax(self, amax: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks that hold the same layers."""
        return self.parallel.layout.reduce(amax, dist.ReduceOp.MAX, "dp", "sequence", "width")
