"""Lightning's own counters, set once when a run resumes."""

from typing import Any


def set_completed_steps(trainer: Any, steps: int) -> None:
    """Make Lightning count from `steps`, so that max_steps and the validation interval mean the whole run.

    The loader starts at batch `steps` by itself, so the counters of the current epoch stay at zero; restoring the
    loops' full state instead would let Lightning guess what was under way when the checkpoint was written.
    """
    loop = trainer.fit_loop.epoch_loop
    batches = loop.batch_progress.total
    batches.ready = batches.started = batches.processed = batches.completed = steps
    updates = loop.automatic_optimization.optim_progress.optimizer.step.total
    updates.ready = updates.completed = steps
    loop._batches_that_stepped = steps  # what callbacks that log by themselves number their values by
