"""Measuring the first steps of a run: loss, learning rate, and the gradient norm of every parameter."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_llm.golden.figures import StepFigures
from lightning_llm.keyed_hash import MASK_32, hash_words
from lightning_llm.local_part import local
from lightning_llm.parallel.grad_norm import parameter_gradient_norms
from lightning_llm.precision.random_bits import mix


class Trajectory(pl.Callback):
    """Keeps the figures of the first `steps` steps in `figures`, and ends the run after them.

    Stands behind callbacks that change gradients. `nudge`: see `nudge_weights`, before the first step.
    """

    def __init__(self, steps: int, nudge: int | None = None):
        self.steps = steps
        self.nudge = nudge
        self.figures: list[StepFigures] = []
        self._norms: dict[str, float] = {}
        self._loss_scale = 1.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.nudge is not None:
            nudge_weights(pl_module.model, self.nudge)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        named = dict(pl_module.model.named_parameters())
        elsewhere = {id(parameter) for parameter in pl_module.copied_parameters}
        own = {name: parameter for name, parameter in named.items() if id(parameter) not in elsewhere}
        self._norms = parameter_gradient_norms(own, trainer.strategy.layout)
        self._loss_scale = pl_module.scaler.scale  # the step may change it before it ends

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        record, scale = pl_module.step_record, self._loss_scale
        norms = {name: self._norms[name] / scale for name in sorted(self._norms, key=_depth)}
        figures = record["step"], record["loss"], record["grad_norm"], record["lr"], norms, scale
        self.figures.append(StepFigures(*figures))
        if len(self.figures) == self.steps:
            trainer.should_stop = True


def _depth(name: str) -> float:
    """Return where the parameter stands in the forward pass: stages of an interleaved pipeline hold layers by turns."""
    if name.startswith("layers."):
        return int(name.split(".")[1])
    return -1 if "embedding" in name else float("inf")


@torch.no_grad()
def nudge_weights(model: nn.Module, number: int) -> None:
    """Move every weight to one of its two neighbours in its dtype: as far off as other roundings of it are.

    Which one follows from its own bits and `number`, so that ranks that hold the same weight move it alike.
    """
    for parameter in model.parameters():
        shard: Tensor = local(parameter)
        bits = shard.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[shard.element_size()])
        up = mix((bits.to(torch.int64) + hash_words(number)) & MASK_32) & 1
        shard.copy_(torch.nextafter(shard, torch.where(up == 1, torch.inf, -torch.inf).to(shard.dtype)))
