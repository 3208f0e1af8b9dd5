"""Turn curves of other trainers into runs, so that they are paired and judged as the project's own.

Spikes of a training loss are counted as the detector of the project's own runs does, but in bulk: between its findings,
the detector's state follows from medians of the last steps, which are computed for all steps at once. The detector
itself runs only from steps at which it may find something.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy import ndimage

from lightning_llm.compare.curves.checks import FEWEST_FOR_NOISE, noise
from lightning_llm.compare.curves.common_axis import CommonAxis
from lightning_llm.compare.curves.curve import LoggedCurve
from lightning_llm.compare.curves.table import Column
from lightning_llm.compare.runs.losses import LEARNED_BELOW
from lightning_llm.config.schema import SpikesConfig
from lightning_llm.tracking.reading import Run
from lightning_llm.train.spikes import SHIFT_BOUND, SIGMA_OF_DIFFERENCES, SpikeState

ARM = "arm"
STATED = ("global_batch_size", "sequence_length", "tokens_per_step", "total_steps", "world_size")
"""Settings that become keys of the runs' configs if all logs state them; a difference in one is a confounder."""
BEGINNING = 0.1
"""Share of a curve at its beginning. A baseline must fall below the mean loss there to count as learned."""
AT_ONCE = 8192
"""Number of steps that are examined at a time, so that the cost of a finding does not grow with the log's length."""
NORM = 1.0
"""Gradient norm given to the detector at each step: logs have none, and a constant one is no spike."""


def with_seeds(curves: Sequence[LoggedCurve]) -> list[LoggedCurve]:
    """Return the curves; those without a seed get the seeds 0, 1, ... within their recipe (arm), in the given order."""
    counts: dict[str, int] = {}
    numbered = []
    for curve in curves:
        if curve.log.seed is None:
            number = counts.get(curve.log.arm, 0)
            counts[curve.log.arm] = number + 1
            curve = replace(curve, log=replace(curve.log, seed=number))
        numbered.append(curve)
    return numbered


def runs_of(curves: Sequence[LoggedCurve], axis: CommonAxis, metric: str, margin: float) -> list[Run]:
    """Return each curve as a finished run, with its values on `axis` as validations of `metric`.

    `margin`: nats, for the loss below which a run counts as learned.
    """
    stated = [key for key in STATED if all(key in curve.table.settings for curve in curves)]
    return [_run_of(curve, axis, metric, margin, stated) for curve in curves]


def _run_of(curve: LoggedCurve, axis: CommonAxis, metric: str, margin: float, stated: Sequence[str]) -> Run:
    values = axis.values_of(curve)
    known = [(key, float(value)) for key, value in zip(axis.keys, values, strict=True) if not math.isnan(value)]
    tokens = {key: 0 for key, _ in known}
    if curve.tokens is not None:
        seen = np.interp(axis.points, curve.x, curve.tokens)
        tokens |= {key: round(float(seen[at])) for at, key in enumerate(axis.keys) if key in tokens}
    return Run(
        folder=Path(curve.log.address),
        config={
            "seed": curve.log.seed,
            ARM: curve.log.arm,
            **{f"log.{key}": curve.table.settings[key] for key in stated},
        },
        summary={"status": "finished", LEARNED_BELOW: _learned_below(curve, margin)},
        validations={metric: dict(known)},
        tokens=tokens,
        train_seconds={key: 0.0 for key, _ in known},
        first_step=1,
        last_step=max((key for key, _ in known), default=1),
        last_loss=float(curve.values[-1]),
        spikes=count_spikes(curve.values) if curve.loss.kind == "training" else 0,
        unverified="another trainer logged it",
        logged_on=curve.axis_words if axis.scale == 1 else f"{curve.axis_words} x {axis.scale}",
    )


