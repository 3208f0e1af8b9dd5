"""Checks of each curve by itself, and of the units that the logs state: problems that would falsify a verdict."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightning_llm.base.errors import Problem
from lightning_llm.compare.curves.curve import LoggedCurve
from lightning_llm.compare.curves.table import Column

MOST_NATS = 15.0
"""Above the loss of guessing, ln(vocabulary), for each vocabulary in use; a curve that is mostly above is none in nats
per token."""
ROUNDING_SHARE = 0.2
"""Largest rounding of the losses, as a share of the margin."""
CHANCE = 1e-3
"""Probability below which repeated values are no coincidence."""
LOWEST_RATIO = 0.8
"""Lowest loss relative to the baseline's that two runs in one unit can have."""
DECIMALS = [10.0**-digits for digits in range(1, 7)]
GRIDS = sorted(
    [f * 10.0**-d for d in range(1, 7) for f in (1, 2, 2.5, 5)] + [2.0**-k for k in range(1, 17)], reverse=True
)
"""Steps to which losses are rounded: decimals, and the spacing of 16-bit floats."""


def problems_of(curve: LoggedCurve, margin: float) -> list[Problem]:
    """Return the problems of one curve by itself, one line each."""
    found = [_values(curve), _rounded(curve, margin), _padded(curve), _gap_in_tail(curve)]
    return [Problem(curve.log.address, text) for text in found if text]


def _values(curve: LoggedCurve) -> str:
    finite = curve.finite
    if len(finite) == 0:
        return ""
    if finite.min() < 0:
        return f"column {curve.loss.name} has values below 0, and no cross-entropy has. Choose another --metric."
    level = max(float(np.median(finite)), float(np.median(finite[: max(1, len(finite) // 10)])))
    if curve.loss.unit != "bits per byte" and level > MOST_NATS:
        return (
            f"column {curve.loss.name} is {level:.4g} at its beginning or middle, more than guessing gives in nats per "
            "token: a perplexity or a sum. Log the mean loss per token, the logarithm of the perplexity."
        )
    return ""


def resolution(values: Column) -> float:
    """Return the step to which `values` are rounded, the largest of `GRIDS` that divides all; 0 for none of them."""
    later = values[len(values) // 2 :] if len(values) >= 16 else values
    if not len(later):
        return 0.0
    for step in GRIDS if len(later) >= 8 else DECIMALS:
        ratio = later / step
        # Losses stored as 32-bit floats are this far from their decimals.
        if np.all(np.abs(ratio - np.round(ratio)) < np.maximum(1e-6, 1e-7 * ratio)):
            return step
    return 0.0


def _rounded(curve: LoggedCurve, margin: float) -> str:
    step = resolution(curve.finite)
    if step <= ROUNDING_SHARE * margin * (1 + 1e-9):
        return ""
    return (
        f"its losses are rounded to {step:g}, too coarse for a margin of {margin:g}. Log more digits, or give a margin "
        f"of at least {step / ROUNDING_SHARE:g}."
    )


def _padded(curve: LoggedCurve) -> str:
    """Return the problem of a stretch of equal values, or of values on one straight line, that is no coincidence."""
    values, x = np.where(np.isfinite(curve.values), curve.values, math.nan), curve.x
    begin, count = _longest(np.diff(values) == 0)
    if count >= 2 and _by_chance(values, begin, count) < CHANCE:
        return (
            f"repeats the value {values[begin]:.6g} {count + 1} times from {x[begin]:,.12g} on: filled in, not "
            "measured. Remove the repeated rows."
        )
    slopes = np.diff(values) / np.diff(x)
    bend, scale = np.abs(np.diff(slopes)), np.abs(slopes[1:])
    begin, count = _longest((bend <= 1e-6 * scale) & (scale > 0)) if resolution(curve.finite) == 0 else (0, 0)
    if count >= 3:
        return (
            f"its values from {x[begin]:,.12g} to {x[begin + count + 1]:,.12g} are on a straight line: filled in, not "
            "measured. Remove these rows."
        )
    return ""


def _longest(true: np.ndarray) -> tuple[int, int]:
    """Return (first index, length) of the longest run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], true.astype(int), [0]])))
    begins, ends = edges[::2], edges[1::2]
    if not len(begins):
        return 0, 0
    longest = int(np.argmax(ends - begins))
    return int(begins[longest]), int(ends[longest] - begins[longest])


def _by_chance(values: Column, begin: int, count: int) -> float:
    """Return the probability that rounding alone makes so many neighbors equal, by the changes next to them."""
    changes = np.abs(np.diff(values))
    near = np.concatenate([changes[max(0, begin - 10) : begin], changes[begin + count : begin + count + 10]])
    near = near[np.isfinite(near) & (near > 0)]
    if not len(near):
        return 0.0
    equal = min(0.9, max(resolution(values[np.isfinite(values)]), 1e-7) / float(np.median(near)))
    return float(len(values) * equal**count)


def _gap_in_tail(curve: LoggedCurve) -> str:
    late = curve.x[-1] - 0.2 * (curve.x[-1] - curve.x[0])
    for low, high in curve.gaps:
        if high > late:
            return (
                f"has no values between {low:,.12g} and {high:,.12g}, near its end, where losses are compared. Restore "
                f"them, or compare up to there with --until {low:.12g}."
            )
    return ""


def stated_problems(curves: Sequence[LoggedCurve]) -> list[Problem]:
    """Return problems of stated facts: the kinds and units of the losses and the tokenizers of all logs must agree."""
    problems = []
    for what, of in (("a {} loss", lambda curve: curve.loss.kind), ("{}", lambda curve: curve.loss.unit)):
        groups: dict[str, LoggedCurve] = {}
        for curve in curves:
            groups.setdefault(of(curve), curve)
        if len(groups) > 1:
            (one, first), (other, second) = list(groups.items())[:2]
            text = (
                f"column {second.loss.name} is {what.format(other)}, but {first.loss.name} of {first.log.address} is "
                f"{what.format(one)}. Compare the same: name one column with --metric."
            )
            problems.append(Problem(second.log.address, text))
    if all(curve.loss.unit == "bits per byte" for curve in curves):
        return problems
    for key in ("tokenizer", "vocab_size"):
        known = [curve for curve in curves if key in curve.table.settings]
        for curve in known[1:]:
            ours, theirs = curve.table.settings[key], known[0].table.settings[key]
            if ours != theirs:
                text = (
                    f"states {key} {ours}, but {known[0].log.address} states {theirs}: losses per token of two "
                    "tokenizers are not comparable. Log bits per byte on both sides (a column bpb, or bytes_per_token)."
                )
                problems.append(Problem(curve.log.address, text))
                break
    return problems


def label_problems(curves: Sequence[LoggedCurve]) -> list[Problem]:
    """Return problems of files whose names contain the name of another arm, and not that of their own."""
    problems = []
    arms = list(dict.fromkeys(curve.log.arm for curve in curves))
    for curve in curves:
        path = Path(curve.log.address)
        for place in (path.stem, path.parent.name):
            named = {arm for arm in arms if len(arm) > 1 and _has_word(place, arm)}
            if curve.log.arm in named:
                break
            if named:
                text = (
                    f"is named {curve.log.label}, but '{place}' has the name of {sorted(named)[0]}. Correct the "
                    "arm, or rename the file."
                )
                problems.append(Problem(curve.log.address, text))
                break
    return problems


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", text) is not None
