"""Our Trainer with callbacks and logging against a hand-written loop over the same model and batches."""

import threading
from collections.abc import Iterator
from queue import Queue
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.rotation import Row, interleaved_minima, stepping
from benchmarks.shape import config, loop_steps, plain_model
from lightning_llm.data.opening import open_corpus
from lightning_llm.plan.check import check_config
from lightning_llm.run.agreement import prepare_folder
from lightning_llm.run.fit import build_module, build_trainer, run_loggers
from lightning_llm.run.opening import open_layout, quiet_lightning
from lightning_llm.run.resume.start import Start
from lightning_llm.train.module import CorpusDataModule


class Turnstile(pl.Callback):
    """Lets the trainer make one step at a time: `fit` runs in a thread that waits here between steps."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.go: Queue[bool] = Queue()
        self.done: Queue[BaseException | None] = Queue()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.ready.set()
        self.go.get()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.done.put(None)
        if not self.go.get():
            trainer.should_stop = True


def trainer_steps(run: Any, corpus: Any) -> tuple[Iterator[None], Turnstile, threading.Thread]:
    """Return an iterator that lets a complete Trainer of ours make one step per `next`."""
    plan = check_config(run)
    prepare_folder(run, corpus, Start())
    device = torch.device("cpu")
    trainer = build_trainer(plan, device, open_layout(plan, device), Start(), run_loggers(run))
    # Signals can only be handled in the main thread, and there is nothing to save here.
    trainer.callbacks = [each for each in trainer.callbacks if type(each).__name__ != "Checkpointing"]
    turnstile = Turnstile()
    trainer.callbacks.append(turnstile)
    trainer._signal_connector.register_signal_handlers = lambda: None
    thread = threading.Thread(
        target=trainer.fit, args=(build_module(plan, corpus), CorpusDataModule(corpus, run)), daemon=True
    )
    thread.start()
    turnstile.ready.wait()  # collectives of another trainer must not interleave with those of this one's start

    def step() -> None:
        turnstile.go.put(True)
        turnstile.done.get()

    return stepping(step), turnstile, thread


def measure() -> Iterator[Row]:
    """Yield the ratio of fastest steps."""
    quiet_lightning()
    run = config()
    corpus = open_corpus(run.data, run.seed, run.model.vocab_size)
    ours, turnstile, thread = trainer_steps(run, corpus)
    loop = loop_steps(plain_model(run), run, corpus)
    best = interleaved_minima({"trainer": ours, "loop": loop}, rounds=12, steps=5)
    turnstile.go.put(False)
    thread.join(timeout=60)
    yield "hand-written loop, seconds per step", best["loop"], ""
    yield "our Trainer with callbacks and MLflow, ratio to it", best["trainer"] / best["loop"], "<= 1.02"
