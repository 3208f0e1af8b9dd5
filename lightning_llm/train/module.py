"""The LightningModule: one model, its loss, and the record of each step. When to do what is the strategy's."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_llm.config.schema import Config
from lightning_llm.data.tokenizer import Tokenizer
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.flops import flops_per_token
from lightning_llm.optim.schedule import learning_rate_factor
from lightning_llm.parallel.apply import DTYPES, apply_parallel
from lightning_llm.parallel.context import SequenceCut
from lightning_llm.parallel.gathered_logits import WholeLogits
from lightning_llm.parallel.grad_norm import clip_gradients
from lightning_llm.parallel.gradient_sync import GradientSync
from lightning_llm.parallel.pipeline import Pipeline, PipelinedDecoder
from lightning_llm.parallel.vocabulary import loss_sum_of
from lightning_llm.parallel.whole_matrices import WholeMatrices
from lightning_llm.plan.units import micro_batches_per_rank
from lightning_llm.precision.native.decide import Decision
from lightning_llm.precision.swap import EMULATED
from lightning_llm.train.health.spike_policy import SpikePolicy
from lightning_llm.train.quantisation import Quantisation
from lightning_llm.train.record_logger import RecordLogger


class LanguageModule(pl.LightningModule):
    """Next-token prediction with a `Decoder`.

    Observers read `step_record` during on_train_batch_end and may add what they measure; `validation_record` is
    complete in on_validation_end. `completed_steps` counts optimizer steps since the very start, over all resumes, and
    `skipped_steps` those of them whose update the loss scaler or `spikes` dropped: they do not advance the schedule.
    `micro_batch_losses` [global micro-batches] are what each contributed to the step's loss, on every rank.
    Both records' numbers are in `trainer.callback_metrics`: a step's from on_train_batch_end on, a validation's from
    on_validation_epoch_end on. What callbacks `log` goes into the records. `ended_early`: `early_end.py`.
    """

    model: Decoder
    gradient_syncs: list[GradientSync]
    pipeline: Pipeline | None = None
    sequence_cut: SequenceCut
    loss_sum: Callable[[Tensor, Tensor], Tensor]
    """The fp32 sum of the losses of this rank's logits [B, T, V] over labels [B, T]."""
    VIEWS = ("val_loss", "val_loss_high_precision")
    """Validation through the recipe's forward pass, and of the same weights without any cast: the second tells damage
    to the weights from error in the forward pass. Recipes that quantise nothing have the first alone."""

    def __init__(self, config: Config, tokenizer: Tokenizer, source_names: list[str], decision: Decision = EMULATED):
        super().__init__()
        self.config = config
        self.tokenizer = tokenizer
        self.source_names = source_names
        self.step_tokens = config.data.global_batch_size * config.data.sequence_length
        self.flops_per_token = float(flops_per_token(config.model, config.data.sequence_length))
        self.quantisation = Quantisation(config.precision, config.seed, config.trainer.max_steps, decision)
        self.spikes = SpikePolicy(config.spikes)
        self.completed_steps = 0
        self.skipped_steps = 0
        self.micro_batch_losses = torch.zeros(0)
        self.step_record: dict[str, Any] = {}
        self.validation_record: dict[str, Any] = {}
        self.ended_early: dict[str, Any] | None = None
        self._validation_sums = torch.zeros(0)

    def configure_model(self) -> None:
        """Build on the meta device, swap linears, then shard and materialise as the strategy's layout says."""
        if hasattr(self, "model"):
            return
        with torch.device("meta"):
            model = Decoder(self.config.model, compute_dtype=DTYPES[self.config.precision.compute_dtype])
        layout, device = self.trainer.strategy.layout, self.trainer.strategy.root_device
        self.quantisation.swap(model, self.config.model.num_layers, device.type, layout.shards)
        precision, length = self.config.precision, self.config.data.sequence_length
        self.sequence_cut, self.loss_sum = SequenceCut(layout), loss_sum_of(layout)
        self.gradient_syncs = apply_parallel(model, layout, precision, self.config.seed, length, device)
        if layout.degrees.pp > 1:
            turns = micro_batches_per_rank(self.config, layout.degrees)
            self.pipeline = Pipeline(self.gradient_syncs, layout, self.config.data, turns, device)
        self.quantisation.watch_overflow(model)
        self.model = model

    @property
    def device(self) -> torch.device:
        """Where the parameters are made and stay: Lightning, which moves none of them here, does not know."""
        device: torch.device = self.trainer.strategy.root_device
        return device

    @property
    def copied_parameters(self) -> list[torch.nn.Parameter]:
        """Parameters of this rank that another pipeline stage holds, too, and counts."""
        return list(self.pipeline.copies) if self.pipeline else []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        hints = self.config.precision.optimizer.model_dump(exclude_none=True)  # a recipe may need its own eps or beta2
        optim, layout = self.config.optim.model_copy(update=hints), self.trainer.strategy.layout
        optimizer: torch.optim.Optimizer = optim.build(self.model.named_parameters(), WholeMatrices(layout))
        return optimizer

    def on_fit_start(self) -> None:
        if self.trainer.is_global_zero and (line := self.quantisation.describe()):
            print(line, flush=True)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the (frozen) batch with its tensors on `device`."""
        tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
        moved = {name: value.to(device, non_blocking=True) for name, value in tensors.items() if value is not None}
        return replace(batch, **moved)

    def training_step(self, tokens: Tensor, labels: Tensor, document_ids: Tensor | None) -> Tensor:
        """Return the fp32 sum of the losses of one micro-batch: tokens, labels and document ids are [B, T]."""
        tokens, labels, positions, document_ids = self.sequence_cut(tokens, labels, document_ids)
        return self.loss_sum(self.model(tokens, positions, document_ids), labels)

    @property
    def whole_model(self) -> WholeLogits | PipelinedDecoder:
        """What gives logits of tokens, on every rank, whatever part of the decoder this rank holds."""
        layout = self.trainer.strategy.layout
        return WholeLogits(self.model, layout) if self.pipeline is None else PipelinedDecoder(self.pipeline)

    def learning_rate_factor(self) -> float:
        """Return by what the next update multiplies every peak learning rate."""
        updates = self.completed_steps - self.skipped_steps
        return learning_rate_factor(self.config.schedule, updates, self.config.trainer.max_steps)

    def open_step_record(self, loss: float, learning_rate: float) -> None:
        """Start the record of the step in progress; `loss` is the mean over the step's target tokens."""
        step = self.completed_steps + 1
        self.step_record = {"step": step, "tokens": step * self.step_tokens, "loss": loss, "lr": learning_rate}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Unscale, clip to optim.gradient_clip_norm, record the norm from before; Lightning's own arguments stay unset.

        Where a gradient overflowed, nothing is clipped and the plugin skips the update; so it does where `spikes` says.

        Raises:
            StepNotMadeError: the loss or the norm is not finite, or spikes.policy ends the run.
        """
        parameters, layout = list(self.model.parameters()), self.trainer.strategy.layout
        plugin = self.trainer.precision_plugin
        if plugin.config is not None:
            self.step_record["loss_scale"] = plugin.loss_scale
        plugin.overflow = plugin.unscale(parameters, layout, self.quantisation.take_overflow())
        limit = None if plugin.overflow else self.config.optim.gradient_clip_norm
        self.step_record["grad_norm"] = clip_gradients(parameters, limit, layout, self.copied_parameters)
        # An overflow is the loss scaler's to cure, as long as it can: the step tells nothing of the run.
        # At the scale's floor it cannot, and the step is judged as any other; its update is not made either way.
        curable = plugin.overflow and plugin.can_back_off
        plugin.skip = curable or self.spikes.judge(self.step_record) or plugin.overflow
        if plugin.skip:
            self.step_record["skipped"] = True
            self.skipped_steps += 1
        self._publish(self.step_record)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: the strategy zeroes before its forward passes. Here it would wipe the gradients just made."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self.model.training:
            raise RuntimeError("the model is in evaluation mode within a training step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.completed_steps == self.config.trainer.max_steps:
            self.trainer.should_stop = True  # the last step; asked to stop, Lightning validates once more

    def on_validation_epoch_start(self) -> None:
        shape = len(self.VIEWS), len(self.source_names), 2
        self._validation_sums = torch.zeros(shape, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Add this batch's loss sums and target counts, per view and source, to the running ones."""
        layout = self.trainer.strategy.layout
        index = batch_idx * layout.degrees.dp + layout.dp_rank  # over all ranks, as a single one would count
        self.quantisation.begin_validation_batch(self.model, self.completed_steps, index)
        self._score(batch, self._validation_sums[0])
        if self.quantisation.changes_forward:
            with self.quantisation.high_precision(self.model):
                self._score(batch, self._validation_sums[1])
        elif self.config.precision.quantises:
            self._validation_sums[1] = self._validation_sums[0]  # the forward pass is the same one

    def _score(self, batch: Any, sums: Tensor) -> None:
        tokens, all_labels, positions, documents = self.sequence_cut(batch.tokens, batch.labels, batch.document_ids)
        forward = self.pipeline.forward if self.pipeline else self.model
        logits = forward(tokens, positions, documents)  # [B, T, V]
        if logits is None:  # the pipeline's last stage has them
            return
        for source in batch.sources.unique():
            labels = all_labels.masked_fill((batch.sources != source)[:, None], -100)  # [B, T]
            sums[source, 0] += self.loss_sum(logits, labels).double()
            sums[source, 1] += (labels != -100).sum()

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        # Not in on_validation_epoch_end, which callbacks have first: they find the loss there, and the shards in place.
        if batch_idx + 1 == self.trainer.num_val_batches[dataloader_idx]:
            self._finish_validation()

    def _finish_validation(self) -> None:
        # Sums of fp32 numbers of like size are exact in fp64, so the ranks' order does not show.
        layout = self.trainer.strategy.layout
        # All but a pipeline's last stage have zeros; ranks that share a sequence have each some of its tokens.
        sums = layout.reduce(self._validation_sums, ReduceOp.SUM, "dp", "cp", "pp").cpu()
        self.trainer.strategy.reshard()
        step = self.completed_steps
        record: dict[str, Any] = {"step": step, "tokens": step * self.step_tokens}
        for key, view in zip(self.VIEWS, sums, strict=True):
            if view[:, 1].sum() == 0:
                continue
            record[key] = (view[:, 0].sum() / view[:, 1].sum()).item()
            record |= {
                f"{key}/{name}": loss / count
                for name, (loss, count) in zip(self.source_names, view.tolist(), strict=True)
                if count
            }
        self.validation_record = record
        self._publish(record)

    def _publish(self, record: dict[str, Any]) -> None:
        """Put the numbers of `record` where callbacks look for metrics."""
        numbers = {
            key: torch.tensor(value, dtype=torch.float64)
            for key, value in record.items()
            if isinstance(value, int | float) and key not in ("step", "tokens")
        }
        self.trainer.callback_metrics.update(numbers)
        self.trainer.logged_metrics.update(numbers)

    def log(self, name: str, value: Any, *args: Any, logger: bool | None = None, **kwargs: Any) -> None:
        """Log a number from a callback: `trainer.callback_metrics` has it, and the record of the step or validation."""
        super().log(name, value, *args, logger=False, **kwargs)
        if logger is not False and isinstance(self.trainer.logger, RecordLogger):
            self.trainer.logger.expect(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """Return a module that holds copies of the parameters alone, under their names, sharded as they are.

        WeightAveraging copies the whole module to have a place for averages; what FSDP2 has sharded forbids that.
        """
        copy = torch.nn.Module()
        for name, parameter in self.named_parameters():
            node = copy
            *path, last = name.split(".")
            for part in path:
                if part not in node._modules:
                    node.add_module(part, torch.nn.Module())
                node = node.get_submodule(part)
            node.register_parameter(last, torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
        return copy
