"""Callbacks that make one rank slow: its GEMMs before the run begins, as a device that throttles does, or its steps."""

import time
from collections.abc import Callable
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_llm.data.corpus import Corpus
from lightning_llm.health.devices import SquareProduct
from lightning_llm.model.decoder import Decoder
from lightning_llm.run.launch.environment import rank_environment


class SlowRank(pl.Callback):
    """Adds `pause_seconds` to each GEMM of the check on `rank`."""

    def __init__(self, rank: int, pause_seconds: float):
        here, run = rank_environment(), SquareProduct.run
        if here is None or here.rank != rank or dist.is_initialized():
            return

        def paused(product):
            time.sleep(pause_seconds)
            return run(product)

        SquareProduct.run = paused


class SlowStep(pl.Callback):
    """Has `rank` sleep `seconds` in each step from `first_step` to `last_step`, and keeps how long it slept.

    `where`: "compute", within the step's first forward pass; "data", where it reads a batch; "rest", after the update.
    """

    slept: ClassVar[dict[int, float]] = {}
    """Seconds of each step, as the clock has them: a sleep may last longer than it was asked to."""

    def __init__(self, rank: int, seconds: float, first_step: int, last_step: int = 10**9, where: str = "compute"):
        self.rank, self.seconds, self.steps, self.where = rank, seconds, range(first_step, last_step + 1), where
        self._restore: list[tuple[type, str, Callable[..., Any]]] = []
        self._due = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.global_rank != self.rank:
            return
        self.module, callback = pl_module, self
        SlowStep.slept.clear()
        forward, micro_batches = Decoder.forward, Corpus.micro_batches

        def slow_forward(self: Decoder, *arguments: Any, **keywords: Any) -> Any:
            if callback._due and callback.where == "compute":
                callback._sleep(callback.module.completed_steps + 1)
            return forward(self, *arguments, **keywords)

        def slow_read(self: Corpus, index: int, indices: Any = None) -> Any:
            if callback.where == "data":
                callback._sleep(index + 1)
            return micro_batches(self, index, indices)

        self._restore = [(Decoder, "forward", forward), (Corpus, "micro_batches", micro_batches)]
        Decoder.forward, Corpus.micro_batches = slow_forward, slow_read

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self._due = bool(self._restore)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if self._restore and self.where == "rest":
            self._sleep(pl_module.completed_steps)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for owner, name, original in self._restore:
            setattr(owner, name, original)
        self._restore = []

    def _sleep(self, step: int) -> None:
        self._due = False
        if step in self.steps:
            begin = time.perf_counter()
            time.sleep(self.seconds)
            SlowStep.slept[step] = time.perf_counter() - begin