def _learned_below(curve: LoggedCurve, margin: float) -> float:
    """Return the loss below which the curve has fallen since its beginning, by more than the margin and its noise."""
    values = curve.finite
    if not len(values):
        return 0.0
    early = values[: max(1, int(BEGINNING * len(values)))]
    scatter = noise(values[len(values) // 5 :]) if len(values) >= FEWEST_FOR_NOISE else 0.0
    return float(early.mean() - margin - 3 * scatter * math.sqrt(2 / len(early)))


@dataclass(frozen=True)
class _Steps:
    """Figures of steps, float64 [points]: `scores` of a spike and of a shift in sigmas, `levels` and `sigmas`."""

    scores: Column
    excess: Column
    levels: Column
    sigmas: Column


def count_spikes(losses: Column, config: SpikesConfig | None = None) -> int:
    """Return the number of loss spikes in `losses`, float64 [points]; each value that is not finite counts as one.

    `config`: settings of the detector; None for the defaults of runs.
    """
    config = config or SpikesConfig()
    finite = losses[np.isfinite(losses)]
    state, at = SpikeState(events=len(losses) - len(finite)), 0
    steps = _steps(finite, config) if len(finite) > config.window_steps else None
    while at < len(finite):
        if steps is not None and _is_settled(state, at, config):
            at, state = _next_trigger(finite, steps, at, state, config)
            if at == len(finite):
                break
        _, state = state.after(float(finite[at]), NORM, config)
        at += 1
    return state.events


def _is_settled(state: SpikeState, at: int, config: SpikesConfig) -> bool:
    """Return whether all windows of the detector are full and on one level."""
    return at >= config.window_steps and state.regime_steps == config.window_steps and not state.diverged


def _steps(losses: Column, config: SpikesConfig) -> _Steps:
    window, level = config.window_steps, config.level_steps
    noise = _before(_medians(np.abs(np.diff(losses, prepend=losses[0])), window - 1))
    sigmas = np.maximum(config.loss_noise_floor, SIGMA_OF_DIFFERENCES * noise)
    levels = _medians(losses, level)
    excess = np.minimum((losses - _before(_medians(losses, window))) / sigmas, SHIFT_BOUND)
    return _Steps((losses - _before(levels)) / sigmas, excess, levels, sigmas)


def _medians(values: Column, width: int) -> Column:
    """Return the median of the last `width` values at each place; of the first places, it is of no use."""
    ranks = {(width - 1) // 2, width // 2}
    found = [ndimage.rank_filter(values, rank, size=width, origin=(width - 1) // 2) for rank in sorted(ranks)]
    median: Column = found[0] if len(found) == 1 else (found[0] + found[1]) / 2
    return median


def _before(values: Column) -> Column:
    return np.concatenate([values[:1], values[:-1]])


def _next_trigger(
    losses: Column, steps: _Steps, at: int, state: SpikeState, config: SpikesConfig
) -> tuple[int, SpikeState]:
    """Return (the next step from `at` on at which the detector may find something or the bulk ends, the state then)."""
    upto = slice(at, at + AT_ONCE)
    lowest = np.minimum.accumulate(
        np.append(math.inf if state.lowest_level is None else state.lowest_level, steps.levels[upto])
    )[1:]
    first = losses[0] if state.first_loss is None else state.first_loss
    allowed = np.maximum(
        config.divergence_share * ((first or lowest) - lowest), config.loss_threshold * steps.sigmas[upto]
    )
    high = (steps.scores[upto] > config.loss_threshold) | (steps.levels[upto] - lowest > allowed)
    stop = int(np.argmax(high)) if high.any() else len(high)
    ahead, shift, shift_steps = 0, state.shift, state.shift_steps
    for following in _shifts(steps.excess[at : at + stop], shift, config):
        if following >= config.shift_limit:
            break
        ahead, shift, shift_steps = ahead + 1, following, shift_steps + 1 if following > 0 else 0
    end = at + ahead
    window = losses[end - config.window_steps : end].tolist()
    return end, replace(
        state,
        losses=tuple(window),
        log_norms=(math.log(NORM),) * len(window),
        shift=shift,
        shift_steps=shift_steps,
        lowest_level=float(lowest[ahead - 1]) if ahead else state.lowest_level,
    )


def _shifts(excess: Column, shift: float, config: SpikesConfig) -> Iterator[float]:
    """Yield the CUSUM after each step."""
    for each in excess.tolist():
        shift = max(0.0, shift + each - config.shift_slack)
        yield shift
