"""Callbacks like a user's, for runs with a config that names them."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from urllib.request import urlopen

import lightning.pytorch as pl


class Remembers(pl.Callback):
    """Has state: every loss that it found where Lightning's users look; logs how many. `names`: of all there."""

    names: ClassVar[frozenset[str]] = frozenset()

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.validations: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        metrics = trainer.callback_metrics
        self.losses.append(metrics["loss"].item())
        assert {"loss", "grad_norm", "lr"} <= metrics.keys() & trainer.logged_metrics.keys()
        self.log("own/remembered", float(len(self.losses)))

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        Remembers.names = frozenset(trainer.callback_metrics)
        self.validations.append(trainer.callback_metrics["val_loss"].item())
        self.log("own/validations", len(self.validations))

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "validations": self.validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses, self.validations = state_dict["losses"], state_dict["validations"]


class StopsAlone(pl.Callback):
    """Sets `trainer.should_stop` on one rank, after `step`."""

    def __init__(self, rank: int, step: int):
        self.rank, self.step = rank, step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_rank == self.rank and pl_module.completed_steps >= self.step:
            trainer.should_stop = True


class Misbehaves(pl.Callback):
    """Does what cannot work here."""

    def __init__(self, what: str):
        self.what = what

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        if self.what == "setup":
            raise RuntimeError("before the run's folder is open")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if self.what == "checkpoint":
            trainer.save_checkpoint("mine.ckpt")
        if self.what == "name":
            self.log("loss", 1.0)
        if self.what == "exit":
            sys.exit(0)
        if self.what == "colours":
            _raise("\x1b[31mred\nand more")
        if self.what == "interrupt":
            raise KeyboardInterrupt

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        if self.what == "exit":
            raise RuntimeError("and its on_exception fails, too") from exception

    def state_dict(self) -> dict[str, Any]:
        return {"state": object()} if self.what == "state" else {}


class Bars(pl.callbacks.TQDMProgressBar):
    """A refused one, by another name."""


def _raise(text: str) -> None:
    raise ValueError(text)


class HookOrder(pl.Callback):
    """Keeps every hook of the training loop, with `trainer.global_step` and whether there are gradients."""

    seen: ClassVar[list[tuple[str, int, bool]]] = []


def _kept(name: str) -> Callable[..., None]:
    def hook(self: HookOrder, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        gradients = any(parameter.grad is not None for parameter in pl_module.parameters())
        HookOrder.seen.append((name, trainer.global_step, gradients))

    return hook


for _name in (
    "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end",
    "on_validation_start", "on_validation_end", "on_train_epoch_end", "on_train_end", "on_fit_end",
):  # fmt: skip
    setattr(HookOrder, _name, _kept(_name))


class Halved(pl.Callback):
    """Halves every gradient before the update."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class Scrapes(pl.Callback):
    """Keeps the responses of the endpoint in `targets/*.json` after step `step`'s batch, and after all records."""

    texts: ClassVar[list[str]] = []

    def __init__(self, targets: str, step: int):
        self.targets, self.step = Path(targets), step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if pl_module.step_record["step"] == self.step:
            self.scrape()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.scrape()

    def scrape(self) -> None:
        deadline = time.monotonic() + 60
        while not (found := list(self.targets.glob("*.json"))) and time.monotonic() < deadline:
            time.sleep(0.01)
        ((address,),) = (each["targets"] for each in json.loads(found[0].read_text()))
        with urlopen(f"http://{address}/metrics", timeout=60) as answer:
            Scrapes.texts.append(answer.read().decode())
