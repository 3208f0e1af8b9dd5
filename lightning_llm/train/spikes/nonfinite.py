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


class NoUpdateError(StepNotMadeError):
    """The last steps of a run changed no weight: each update was skipped because of its gradients."""

    def __init__(self, skipped: int, step: int):
        """`skipped`: updates skipped in a row, up to and including `step`."""
        updates = f"the last {skipped}" if skipped < step else f"all {skipped}"
        super().__init__(
            f"{updates} updates up to step {step} were skipped, so the weights did not change: the loss scale or "
            "spikes.policy could not repair the gradients. Lower optim.learning_rate, use precision=bf16, or check "
            "the initial weights and the data; event and loss_scale in metrics.jsonl show what was skipped.",
            {},
        )
