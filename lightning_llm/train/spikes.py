"""Anomalous steps: their detection, and the actions on them (log, skip the update, roll back, stop the run).

The detector (`SpikeState`) is a state machine of plain numbers that sees one loss and gradient norm per step. It finds:

- `non_finite`: the loss or the gradient norm is NaN or infinite.
- `spike`: one of them is far above the median of the last `level_steps`: Hampel's identifier (Davies & Gather 1993),
  one-sided. Sigma is 1.4826 median |x_t - x_(t-1)| / sqrt 2 over `window_steps`, the median absolute deviation of the
  noise: differences keep the noise and drop the trend.
- `plateau_shift`: the loss stays above the median of `window_steps`: a one-sided CUSUM (Page 1954) of its excess in
  sigmas. Each step's part is bounded by `SHIFT_BOUND`, so one spike is not a shift. The level restarts from there.
- `divergence`: the level has risen by `divergence_share` of the loss reduction so far (first loss minus lowest level),
  by more than noise.

`SpikePolicy` chooses the action. The numbers are the same on every rank, so every rank detects the same events and acts
alike without communication. Imports no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from lightning_llm.config.schema import SpikesConfig

Kind = Literal["non_finite", "spike", "plateau_shift", "divergence"]

SHIFT_BOUND = 4.0
"""Upper bound of one step's addition to the CUSUM, in sigmas."""
SIGMA_OF_DIFFERENCES = 1.4826 / math.sqrt(2)


@dataclass(frozen=True)
class Finding:
    """An anomaly that the detector has found in a step.

    Levels are medians of preceding steps; scores are rises above them in sigmas. A non-finite step has neither.
    """

    kind: Kind
    high: bool = False
    """Whether the step is a spike by its scores, even if `kind` is another."""
    loss_level: float | None = None
    loss_score: float | None = None
    grad_norm_level: float | None = None
    grad_norm_score: float | None = None


