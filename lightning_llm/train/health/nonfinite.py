"""A step whose update was not made because the run ends, and its report."""

from typing import Any


class StepNotMadeError(RuntimeError):
    """The run ends before the update of a step. `record` is the step's record as far as it got, for metrics.jsonl."""

    def __init__(self, text: str, record: dict[str, Any]):
        super().__init__(text)
        self.record = record


class NonFiniteError(StepNotMadeError):
    """The loss or the gradient norm of a step is NaN or infinite; raised before the optimizer could write it.

    `origin` may be set by whoever looked for it: a sentence on where the first such value appeared.
    """

    def __init__(self, what: str, value: float, step: int, record: dict[str, Any]):
        """`what` is "loss" or "gradient norm", `step` is the step (1-based) that was not made."""
        self.origin = ""
        super().__init__(
            f"the {what} of step {step} is {value}. The weights are still those of step {step - 1}. Lower "
            "optim.learning_rate, lengthen schedule.warmup_steps, or look at the precision recipe; "
            "spikes.policy=skip leaves such updates out.",
            record,
        )

    def __str__(self) -> str:
        return f"{super().__str__()} {self.origin}".rstrip()
