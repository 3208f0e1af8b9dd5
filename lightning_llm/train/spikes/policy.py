"""Actions on an anomalous step (log, skip its update, roll back, stop), and the errors that end a run."""

import math
from dataclasses import replace
from typing import Any, Literal

from lightning_llm.config.schema import SpikesConfig
from lightning_llm.train.spikes.detector import Finding, SpikeState


class StepNotMadeError(RuntimeError):
    """The run ends before the update of a step. `record`: the step's incomplete record, for metrics.jsonl."""

    def __init__(self, text: str, record: dict[str, Any]):
        super().__init__(text)
        self.record = record


class NonFiniteError(StepNotMadeError):
    """The loss or the gradient norm of a step is NaN or infinite; raised before the optimizer's update.

    `origin`: a sentence with the first such tensor, set after a search for it.
    """

    def __init__(self, what: str, value: float, step: int, record: dict[str, Any]):
        """`what`: "loss" or "gradient norm". `step`: the step (1-based) that was not made."""
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
    """The last steps of a run changed no weights, because each update was skipped."""

    def __init__(self, skipped: int, step: int):
        """`skipped`: consecutive skipped updates, up to and including `step`."""
        updates = f"the last {skipped}" if skipped < step else f"all {skipped}"
        super().__init__(
            f"{updates} updates up to step {step} were skipped, so the weights did not change: the loss scale or "
            "spikes.policy could not repair the gradients. Lower optim.learning_rate, use precision=bf16, or check "
            "the initial weights and the data; event and loss_scale in metrics.jsonl show what was skipped.",
            {},
        )


Action = Literal["log", "skip", "rollback", "stop"]


class SpikeStop(StepNotMadeError):
    """spikes.policy ends the run before the update of the step; the state before it is saved."""


class SpikeRollback(StepNotMadeError):
    """spikes.policy rolls the run back to a checkpoint before the step; nothing is saved."""


class SpikePolicy:
    """Judges every step before its update. Numbers are the same on every rank, and so are decisions."""

    def __init__(self, config: SpikesConfig, rollbacks_made: int = 0):
        self.config = config
        self.rollbacks_made = rollbacks_made
        self.state = SpikeState()

    def judge(self, record: dict[str, Any]) -> bool:
        """Return whether to skip the step's update; `record` has its loss and gradient norm.

        An anomaly is added to `record`: `event` and `event_action` as strings, levels and scores, and for trackers that
        accept only numbers `event/<kind>` and `event/<action>` as 1.

        Raises:
            NonFiniteError: the step is not finite, and the policy is log.
            SpikeStop: the policy is stop, or `max_consecutive_skips` consecutive updates were skipped, or the run has
                rolled back `max_rollbacks` times.
            SpikeRollback: the policy is rollback, and the step is a spike or not finite.
        """
        finding, after = self.state.after(record["loss"], record["grad_norm"], self.config)
        if finding is None:
            self.state = replace(after, skips_in_a_row=0)
            return False
        if finding.high and self.config.policy in ("skip", "rollback"):
            finding = replace(finding, kind="spike")  # a skipped batch is not part of a shift
        action = self._action(finding)
        record |= _entries(finding, action)
        if action == "rollback":
            raise SpikeRollback(f"step {record['step']} is out of the ordinary ({describe_event(record)})", record)
        if action == "stop":
            raise self._end(finding, record)
        if action != "skip":
            self.state = replace(after, skips_in_a_row=0)
            return False
        self.state = replace(after.as_left_out(self.state), skips_in_a_row=self.state.skips_in_a_row + 1)
        return True

    def _action(self, finding: Finding) -> Action:
        policy, bad_batch = self.config.policy, finding.kind in ("spike", "non_finite")
        if policy == "skip" and bad_batch:  # skipping one batch does not fix a shifted level
            return "skip" if self.state.skips_in_a_row < self.config.max_consecutive_skips else "stop"
        if policy == "rollback" and bad_batch:
            return "rollback" if self.rollbacks_made < self.config.max_rollbacks else "stop"
        if policy == "stop":
            return "stop"
        return "stop" if finding.kind == "non_finite" else "log"

    def _end(self, finding: Finding, record: dict[str, Any]) -> StepNotMadeError:
        """Return the error that ends the run; the detector's state remains as before the step."""
        step = record["step"]
        if self.config.policy == "log":
            what = "loss" if not math.isfinite(record["loss"]) else "gradient norm"
            return NonFiniteError(what, record["loss" if what == "loss" else "grad_norm"], step, record)
        found = f"step {step} is out of the ordinary ({describe_event(record)})"
        if self.config.policy == "skip":
            return SpikeStop(
                f"{found}, and so were the {self.state.skips_in_a_row} before it, which were skipped "
                "(spikes.max_consecutive_skips): this is not the data. Lower optim.learning_rate, or look at the "
                f"precision recipe. State saved at step {step - 1}",
                record,
            )
        if self.config.policy == "rollback":
            return SpikeStop(
                f"{found}, and the run rolled back {self.rollbacks_made} times already (spikes.max_rollbacks): this "
                "is not the data. Lower optim.learning_rate, or look at the precision recipe. State saved at step "
                f"{step - 1}",
                record,
            )
        return SpikeStop(
            f"{found}, and spikes.policy is stop. State saved at step {step - 1}, before its update: with "
            "spikes.policy=skip the run continues without that update, with spikes.policy=log with it",
            record,
        )


def _entries(finding: Finding, action: Action) -> dict[str, Any]:
    numbers = {
        "loss_level": finding.loss_level,
        "loss_score": finding.loss_score,
        "grad_norm_level": finding.grad_norm_level,
        "grad_norm_score": finding.grad_norm_score,
    }
    entries: dict[str, Any] = {"event": finding.kind, "event_action": action}
    entries |= {f"event/{finding.kind}": 1, f"event/{action}": 1}
    return entries | {f"event/{key}": value for key, value in numbers.items() if value is not None}


def describe_event(record: dict[str, Any]) -> str:
    """Return a short description of the event in a step's record."""
    kind = record["event"].replace("_", " ")
    if "event/loss_score" not in record:
        return f"{kind}: loss {record['loss']:.4g}, gradient norm {record['grad_norm']:.4g}"
    return (
        f"{kind}: loss {record['loss']:.4f}, usual {record['event/loss_level']:.4f} "
        f"({record['event/loss_score']:+.1f} sigma); gradient norm {record['grad_norm']:.3g}, usual "
        f"{record['event/grad_norm_level']:.3g} ({record['event/grad_norm_score']:+.1f} sigma)"
    )
