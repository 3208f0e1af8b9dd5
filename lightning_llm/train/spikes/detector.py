"""Spike detector: a state machine of plain numbers that sees one loss and gradient norm per step.

- `non_finite`: the loss or the gradient norm is NaN or infinite.
- `spike`: one of them is far above the median of the last `level_steps`: Hampel's identifier (Davies & Gather 1993),
  one-sided. Sigma is 1.4826 median |x_t - x_(t-1)| / sqrt 2 over `window_steps`, the median absolute deviation of the
  noise: differences keep the noise and drop the trend.
- `plateau_shift`: the loss stays above the median of `window_steps`: a one-sided CUSUM (Page 1954) of its excess in
  sigmas. Each step's part is bounded by `SHIFT_BOUND`, so one spike is not a shift. The level restarts from there.
- `divergence`: the level has risen by `divergence_share` of the loss reduction so far (first loss minus lowest level),
  by more than noise.

The numbers are the same on every rank, so every rank detects the same events without communication.
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
    """An anomaly of a step. Levels are medians before the step; scores are rises above them in sigmas.

    A non-finite step has no scores. `high`: a spike by its scores, independent of `kind`.
    """

    kind: Kind
    high: bool = False
    loss_level: float | None = None
    loss_score: float | None = None
    grad_norm_level: float | None = None
    grad_norm_score: float | None = None


@dataclass(frozen=True)
class SpikeState:
    """State of the detector. Stored in checkpoints as JSON, bitwise."""

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
    diverged: bool = False
    skips_in_a_row: int = 0
    events: int = 0

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "SpikeState":
        """Return the state from `values`, its `dataclasses.asdict` after a JSON round trip."""
        known = {field.name for field in fields(cls)}
        made: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in values.items()}
        return cls(**{key: value for key, value in made.items() if key in known})

    def after(self, loss: float, grad_norm: float, config: SpikesConfig) -> "tuple[Finding | None, SpikeState]":
        """Return (anomaly of a step or None, state after it)."""
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
        """Return this state with level, CUSUM and divergence as `before` the step, because its update is skipped.

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
