"""Curves of other trainers as runs, so that they are paired and judged as the project's own."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lightning_llm.compare.curves.common_axis import CommonAxis
from lightning_llm.compare.curves.curve import LoggedCurve
from lightning_llm.compare.curves.smoothness import FEWEST, noise
from lightning_llm.compare.curves.spikes import count_spikes
from lightning_llm.compare.runs.losses import LEARNED_BELOW
from lightning_llm.tracking.reading import Run

ARM = "arm"
STATED = ("global_batch_size", "sequence_length", "tokens_per_step", "total_steps", "world_size")
"""Settings that make two runs not comparable, if all logs state them and they differ."""
BEGINNING = 0.1
"""Share of the points at the beginning, from which a baseline must have fallen to have learned."""


def with_seeds(curves: Sequence[LoggedCurve]) -> list[LoggedCurve]:
    """Return the curves, those without seeds numbered in the order of each arm: independent runs in any order."""
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
    """Return a finished run of each curve, with its values on `axis` as validations of `metric`."""
    stated = [key for key in STATED if all(key in curve.table.settings for curve in curves)]
    return [_run_of(curve, axis, metric, margin, stated) for curve in curves]


def _run_of(curve: LoggedCurve, axis: CommonAxis, metric: str, margin: float, stated: Sequence[str]) -> Run:
    values = axis.values_of(curve)
    known = [(key, float(value)) for key, value in zip(axis.keys, values, strict=True) if not math.isnan(value)]
    tokens = {key: 0 for key, _ in known}
    if curve.tokens is not None:
        seen = np.interp(axis.points, curve.x, curve.tokens)
        tokens |= {key: round(float(seen[at])) for at, key in enumerate(axis.keys) if key in tokens}
    unit = {"step": "steps", "tokens": "tokens"}.get(curve.axis, curve.axis)
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
        logged_on=unit if axis.scale == 1 else f"{unit} x {axis.scale}",
    )


def _learned_below(curve: LoggedCurve, margin: float) -> float:
    """Return the loss below which the curve has fallen since its beginning, by more than the margin and its noise."""
    values = curve.finite
    if not len(values):
        return 0.0
    early = values[: max(1, int(BEGINNING * len(values)))]
    scatter = noise(values[len(values) // 5 :]) if len(values) >= FEWEST else 0.0
    return float(early.mean() - margin - 3 * scatter * math.sqrt(2 / len(early)))
