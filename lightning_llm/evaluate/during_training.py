"""The callback `evaluate`: validation losses and lm-eval tasks every few steps of a run, without changing its bits."""

import logging
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy as np
import torch

from lightning_llm.base.errors import ConfigError
from lightning_llm.callbacks.throughput import Throughput
from lightning_llm.evaluate.request import read_tasks
from lightning_llm.evaluate.validation import losses_as_metrics, standard_errors
from lightning_llm.tracking.evaluations import PREFIX, Metrics, record_evaluation
from lightning_llm.train.validation import Validation

if TYPE_CHECKING:
    from lightning_llm.evaluate.harness import Tasks

log = logging.getLogger(__name__)


class Evaluate(pl.Callback):
    """Callback that evaluates the weights every `every_steps` steps and after the last one.

    It computes validation losses (unless `validation` is false) and runs lm-eval's `tasks`. It adds "eval/NAME" to the
    step's metrics, and writes `evaluation/step=N.json` as `lightning-llm evaluate` does, for `compare --metric
    eval/NAME`. Losses use the recipe's quantized forward pass, as in the run's validation. Tasks run unquantized, on
    `limit` samples each, `batch_size` at a time. Random states and the training mode are restored, so a run has the
    same bits with and without this callback. Collective.
    """

    def __init__(
        self,
        every_steps: int,
        tasks: list[str] | None = None,
        validation: bool = True,
        limit: float | None = None,
        batch_size: int = 8,
    ):
        self.every_steps, self.validation, self.limit, self.batch_size = every_steps, validation, limit, batch_size
        self._tasks = _loaded(tasks or [])

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Evaluate if the completed step is a multiple of `every_steps` or the last one."""
        step = pl_module.completed_steps
        if step % self.every_steps and step != pl_module.config.trainer.max_steps:
            return
        began = time.perf_counter()
        with _restored(trainer, pl_module), torch.no_grad():
            metrics = self._losses(trainer, pl_module) | self._task_results(trainer, pl_module)
        pl_module.step_record |= {f"{PREFIX}{name}": each["value"] for name, each in metrics.items()}
        if trainer.is_global_zero:
            _record(Path(pl_module.config.run.dir), step, metrics)
        for each in trainer.callbacks:
            if isinstance(each, Throughput):
                each.exclude(time.perf_counter() - began)

    def _losses(self, trainer: Any, pl_module: Any) -> Metrics:
        if not self.validation:
            return {}
        config, corpus, layout = pl_module.config, trainer.datamodule.corpus, pl_module.parallel.layout
        device = trainer.strategy.root_device
        validation = Validation(pl_module.parallel, corpus.names, config.data.watched, device)
        validation.begin()
        totals = [validation.sums.clone()]
        batches = corpus.validation_batches(config.data.micro_batch_size, layout.dp_rank, layout.degrees.dp)
        for index, batch in enumerate(batches):
            validation.add(batch.to(device), index, pl_module.completed_steps)
            totals.append(validation.sums.clone())
        losses = validation.finish()
        errors = {}
        if layout.mesh is None:
            errors = standard_errors(torch.stack(totals).diff(dim=0).cpu(), corpus.names, config.data.watched)
        return losses_as_metrics(losses, errors, corpus)

    def _task_results(self, trainer: Any, pl_module: Any) -> Metrics:
        if self._tasks is None:
            return {}
        from lightning_llm.evaluate.harness import OwnModel

        parallel, device = pl_module.parallel, trainer.strategy.root_device
        # A compiled model would be compiled again for every length of a task's texts.
        with parallel.quantization.high_precision(parallel.model), torch.compiler.set_stance("force_eager"):
            own = OwnModel(parallel, pl_module.tokenizer, device, self.batch_size)
            return self._tasks.metrics(own, self.limit)


def _record(folder: Path, step: int, metrics: Metrics) -> None:
    """Write the results; a file that cannot be written is reported and training continues."""
    try:
        record_evaluation(folder, step, metrics, ended=False)
    except (OSError, ValueError) as error:
        log.warning("step %d: the evaluation is in metrics.jsonl only: %s", step, error)


def _loaded(names: Sequence[str]) -> "Tasks | None":
    """Return the tasks, None without any. Raises ConfigError with the argument's name, for `build_callbacks`."""
    if not names:
        return None
    try:
        return read_tasks(names)
    except ConfigError as error:
        raise ConfigError([replace(each, key="tasks") for each in error.problems]) from error


@contextmanager
def _restored(trainer: Any, pl_module: Any) -> Iterator[None]:
    """Set evaluation mode; restore modes and every global random generator afterwards (lm-eval seeds them)."""
    modules = [pl_module, *pl_module.parallel.decoders]
    were = [{module: module.training for module in each.modules()} for each in modules]
    device = trainer.strategy.root_device
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    for each in modules:
        each.eval()
    try:
        yield
    finally:
        for each in were:
            for module, training in each.items():
                module.training = training
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
