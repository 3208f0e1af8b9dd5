"""Lightning's view of training: LightningModule (model, optimizer, step) and DataModule (batch n of the corpus)."""

import math
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_llm.base.folders import use_short_sockets
from lightning_llm.config.schema import Config
from lightning_llm.data.corpus import Batch, Corpus, ValidationBatch
from lightning_llm.data.tokens.tokenizer import Tokenizer
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.flops import flops_per_token
from lightning_llm.parallel.apply import InitialSlice
from lightning_llm.parallel.gathered_logits import GatheredLogits
from lightning_llm.parallel.pp import PipelinedDecoder
from lightning_llm.plan.memory.units import micro_batches_per_rank
from lightning_llm.precision.cast.kernel_cache import tally
from lightning_llm.precision.linear.swap import EMULATED
from lightning_llm.precision.native.decide import Decision
from lightning_llm.train.distillation import Distillation
from lightning_llm.train.loggers import RecordLogger
from lightning_llm.train.parallel_model import ParallelModel
from lightning_llm.train.quantization import LossScaler, Quantization
from lightning_llm.train.spikes import SpikePolicy
from lightning_llm.train.step import TrainState, TrainStep
from lightning_llm.train.validation import Validation

HIGH_FIRST_LOSS = 1.0
"""A first loss this many nats above ln(vocabulary) is reported; every shipped init stays below 0.75."""


