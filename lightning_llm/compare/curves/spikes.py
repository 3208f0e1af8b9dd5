"""Number of spikes of a logged training loss: as many as the detector of the project's own runs finds, in bulk.

The detector looks at one step at a time. Between its findings its state follows from medians of the last steps, which
are computed here for all steps at once; from each step at which it may find something, the detector itself goes on.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy import ndimage

from lightning_llm.compare.curves.table import Column
from lightning_llm.config.schema import SpikesConfig
from lightning_llm.train.spikes.detector import SHIFT_BOUND, SIGMA_OF_DIFFERENCES, SpikeState

AT_ONCE = 8192
"""Steps that are looked at together, so that the cost of many findings does not grow with the length of the log."""
NORM = 1.0
"""Gradient norm of each step: logs have none, and a constant one is no spike."""


@dataclass(frozen=True)
class _Steps:
    """Figures of steps, float64 [points]: `scores` of a spike and of a shift in sigmas, `levels` and `sigmas`."""

    scores: Column
    excess: Column
    levels: Column
    sigmas: Column


def count_spikes(losses: Column, config: SpikesConfig | None = None) -> int:
    """Return the number of events that the detector finds in `losses`, float64 [points], not all finite."""
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
