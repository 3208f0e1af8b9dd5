"""Measuring the first steps of a run: loss, learning rate, and the gradient norm of every parameter."""

import math
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_llm.base.keyed_hash import MASK_32, hash_words
from lightning_llm.golden.figures import StepFigures
from lightning_llm.linalg.local_part import local
from lightning_llm.parallel.grad_norm import parameter_gradient_norms
from lightning_llm.precision.cast.random_bits import mix

FP32_ROUNDING = 2.0**-24
"""Half a unit in the last place: the largest relative error of rounding to fp32."""


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
    """Move every weight up or down as far as sums round: by sqrt(K) 2^-24 of it, or to its neighbour in its dtype.

    K is how many products a sum over its last axis has. A sum of K products in fp32 is off by about sqrt(K) 2^-24,
    whatever the order (N. J. Higham and T. Mary, "A new approach to probabilistic rounding error analysis", SIAM J.
    Sci. Comput. 41 (2019) A2815-A2835): so far apart lie kernels that sum in other orders. That rounding errors are
    stood for by such a change at the start, and a port is judged by how it grows: J. M. Rosinski and D. L. Williamson,
    "The accumulation of rounding errors and port validation for global atmospheric models", SIAM J. Sci. Comput. 18
    (1997) 552-564. Up or down follows from a weight's own bits and `number`: ranks that hold it move it alike.
    """
    for parameter in model.parameters():
        shard: Tensor = local(parameter)
        bits = shard.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[shard.element_size()])
        up = mix((bits.to(torch.int64) + hash_words(number)) & MASK_32) & 1
        sign = up * 2.0 - 1  # of +-1, fp32
        terms = parameter.shape[-1] if parameter.dim() else 1
        moved = (shard.double() * (1 + sign * math.sqrt(terms) * FP32_ROUNDING)).to(shard.dtype)
        neighbour = torch.nextafter(shard, (sign * torch.inf).to(shard.dtype))
        shard.copy_(torch.where(moved == shard, neighbour, moved))