class LanguageModule(pl.LightningModule):
    """LightningModule of a run: next-token prediction with a `Decoder`; one batch is one optimizer step (`train_step`).

    It uses Lightning's manual optimization. Callbacks read `step_record` in on_train_batch_end and may add
    measurements; `validation_record` is complete in on_validation_end. The numbers of both are in
    `trainer.callback_metrics`: a step's from on_train_batch_end on, a validation's from on_validation_epoch_end on.
    Values that callbacks `log` are added to the records. `ended_early`: see `EarlyEnd`.
    """

    model: Decoder
    parallel: ParallelModel
    train_step: TrainStep
    validation: Validation

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        source_names: list[str],
        decision: Decision = EMULATED,
        initial: InitialSlice | None = None,
        distillation: Distillation | None = None,
    ):
        """`initial`: source of the initial weights; None: drawn from the seed, or loaded afterwards."""
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        self.initial = initial
        self.distillation = distillation  # not an nn.Module, so teachers' parameters are not parameters of this module
        self.tokenizer = tokenizer
        self.source_names = source_names
        self.step_tokens = config.data.global_batch_size * config.data.sequence_length
        self.flops_per_token = float(flops_per_token(config.model, config.data.sequence_length))
        self.quantization = Quantization(config.precision, config.seed, config.trainer.max_steps, decision)
        self.scaler = LossScaler(config.precision.loss_scaling)
        self.spikes = SpikePolicy(config.spikes)
        self.state = TrainState(self.step_tokens)
        self.validation_record: dict[str, Any] = {}
        self.ended_early: dict[str, Any] | None = None

    def configure_model(self) -> None:
        """Build the decoder for the strategy's layout: on the meta device, with quantized linears, then sharded."""
        if hasattr(self, "model"):
            return
        layout, device = self.trainer.strategy.layout, self.trainer.strategy.root_device
        self.parallel = ParallelModel.build(self.config, layout, device, self.quantization, self.initial)
        self.model = self.parallel.model
        self.quantization.watch_overflow(self.model)
        self.validation = Validation(self.parallel, self.source_names, self.config.data.watched, device)

    @property
    def device(self) -> torch.device:
        """Device of the parameters. Lightning does not move them, so it does not know."""
        device: torch.device = self.trainer.strategy.root_device
        return device

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.train_step = TrainStep.build(
            self.config,
            self.parallel,
            self.state,
            self.scaler,
            self.spikes,
            before_zero_grad=lambda optimizer: self._call_hooks("on_before_zero_grad", optimizer),
            on_gradients=[self._call_gradient_hooks],
            distillation=self.distillation,
        )
        strategy = self.trainer.strategy
        self.train_step.vote, self.train_step.agree = strategy.vote, strategy.agree
        return self.train_step.optimizer

    def on_fit_start(self) -> None:
        if self.trainer.is_global_zero and (line := self.quantization.describe()):
            print(line, flush=True)

    def on_train_start(self) -> None:
        data = self.config.data
        base_is_scored = self.config.model.init_from is not None and data.validation.fraction > 0
        if (data.watched or base_is_scored) and not self.completed_steps:  # the baseline for later validations
            validate_now(self.trainer)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the (frozen) batch with its tensors on `device`."""
        return batch.to(device, non_blocking=True)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Make one optimizer step; return its loss, fp32, the mean over the step's target tokens."""
        loss = self.train_step(batch)
        if (kernels := tally.take()) and self.trainer.is_global_zero:
            print(f"casts  {kernels}", flush=True)
        if self.completed_steps == 1 and self.initial is None:
            self._judge_first_loss()
        set_global_step(self.trainer, self.completed_steps)
        self._publish(self.step_record)
        return {"loss": loss}

    def _judge_first_loss(self) -> None:
        """Print a note if the first loss is far above that of equal logits: the initial weights are too large."""
        model = self.config.model
        uniform = math.log(model.vocab_size)
        excess = self.step_record["loss"] - uniform
        if not excess > HIGH_FIRST_LOSS:
            return
        self.step_record["loss_above_uniform"] = excess
        if self.trainer.is_global_zero:
            print(
                f"note   the first loss is {self.step_record['loss']:.3f}, and equal logits have "
                f"ln(model.vocab_size) = {uniform:.3f}: the initial weights are too large. Lower "
                f"model.init_std={model.init_std:g}, or choose another model.init than {model.init}",
                flush=True,
            )

    def _call_gradient_hooks(self, loss: Tensor) -> None:
        # A step has many backward passes, and a pipeline interleaves them with forward passes: all have run by now.
        self._call_hooks("on_before_backward", loss)
        self._call_hooks("on_after_backward")
        self._call_hooks("on_before_optimizer_step", self.train_step.optimizer)

    def _call_hooks(self, name: str, *arguments: Any) -> None:
        """Call a hook of the callbacks and this module as Lightning does in automatic optimization."""
        call._call_callback_hooks(self.trainer, name, *arguments)
        call._call_lightning_module_hook(self.trainer, name, *arguments)

    @property
    def completed_steps(self) -> int:
        """Optimizer steps since the first start, including those before resumes."""
        return self.state.completed_steps

    @property
    def micro_batch_losses(self) -> Tensor:
        """Share of each global micro-batch in the last step's loss, fp32 [micro-batches], the same on every rank."""
        return self.state.micro_batch_losses

    @property
    def step_record(self) -> dict[str, Any]:
        """Metrics of the step in progress, or of the last one."""
        return self.state.record

    @step_record.setter
    def step_record(self, record: dict[str, Any]) -> None:
        self.state.record = record

    @property
    def copied_parameters(self) -> list[torch.nn.Parameter]:
        """Parameters of this rank that another pipeline stage also holds and counts."""
        return self.parallel.copied_parameters

    @property
    def whole_model(self) -> GatheredLogits | PipelinedDecoder:
        """Model that returns logits of tokens on every rank, whatever part of the decoder the rank holds."""
        return self.parallel.whole

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self.model.training:
            raise RuntimeError("the model is in evaluation mode within a training step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.completed_steps == self.config.trainer.max_steps:
            self.trainer.should_stop = True  # the last step; when asked to stop, Lightning validates once more

    def on_validation_epoch_start(self) -> None:
        self.validation.begin()

    def validation_step(self, batch: ValidationBatch, batch_idx: int) -> None:
        """Add this batch's losses to the running sums."""
        self.validation.add(batch, batch_idx, self.completed_steps)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        # Not in on_validation_epoch_end: callbacks run it earlier, and need the loss and the sharded parameters there.
        if batch_idx + 1 == self.trainer.num_val_batches[dataloader_idx]:
            step = self.completed_steps
            self.validation_record = {"step": step, "tokens": step * self.step_tokens, **self.validation.finish()}
            self._publish(self.validation_record)

    def _publish(self, record: dict[str, Any]) -> None:
        """Add the numbers of `record` to `trainer.callback_metrics`."""
        numbers = {
            key: torch.tensor(value, dtype=torch.float64)
            for key, value in record.items()
            if isinstance(value, int | float) and key not in ("step", "tokens")
        }
        self.trainer.callback_metrics.update(numbers)
        self.trainer.logged_metrics.update(numbers)

    def log(self, name: str, value: Any, *args: Any, logger: bool | None = None, **kwargs: Any) -> None:
        """Log a number from a callback: to `trainer.callback_metrics` and the record of the step or validation."""
        super().log(name, value, *args, logger=False, **kwargs)
        if logger is not False and isinstance(self.trainer.logger, RecordLogger):
            self.trainer.logger.expect(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """Return a module with copies of only the parameters, with the same names and sharding.

        WeightAveraging copies the whole module to store averages, which modules sharded by FSDP2 do not allow.
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


def set_completed_steps(trainer: Any, steps: int) -> None:
    """Set Lightning's counters to `steps` completed ones when a run resumes, so that max_steps counts all steps.

    The loader starts at batch `steps` by itself, so the counters of the current epoch stay at zero. If the loops' full
    state were restored, Lightning would guess what was in progress when the checkpoint was written.
    """
    loop = trainer.fit_loop.epoch_loop
    batches = loop.batch_progress.total
    batches.ready = batches.started = batches.processed = batches.completed = steps
    loop._batches_that_stepped = steps  # the step number of values that callbacks log themselves
    set_global_step(trainer, steps)


def set_global_step(trainer: Any, steps: int) -> None:
    """Set `trainer.global_step` to `steps`, after each step.

    In manual optimization Lightning counts calls of its wrapper around the optimizer, but a step with a skipped update
    has none, and other training algorithms may have several.
    """
    updates = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
    updates.ready = updates.completed = steps


def validate_now(trainer: Any) -> None:
    """Run a validation before the first step, in the way Lightning's training loop validates between steps."""
    loop, connector = trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector
    trainer.validating = True
    first = connector._first_loop_iter
    loop.run()
    trainer.training = True
    connector._first_loop_iter = first


WORKERS_ON_CUDA = 2
"""Number of loader processes that prefetch batches when training on a GPU."""


class StepDataset(Dataset[Batch]):
    """Dataset whose item number `step` is this rank's batch of optimizer step `step` (0-based).

    Batches are a pure function of config and seed.
    """

    def __init__(self, corpus: Corpus, micro_batches: list[int]):
        """`micro_batches`: global indices of the micro-batches that this rank computes in every step."""
        self.corpus, self.micro_batches = corpus, micro_batches

    def __getitem__(self, step: int) -> Batch:
        return self.corpus.micro_batches(step, self.micro_batches)


class StepSampler(Sampler[int]):
    """Sampler of step numbers from `first` up to, but not including, `last`."""

    def __init__(self, first: int, last: int):
        self.first, self.last = first, last

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last))

    def __len__(self) -> int:
        return max(0, self.last - self.first)


