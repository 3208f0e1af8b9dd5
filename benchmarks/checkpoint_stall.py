"""Time that training waits for a save of 62 million parameters: asynchronous over synchronous, alternating in one run.

Wall seconds, because saves wait for the disk: parameters and AdamW's two moments in fp32, 740 MB, synced to the disk of
the folder of temporary files. The first asynchronous save allocates the memory that later ones copy to.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.rotation import Row
from benchmarks.shape import LARGE, config
from lightning_llm.data.opening import open_corpus
from lightning_llm.plan.check import check_config
from lightning_llm.run.agreement import prepare_folder
from lightning_llm.run.fit import build_module, build_trainer
from lightning_llm.run.opening import open_layout, quiet_lightning
from lightning_llm.run.resume.start import Start
from lightning_llm.train.checkpoint.manifest import RunIdentity
from lightning_llm.train.checkpoint.saver import Saver
from lightning_llm.train.module import CorpusDataModule

ROUNDS = 6


class Stalls(pl.Callback):
    """Makes a synchronous and an asynchronous save after each step; `seconds`: time that each took from training."""

    def __init__(self, folder: Path, run: Any):
        self.seconds: dict[str, list[float]] = {"synchronous": [], "asynchronous": [], "written": []}
        chosen = {name: name == "asynchronous" for name in ("synchronous", "asynchronous")}
        self.savers = {
            name: Saver(
                folder / name,
                run.checkpoint.model_copy(update={"asynchronous": chosen[name], "keep_last": 1}),
                RunIdentity.new(),
                "0" * 16,
            )
            for name in chosen
        }

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for saver in self.savers.values():
            saver.start(pl_module, None)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        for name, saver in self.savers.items():
            began = time.monotonic()
            saver.save(pl_module, trainer.optimizers[0], {})
            self.seconds[name].append(time.monotonic() - began)
            saver.wait()
        self.seconds["written"].append(time.monotonic() - began)


def measure() -> Iterator[Row]:
    """Yield rows (what, value, target)."""
    quiet_lightning()
    run = config("logger=none", "callbacks=none", "trainer.accelerator=cpu", shape=LARGE, steps=ROUNDS)
    corpus = open_corpus(run.data, run.seed, run.model.vocab_size)
    plan, device = check_config(run), torch.device("cpu")
    prepare_folder(run, corpus, Start())
    trainer = build_trainer(plan, device, open_layout(plan, device), Start(), [])
    stalls = Stalls(Path(run.run.root), run)
    trainer.callbacks = [each for each in trainer.callbacks if type(each).__name__ != "Checkpointing"] + [stalls]
    trainer.fit(build_module(plan, corpus), CorpusDataModule(corpus, run))
    first, *later = stalls.seconds["asynchronous"]
    synchronous = min(stalls.seconds["synchronous"])
    yield "a synchronous save of 62M parameters, seconds, fastest", synchronous, ""
    yield "training's wait for an asynchronous one, seconds, fastest", min(later), ""
    yield "the same, over the synchronous save", min(later) / synchronous, "below 0.1"
    yield "median wait over median synchronous save", median(later) / median(stalls.seconds["synchronous"]), "below 0.1"
    yield "the first wait, which makes the memory, over the synchronous save", first / synchronous, ""
    yield "an asynchronous save until it is on the disk, seconds, fastest", min(stalls.seconds["written"]), ""
