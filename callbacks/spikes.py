"""Facts about anomalous steps: their training text, and how far their update moved the weights.

`train/spikes.py` detects these steps and acts on them, with or without this callback.
"""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_llm.linalg import local
from lightning_llm.parallel.grad_norm import global_norm
from lightning_llm.train.spikes import describe_event

log = logging.getLogger(__name__)

EVENTS_FOLDER = "events"
DONE = {"log": "", "skip": "; its update was left out", "stop": "; the run ends", "rollback": "; the run goes back"}


class Spikes(pl.Callback):
    """Adds to the record of a step with an `event`, prints it, and writes its text to `events/step=N.txt`:

    - `update_norm`: 2-norm of the change of all weights, 0 if the update was skipped
    - `event_worst_micro_batch`: the micro-batch with the highest loss, and `event_worst_loss`, its mean loss
    - `event_samples`: [first, last] training sample of the batch, in the format of `data.skip_samples`
    - `event_documents`: source, epoch, first token and first and last training document of each sample, those of the
      worst micro-batch first, at most `max_samples`

    It does nothing on other steps. On steps with an event, weights are copied to the host before the update.
    """

    def __init__(self, max_samples: int = 64):
        self.max_samples = max_samples
        self._before: list[Tensor] = []
        self._hooks: list[Any] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Register a hook on the optimizer's steps."""

        def before(*_: Any) -> None:
            if "event" in pl_module.step_record:
                self._before = [local(each.detach()).to("cpu", copy=True) for each in pl_module.model.parameters()]

        def after(*_: Any) -> None:
            if self._before:
                parameters = list(pl_module.model.parameters())
                pairs = zip(parameters, self._before, strict=True)
                moved = [local(now.detach()) - old.to(now.device) for now, old in pairs]
                pl_module.step_record["update_norm"] = global_norm(
                    parameters, moved, trainer.strategy.layout, pl_module.copied_parameters
                ).item()
                self._before = []

        for optimizer in trainer.optimizers:
            self._hooks += [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Report the step if it had an event."""
        record = pl_module.step_record
        if "event" in record:
            if record["event_action"] == "skip":
                record["update_norm"] = 0.0
            self._tell(trainer, pl_module, record)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Remove the hook."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Report the step that ended the run."""
        record = getattr(exception, "record", None) or {}
        if "event" in record:
            self._tell(trainer, pl_module, record)

    def _tell(self, trainer: pl.Trainer, pl_module: Any, record: dict[str, Any]) -> None:
        if not trainer.is_global_zero:
            return
        corpus, data = trainer.datamodule.corpus, pl_module.config.data
        shares: Tensor = pl_module.micro_batch_losses.float().cpu()  # [global micro-batches]
        worst = int(torch.nan_to_num(shares, nan=torch.inf).argmax())
        width, first = data.micro_batch_size, (record["step"] - 1) * data.global_batch_size
        record["event_worst_micro_batch"] = worst
        record["event_worst_loss"] = shares[worst].item() * len(shares)
        record["event_samples"] = [corpus.index_of(first), corpus.index_of(first + data.global_batch_size - 1)]
        rows = sorted(range(data.global_batch_size), key=lambda row: row // width != worst)[: self.max_samples]
        record["event_documents"] = [
            {"sample": corpus.index_of(first + row), **vars(corpus.origin(first + row))} for row in rows
        ]
        log.warning("step %d: %s%s", record["step"], describe_event(record), DONE[record["event_action"]])
        texts = [corpus.tokenizer.decode(corpus.sample(first + row).tokens.tolist()) for row in rows]
        self._write_text(Path(pl_module.config.run.dir), texts, record)

    def _write_text(self, run_dir: Path, texts: list[str], record: dict[str, Any]) -> None:
        file = run_dir / EVENTS_FOLDER / f"step={record['step']}.txt"
        parts = [f"step {record['step']}: {describe_event(record)}"]
        for text, each in zip(texts, record["event_documents"], strict=True):
            where = ", ".join(f"{key} {value}" for key, value in each.items())
            parts.append(f"=== {where}\n{text}")
        try:
            file.parent.mkdir(exist_ok=True)
            file.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        except OSError as error:
            log.warning("%s was not written: %s", file, error)