@dataclass(frozen=True)
class SpikeState:
    """State of the detector after a step. Immutable; stored in checkpoints as JSON without loss of bits."""

    losses: tuple[float, ...] = ()
    """Losses of the last `window_steps`, oldest first, without non-finite steps."""
    log_norms: tuple[float, ...] = ()
    """Logarithms of the gradient norms of the same steps."""
    regime_steps: int = 0
    """Number of steps since the last shift of the level."""
    shift: float = 0.0
    """The CUSUM, in sigmas."""
    shift_steps: int = 0
    """Steps since the CUSUM was last 0."""
    first_loss: float | None = None
    lowest_level: float | None = None
    """Lowest level of the loss so far."""
    diverged: bool = False
    """Whether the last step was diverged; a new event is found only after a recovery."""
    skips_in_a_row: int = 0
    """Consecutive updates up to now that `SpikePolicy` has skipped."""
    events: int = 0
    """Number of anomalies so far."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "SpikeState":
        """Return the state from `values`, its `dataclasses.asdict` after a JSON round trip."""
        known = {field.name for field in fields(cls)}
        made: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in values.items()}
        return cls(**{key: value for key, value in made.items() if key in known})

    def after(self, loss: float, grad_norm: float, config: SpikesConfig) -> "tuple[Finding | None, SpikeState]":
        """Return (the anomaly of a step with this loss and gradient norm, or None; the state after the step)."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return Finding("non_finite"), replace(self, events=self.events + 1)
        log_norm = math.log(max(grad_norm, 1e-30))
        moved = self._moved(loss, log_norm, config)
        if len(self.losses) < 2 * config.level_steps:
            return None, moved
        loss_sigma = max(config.loss_noise_floor, _sigma(self.losses))
        finding, moved = self._judged(loss, log_norm, loss_sigma, moved, config)
        return finding, replace(moved, events=self.events + (finding is not None))

    def _moved(self, loss: float, log_norm: float, config: SpikesConfig) -> "SpikeState":
        """Return the state with the step in its windows."""
        kept = config.window_steps - 1
        return replace(
            self,
            first_loss=loss if self.first_loss is None else self.first_loss,
            losses=(*self.losses[-kept:], loss),
            log_norms=(*self.log_norms[-kept:], log_norm),
            regime_steps=min(self.regime_steps + 1, config.window_steps),
        )

    def _judged(
        self, loss: float, log_norm: float, loss_sigma: float, moved: "SpikeState", config: SpikesConfig
    ) -> "tuple[Finding | None, SpikeState]":
        level = median(moved.losses[-config.level_steps :])
        lowest = level if self.lowest_level is None else min(self.lowest_level, level)
        lost, learned = level - lowest, (self.first_loss or lowest) - lowest
        allowed = max(config.divergence_share * learned, config.loss_threshold * loss_sigma)
        diverged = lost > (0.5 * allowed if self.diverged else allowed)
        moved = replace(moved, lowest_level=lowest, diverged=diverged)
        scores = self._scores(loss, log_norm, loss_sigma, config)
        high = (
            scores["loss_score"] > config.loss_threshold or scores["grad_norm_score"] > config.grad_norm_threshold
        ) and self.regime_steps >= config.level_steps // 2
        shifted, moved = self._shifted(loss, loss_sigma, moved, config)
        if diverged and not self.diverged:
            return Finding("divergence", high, **scores), moved
        if shifted:
            return Finding("plateau_shift", high, **scores), moved
        return (Finding("spike", high, **scores) if high else None), moved

    def as_left_out(self, before: "SpikeState") -> "SpikeState":
        """Return this state for a step with a skipped update: level, CUSUM and divergence are those of `before` the
        step.

        Skipped batches must not shift the level, no matter how many there are.
        """
        return replace(
            self, shift=before.shift, shift_steps=before.shift_steps, regime_steps=before.regime_steps,
            diverged=before.diverged,
        )  # fmt: skip

    def _scores(self, loss: float, log_norm: float, loss_sigma: float, config: SpikesConfig) -> dict[str, float]:
        count = max(1, min(config.level_steps, self.regime_steps))
        loss_level, norm_level = median(self.losses[-count:]), median(self.log_norms[-count:])
        norm_sigma = max(config.grad_norm_noise_floor, _sigma(self.log_norms))
        return {
            "loss_level": loss_level,
            "loss_score": (loss - loss_level) / loss_sigma,
            "grad_norm_level": math.exp(norm_level),
            "grad_norm_score": (log_norm - norm_level) / norm_sigma,
        }

    def _shifted(
        self, loss: float, loss_sigma: float, moved: "SpikeState", config: SpikesConfig
    ) -> "tuple[bool, SpikeState]":
        """Return (whether the CUSUM reached its limit with this step, state with the updated CUSUM)."""
        usual = median(self.losses[-max(1, self.regime_steps) :])
        excess = min((loss - usual) / loss_sigma, SHIFT_BOUND)
        shift = max(0.0, self.shift + excess - config.shift_slack)
        steps = self.shift_steps + 1 if shift > 0 else 0
        if shift < config.shift_limit:
            return False, replace(moved, shift=shift, shift_steps=steps)
        return True, replace(moved, shift=0.0, shift_steps=0, regime_steps=min(steps, moved.regime_steps))


def _sigma(values: tuple[float, ...]) -> float:
    return SIGMA_OF_DIFFERENCES * median([abs(new - old) for old, new in pairwise(values)])


class StepNotMadeError(RuntimeError):
    """Base class of errors that end the run before the update of a step."""

    def __init__(self, text: str, record: dict[str, Any]):
        """`record`: the step's incomplete record, which is still written to metrics.jsonl."""
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
    """spikes.policy has stopped the run before the update of an anomalous step; the state before it is saved."""


class SpikeRollback(StepNotMadeError):
    """Request of spikes.policy to go back to a checkpoint before an anomalous step; nothing is saved."""


class SpikePolicy:
    """Decides for every step, before its update, what to do about an anomaly (`spikes.policy`).

    Its inputs are the same on every rank, and so are decisions.
    """

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
    """Return a short description of the anomaly in a step's `record`, with loss, gradient norm and usual values."""
    kind = record["event"].replace("_", " ")
    if "event/loss_score" not in record:
        return f"{kind}: loss {record['loss']:.4g}, gradient norm {record['grad_norm']:.4g}"
    return (
        f"{kind}: loss {record['loss']:.4f}, usual {record['event/loss_level']:.4f} "
        f"({record['event/loss_score']:+.1f} sigma); gradient norm {record['grad_norm']:.3g}, usual "
        f"{record['event/grad_norm_level']:.3g} ({record['event/grad_norm_score']:+.1f} sigma)"
    )
