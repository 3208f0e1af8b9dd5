"""The loss curve of one log: its points in order, tokens, gaps and restarts; the line that reports how it was read."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.compare.curves.columns import (
    FEWEST_POINTS,
    LossColumn,
    stated_tokens_per_step,
    step_column,
    token_column,
)
from lightning_llm.compare.curves.named import NamedLog
from lightning_llm.compare.curves.table import Column, LoggedTable
from lightning_llm.compare.format import short

GAP = 3.5
"""A distance of two points that is so many times the median and the previous distance is a gap."""
AGREE = 1.1
"""Largest ratio of the tokens that a log counts to those that its settings or --tokens-per-step give."""


@dataclass(frozen=True)
class LoggedCurve:
    """The loss curve of one log: `values` over `x`, float64 [points], `x` ascending on `axis`.

    Values are infinite where the loss was not finite. `tokens`: seen at each point, None if not known. `restarts`:
    values of x at which the run was resumed and repeated points, of which the later ones count.
    """

    log: NamedLog
    table: LoggedTable
    loss: LossColumn
    axis: str
    x: Column
    values: Column
    tokens: Column | None = None
    restarts: tuple[float, ...] = ()

    @property
    def axis_words(self) -> str:
        """The axis as a noun: "steps", "tokens", or the name of a column."""
        return "steps" if self.axis == "step" else self.axis

    @property
    def diverged(self) -> bool:
        """Whether the last value is not finite."""
        return not math.isfinite(self.values[-1])

    @property
    def finite(self) -> Column:
        """The finite values, in order."""
        return self.values[np.isfinite(self.values)]

    @cached_property
    def spacing(self) -> float:
        """The median distance between neighboring points on the axis."""
        return float(np.median(np.diff(self.x)))

    @cached_property
    def gaps(self) -> list[tuple[float, float]]:
        """The gaps in the curve, each as (last x before it, first x after it)."""
        steps = np.diff(self.x)
        usual = np.maximum(np.concatenate([[0.0], steps[:-1]]), self.spacing)
        return [(float(self.x[at]), float(self.x[at + 1])) for at in np.flatnonzero(steps > GAP * usual)]

    def until(self, last: float | None) -> "LoggedCurve":
        """Return the curve up to x = `last`."""
        if last is None:
            return self
        kept = self.x <= last
        tokens = None if self.tokens is None else self.tokens[kept]
        return replace(self, x=self.x[kept], values=self.values[kept], tokens=tokens)

    @property
    def audit(self) -> str:
        """One line that reports how the log was read: format, column, points, range, gaps, seed and notes."""
        parts = [
            f"{self.table.format}, {self.loss.text}",
            f"{len(self.x)} points",
            f"{self.axis_words} {self.x[0]:,.12g} to {self.x[-1]:,.12g} (every {self.spacing:,.6g})",
        ]
        if self.tokens is not None and self.axis != "tokens":
            parts.append(f"tokens {short(round(self.tokens[0]))} to {short(round(self.tokens[-1]))}")
        gaps = ", ".join(f"{low:,.12g} to {high:,.12g}" for low, high in self.gaps[:3])
        parts.append(f"gaps: {gaps}{' ...' if len(self.gaps) > 3 else ''}" if self.gaps else "no gaps")
        if self.restarts:
            parts.append(f"resumed at {', '.join(f'{each:,.12g}' for each in self.restarts[:5])}")
        if infinite := int(np.isinf(self.values).sum()):
            parts.append(f"{infinite} values not finite")
        parts.append("seed not known" if self.log.seed is None else f"seed {self.log.seed}")
        return " ".join([f"{self.log.label}  {self.log.address}: {', '.join(parts)}.", *self.table.notes])

    def as_data(self) -> dict[str, Any]:
        """Return the entry of the log in `compare.json`."""
        return {
            "arm": self.log.arm,
            "seed": self.log.seed,
            "source": self.log.address,
            "format": self.table.format,
            "column": self.loss.name,
            "kind": self.loss.kind,
            "unit": self.loss.unit,
            "axis": self.axis,
            "points": len(self.x),
            "first": float(self.x[0]),
            "last": float(self.x[-1]),
            "tokens": None if self.tokens is None else round(float(self.tokens[-1])),
            "gaps": [list(each) for each in self.gaps],
            "restarts": list(self.restarts),
            "not_finite": int(np.isinf(self.values).sum()),
            "settings": {key: str(value) for key, value in sorted(self.table.settings.items())},
            "notes": list(self.table.notes),
        }


def curve_of(
    log: NamedLog, table: LoggedTable, loss: LossColumn, axis: str, tokens_per_step: float | None
) -> LoggedCurve:
    """Return the curve of the column `loss` over `axis`, with its points in order.

    Args:
        axis: "step", "tokens" or a column.
        tokens_per_step: from --tokens-per-step; None: from the log, if it states them.

    Raises:
        ConfigError: points have no place on the axis, are not in order, or occur twice; or too few points.
    """
    log = _with_seed(log, table)
    step = step_column(table, loss.name)
    tokens = _tokens(log, table, step, tokens_per_step, axis)
    x = {"step": table.columns.get(step or ""), "tokens": tokens}.get(axis, table.columns.get(axis))
    if x is None:
        raise ConfigError(Problem(log.address, f"has no axis '{axis}'. Choose a column with --x COLUMN."))
    y = table.columns[loss.name]
    there = np.flatnonzero(~np.isnan(y))
    if lost := np.flatnonzero(~np.isfinite(x[there])).tolist():
        text = f"{len(lost)} of {len(there)} values of {loss.name} have no {axis}. Repair these rows, or choose --x."
        raise ConfigError(Problem(log.address, text))
    if len(there) < FEWEST_POINTS:
        text = f"has {len(there)} points of {loss.name}, and a curve needs at least {FEWEST_POINTS}. Log it more often."
        raise ConfigError(Problem(log.address, text))
    if axis in ("step", "tokens") and x[there].min() < 0:
        raise ConfigError(Problem(log.address, f"has a negative {axis}. Repair the log, or choose the axis with --x."))
    order, restarts = _in_order(log, loss, x[there], y[there])
    rows = there[order]
    _against_missing_end(log, loss, x, x[rows])
    seen = None if tokens is None or np.isnan(tokens[rows]).any() else tokens[rows]
    return LoggedCurve(log, table, loss, axis, x[rows], y[rows], seen, restarts)


def _with_seed(log: NamedLog, table: LoggedTable) -> NamedLog:
    """Return the log with the seed that its file states, if it has none. Raises ConfigError if the two differ."""
    stated = table.settings.get("seed")
    if not isinstance(stated, int) or isinstance(stated, bool):
        return log
    if log.seed is None:
        return replace(log, seed=stated)
    if log.seed != stated:
        text = f"is named seed {log.seed}, but states seed {stated}. Name it {log.arm}/{stated}, or name the right log."
        raise ConfigError(Problem(log.address, text))
    return log


def _tokens(log: NamedLog, table: LoggedTable, step: str | None, given: float | None, axis: str) -> Column | None:
    """Return the tokens seen at each row, by the column that counts them or by steps; None if not known.

    Raises:
        ConfigError: the count contradicts the tokens per step, or is the `axis` and below the steps.
    """
    counted, stated = token_column(table), given or stated_tokens_per_step(table)
    steps = None if step is None else table.columns[step]
    if counted is None:
        return None if steps is None or stated is None else steps * stated
    found = table.columns[counted]
    both = np.zeros(len(found), bool) if steps is None else np.isfinite(found) & np.isfinite(steps)
    if steps is None or not both.any():
        return found
    last = np.flatnonzero(both)[-1]
    if steps[last] > 0 and found[last] < steps[last]:
        if axis != "tokens":
            return None if stated is None else steps * stated
        text = f"column {counted} is {found[last]:g} at step {steps[last]:g}, so it counts no tokens. Use --x step."
        raise ConfigError(Problem(log.address, text))
    if stated is not None and steps[last] > 0 and found[last] > 0:
        ratio = found[last] / (steps[last] * stated)
        if not 1 / AGREE < ratio < AGREE:
            text = (
                f"column {counted} has {found[last]:,.12g} tokens at step {steps[last]:,.12g}, but {stated:,.12g} "
                "tokens per step are stated. Correct --tokens-per-step, or remove the column that is wrong."
            )
            raise ConfigError(Problem(log.address, text))
    known, first = np.unique(steps[both], return_index=True)
    filled = np.interp(steps, known, found[both][first], left=math.nan, right=math.nan)
    return np.where(np.isnan(found), filled, found)


def _in_order(log: NamedLog, loss: LossColumn, x: Column, y: Column) -> tuple[list[int], tuple[float, ...]]:
    """Return (indices of the points that count, x of each restart).

    A run that is resumed logs the points after its checkpoint again, with other values: then the later ones count.

    Raises:
        ConfigError: the points are not in order in any other way.
    """
    kept: list[int] = []
    restarts: list[float] = []
    ends = [*np.flatnonzero(np.diff(x) <= 0), len(x) - 1]
    begin = 0
    for end in ends:
        part = list(range(begin, int(end) + 1))
        begin = int(end) + 1
        repeated = [at for at in kept if x[at] >= x[part[0]]]
        if repeated:
            _against_disorder(log, loss, x, y, kept, repeated, part)
            restarts.append(float(x[part[0]]))
        kept = [at for at in kept if x[at] < x[part[0]]] + part
    return kept, tuple(restarts)


def _against_disorder(
    log: NamedLog,
    loss: LossColumn,
    x: Column,
    y: Column,
    kept: Sequence[int],
    repeated: Sequence[int],
    part: Sequence[int],
) -> None:
    """Raise ConfigError unless `part` continues the `kept` points from a checkpoint, after which it repeats them."""
    again, last = x[part[0]], x[kept[-1]]
    if again <= x[kept[0]]:
        text = f"begins again at {again:,.12g} after {last:,.12g}: it has two runs, or shuffled rows. Split or sort it."
    elif not {x[at] for at in repeated} <= {x[at] for at in part}:
        text = f"has {again:,.12g} after {last:,.12g}: its rows are shuffled or of several runs. Log them in order."
    else:
        values = {x[at]: y[at] for at in part}
        if any(values[x[at]] != y[at] for at in repeated):
            if len(part) == 1 and len(repeated) == 1:
                text = f"has two values of {loss.name} at {again:,.12g}: of several ranks or runs. Keep those of one."
                raise ConfigError(Problem(log.address, text))
            return
        text = f"has the values from {again:,.12g} to {last:,.12g} twice. Remove the repeated rows."
    raise ConfigError(Problem(log.address, text))


def _against_missing_end(log: NamedLog, loss: LossColumn, every: Column, x: Column) -> None:
    """Raise ConfigError if the log continues after its last loss for longer than the usual spacing of losses."""
    end = float(np.nanmax(np.where(np.isfinite(every), every, math.nan)))
    usual = float(np.diff(x)[-5:].max())
    if end - x[-1] > 1.5 * usual:
        text = (
            f"has its last value of {loss.name} at {x[-1]:,.12g}, but rows up to {end:,.12g}. If the run diverged, "
            "write nan there (pandas: to_csv(na_rep='nan')); else restore the values, or use --until."
        )
        raise ConfigError(Problem(log.address, text))
