"""The learning rate as a pure function of the number of updates made."""

import math

from lightning_llm.config.schema import ScheduleConfig


def learning_rate_factor(config: ScheduleConfig, updates: int, max_steps: int) -> float:
    """Return the factor of the peak learning rate for the update after `updates` made ones.

    Warm-up is linear and its first update is not zero: (updates + 1) / warmup_steps. Then
    `constant` stays at 1; `cosine` follows f + (1 - f) (1 + cos(pi t)) / 2 (Loshchilov & Hutter 2017, eq. 5);
    `wsd` stays at 1 and falls linearly to f over the last `decay_fraction` (Hu et al. 2024, section 4.2).
    f is `final_factor`, reached at `total_steps`, after which it holds.
    """
    if updates < config.warmup_steps:
        return (updates + 1) / config.warmup_steps
    total = config.total_steps or max_steps
    if config.name == "constant":
        return 1.0
    if config.name == "cosine":
        start = config.warmup_steps
        return (
            config.final_factor
            + (1 - config.final_factor) * (1 + math.cos(math.pi * _progress(updates, start, total))) / 2
        )
    start = max(config.warmup_steps, round(total * (1 - config.decay_fraction)))
    return 1 - (1 - config.final_factor) * _progress(updates, start, total)


def _progress(updates: int, start: int, total: int) -> float:
    """Return how far `updates` lies between `start` (0) and the last update of `total` (1), clipped to [0, 1]."""
    if updates < start:
        return 0.0
    return min(1.0, (updates - start + 1) / max(1, total - start))
