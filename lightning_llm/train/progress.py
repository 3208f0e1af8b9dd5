"""Lightning's own counters, which follow the run's, and a validation that its loop does not know of."""

from typing import Any


def set_completed_steps(trainer: Any, steps: int) -> None:
    """Make Lightning count from `steps` when a run resumes, so that max_steps and the validation interval mean all.

    The loader starts at batch `steps` by itself, so the counters of the current epoch stay at zero; restoring the
    loops' full state instead would let Lightning guess what was under way when the checkpoint was written.
    """
    loop = trainer.fit_loop.epoch_loop
    batches = loop.batch_progress.total
    batches.ready = batches.started = batches.processed = batches.completed = steps
    loop._batches_that_stepped = steps  # what callbacks that log by themselves number their values by
    set_global_step(trainer, steps)


def set_global_step(trainer: Any, steps: int) -> None:
    """Make `trainer.global_step` say `steps`, after each of them.

    In manual optimization Lightning would count calls of its wrapper around the optimizer; a step whose update is
    skipped has none, and one of another training algorithm may have several.
    """
    updates = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
    updates.ready = updates.completed = steps


def validate_now(trainer: Any) -> None:
    """Run a validation before the first step, as Lightning's training loop runs those between steps."""
    loop, connector = trainer.fit_loop.epoch_loop.val_loop, trainer._logger_connector
    trainer.validating = True
    first = connector._first_loop_iter
    loop.run()
    trainer.training = True
    connector._first_loop_iter = first
