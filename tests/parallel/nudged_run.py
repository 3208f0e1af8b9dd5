"""A single-rank run from weights that differ in the last bit: a scale for the effect of another order of sums."""

from typing import Any

import lightning.pytorch as pl
import torch

from tests.parallel.traced_run import Trace, traced_run

NUDGES = range(8)
SENSITIVITY = 2
"""Largest allowed ratio of a layout's difference to the largest one of eight single-rank runs from weights that differ
in the last bit. It is used where a cast that rounds the other way by chance dominates the difference.

Measured of first gradients under tp with mxfp4_sr: Qwen's are 1.5e-2 off, and of eight nudged ranks one, in which no
cast falls, 7e-4, seven 1.3e-2 to 1.6e-2; the hybrid's 5.4e-3, and one 8e-4, others 5.4e-3 to 1.2e-2. Their logarithms
scatter by 0.08 and 0.38: of nine normal ones that scatter by 0.38, one is ln 2 above the eight others twice in 1,000
times.
"""


@torch.no_grad()
def nudge(model: torch.nn.Module, seed: int) -> None:
    """Move every weight to one of its two neighbours in fp32."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2.0 - 1  # of +-1
        parameter.copy_(torch.nextafter(parameter, signs * torch.inf))


class Nudged(pl.Callback):
    """Moves the weights before the first step."""

    def __init__(self, seed: int):
        self.seed = seed

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        nudge(pl_module.model, self.seed)


def nudged_run(config: Any, seed: int) -> Trace:
    return traced_run(config, Nudged(seed), saves=False)
