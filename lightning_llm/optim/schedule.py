"""The learning rate as a pure function of the number of updates made. Imports no torch."""

from lightning_llm.config.schema.optim import ScheduleConfig


def learning_rate_factor(config: ScheduleConfig, updates: int, max_steps: int) -> float:
    """Return the factor of `optim.learning_rate` for the update after `updates` made ones.

    Warm-up is linear, to `config.peak`, and its first update is not zero: (updates + 1) / warmup_steps of that. What
    follows is the schedule's. `config` is `relative_to` the learning rate.
    """
    if updates < config.warmup_steps:
        return config.peak * ((updates + 1) / config.warmup_steps)
    return config.peak * config.after_warmup(updates, config.total_steps or max_steps)


def progress(updates: int, start: int, total: int) -> float:
    """Return how far `updates` lies between `start` (0) and the last update of `total` (1), clipped to [0, 1]."""
    if updates < start:
        return 0.0
    return min(1.0, (updates - start + 1) / max(1, total - start))
