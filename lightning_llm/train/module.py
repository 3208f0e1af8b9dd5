"""The LightningModule: one model, its loss, and the record of each step. When to do what is the strategy's."""

from dataclasses import fields, replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_llm.data.tokenizer import Tokenizer
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.flops import flops_per_token
from lightning_llm.model.init import initialise
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.optim.optimizer import build_optimizer
from lightning_llm.optim.schedule import learning_rate_factor
from lightning_llm.parallel.apply import apply_parallel
from lightning_llm.parallel.grad_norm import clip_gradients
from lightning_llm.schema import Config

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LanguageModule(pl.LightningModule):
    """Next-token prediction with a `Decoder`.

    Observers read `step_record` during on_train_batch_end and may add what they measure; `validation_record` is
    complete in on_validation_end. `completed_steps` counts optimizer steps since the very start, over all resumes.
    """

    model: Decoder

    def __init__(self, config: Config, tokenizer: Tokenizer, source_names: list[str]):
        super().__init__()
        self.config = config
        self.tokenizer = tokenizer
        self.source_names = source_names
        self.step_tokens = config.data.global_batch_size * config.data.sequence_length
        self.flops_per_token = float(flops_per_token(config.model, config.data.sequence_length))
        self.completed_steps = 0
        self.step_record: dict[str, Any] = {}
        self.validation_record: dict[str, Any] = {}
        self._validation_sums: Tensor | None = None

    def configure_model(self) -> None:
        """Build on the meta device, reshape, then materialise every parameter from (seed, name)."""
        if hasattr(self, "model"):
            return
        with torch.device("meta"):
            model = Decoder(self.config.model, compute_dtype=COMPUTE_DTYPES[self.config.precision.compute_dtype])
        apply_parallel(model.blocks, self.config.parallel)
        model.to_empty(device=self.trainer.strategy.root_device)
        initialise(model, self.config.seed)
        self.model = model

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.model.named_parameters(), self.config.optim)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the (frozen) batch with its tensors on `device`."""
        tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
        moved = {name: value.to(device, non_blocking=True) for name, value in tensors.items() if value is not None}
        return replace(batch, **moved)

    def training_step(self, tokens: Tensor, labels: Tensor, document_ids: Tensor | None) -> Tensor:
        """Return the fp32 sum of the losses of one micro-batch: tokens, labels and document ids are [B, T]."""
        return next_token_loss_sum(self.model(tokens, document_ids=document_ids), labels)

    def learning_rate(self) -> float:
        """Return the learning rate of the update after `completed_steps`."""
        factor = learning_rate_factor(self.config.schedule, self.completed_steps, self.config.trainer.max_steps)
        return self.config.optim.learning_rate * factor

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
        """Clip to optim.gradient_clip_norm and record the norm from before; Lightning's own arguments stay unset."""
        parameters: list[nn.Parameter] = list(self.model.parameters())
        self.step_record["grad_norm"] = clip_gradients(parameters, self.config.optim.gradient_clip_norm)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: the strategy zeroes before its forward passes. Here it would wipe the gradients just made."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self.model.training:
            raise RuntimeError("the model is in evaluation mode within a training step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.completed_steps == self.config.trainer.max_steps:
            self.trainer.should_stop = True  # the last step; asked to stop, Lightning validates once more

    def on_validation_epoch_start(self) -> None:
        self._validation_sums = torch.zeros(len(self.source_names), 2, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Add this batch's loss sums and target counts, per source, to the running ones."""
        logits = self.model(batch.tokens, document_ids=batch.document_ids)  # [B, T, V]
        for source in batch.sources.unique():
            labels = batch.labels.masked_fill((batch.sources != source)[:, None], -100)  # [B, T]
            self._validation_sums[source, 0] += next_token_loss_sum(logits, labels).double()
            self._validation_sums[source, 1] += (labels != -100).sum()

    def on_validation_epoch_end(self) -> None:
        sums = self.trainer.strategy.reduce(self._validation_sums, reduce_op="sum").cpu()
        step = self.completed_steps
        record = {
            "step": step,
            "tokens": step * self.step_tokens,
            "val_loss": (sums[:, 0].sum() / sums[:, 1].sum()).item(),
        }
        for name, (loss, count) in zip(self.source_names, sums.tolist(), strict=True):
            if count:
                record[f"val_loss/{name}"] = loss / count
        self.validation_record = record