class CorpusDataModule(pl.LightningDataModule):
    """DataModule of a run: a training batch per step, from the step where the run starts, and fixed validation
    batches."""

    def __init__(self, corpus: Corpus, config: Config):
        super().__init__()
        self.corpus = corpus
        self.config = config

    def train_dataloader(self) -> DataLoader[Batch]:
        first = self.trainer.lightning_module.completed_steps
        layout = self.trainer.strategy.layout
        count = micro_batches_per_rank(self.config, layout.degrees)
        workers = self.config.data.num_workers
        if workers is None:
            workers = WORKERS_ON_CUDA if self._on_cuda else 0
        if workers:
            use_short_sockets()
        return DataLoader(
            StepDataset(self.corpus, layout.micro_batches(count)),
            batch_size=None,
            sampler=StepSampler(first, self.config.trainer.max_steps),
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=self._on_cuda,
        )

    def val_dataloader(self) -> Any:
        layout = self.trainer.strategy.layout
        batches = self.corpus.validation_batches(self.config.data.micro_batch_size, layout.dp_rank, layout.degrees.dp)
        fixed: Any = list(batches)
        return DataLoader(fixed, batch_size=None, pin_memory=self._on_cuda)

    @property
    def _on_cuda(self) -> bool:
        return bool(self.trainer.strategy.root_device.type == "cuda")
