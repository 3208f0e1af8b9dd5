"""Delayed scaling: a tensor's scale from earlier amaxes (Transformer Engine `delayed_scaling.cu`).

`history` is [L, T] fp32 for T tensors: row 0 collects the amax since the last update (of a step, or of a micro-batch),
rows 1 .. L-1 hold earlier ones, oldest first. `scale` is [T] fp32. Pure functions: nothing is changed in place.
"""

import torch
from torch import Tensor

from lightning_llm.config.schema.precision import DelayedConfig
from lightning_llm.precision.cast.formats import FLOAT_MAX


def update(history: Tensor, scale: Tensor, largest: Tensor, config: DelayedConfig) -> tuple[Tensor, Tensor]:
    """Return (history, scale) after an update; `largest` [T]: each format's largest number.

    The fused kernel's rule: a tensor whose row 0 is 0 was not used, so its history does not roll and its scale stays. A
    scale also stays while the amax it would come from is not finite, until that amax leaves the history.
    """
    last = history[0]
    rolled = torch.cat([history[1:], last[None]])
    seen = torch.where(torch.isnan(rolled), torch.zeros_like(rolled), rolled).amax(0)
    amax = seen if config.algorithm == "max" else last
    used = last != 0
    history = torch.where(used, torch.cat([torch.zeros_like(rolled[:1]), rolled[1:]]), history)
    return history, torch.where(used & (amax > 0) & torch.isfinite(amax), _scale(amax, largest, config), scale)


def _scale(amax: Tensor, largest: Tensor, config: DelayedConfig) -> Tensor:
    """Return largest 2^-margin / amax by one true division, held to the largest fp32."""
    return torch.div(largest * 2.0**-config.margin, amax).clamp(max=FLOAT_MAX)


def update_unfused(history: Tensor, scale: Tensor, largest: Tensor, config: DelayedConfig) -> tuple[Tensor, Tensor]:
    """Return (history, scale) by Transformer Engine's Python path, `NVTE_UNFUSED_FP8_UPDATE=1`.

    It rolls always, lets NaN through the maximum, and divides by a reciprocal: up to one unit in the last place off.
    """
    amax = history.amax(0) if config.algorithm == "max" else history[0]
    rolled = history.roll(-1, 0)
    history = torch.cat([torch.zeros_like(rolled[:1]), rolled[1:]])
    new = torch.reciprocal(amax) * largest * 2.0**-config.margin
    new = torch.where(torch.isinf(new), torch.full_like(new, FLOAT_MAX), new)
    return history, torch.where((amax > 0) & torch.isfinite(amax), new, scale)
