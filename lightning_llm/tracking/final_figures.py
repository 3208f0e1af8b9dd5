"""Summary of a run's step metrics: figures for `summary.json`, curves of `loss.png`, the rule for stalled runs."""

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from lightning_llm.tracking.files import Record

SMOOTHING_SHARE = 0.02


def final_figures(records: Iterable[Record]) -> dict[str, Any]:
    """Return the figures of a run for `summary.json`, from its `records`. Keys without a measurement are absent.

    Medians, `data_wait_share` (share of the steps' time spent waiting for batches) and `step_jitter` (95th percentile
    of the step time over the median, minus 1) ignore records with `timing_warmup`, unless there are no others.
    `useful_seconds` is the time of steps with an update; `event/<kind>` counts steps with an event.
    """
    steps: list[Record] = []
    validations: list[Record] = []
    events: Counter[str] = Counter()
    for record in records:
        if "event" in record:
            events[f"event/{record['event']}"] += 1
        if record.get("event_action") != "stop":  # that step was not made
            (validations if "val_loss" in record else steps).append(record)
    figures: dict[str, Any] = dict(sorted(events.items()))
    if steps:
        figures |= {key: steps[-1][key] for key in ("step", "tokens", "loss") if key in steps[-1]}
        if "loss_above_uniform" in steps[0]:
            figures["first_loss_above_uniform"] = steps[0]["loss_above_uniform"]
        figures["train_seconds"] = sum(record.get("step_seconds", 0.0) for record in steps)
        figures["useful_seconds"] = sum(r.get("step_seconds", 0.0) for r in steps if not r.get("skipped"))
        figures |= _steadiness([record for record in steps if not record.get("timing_warmup")] or steps)
    if validations:
        best = min(validations, key=lambda record: (math.isnan(record["val_loss"]), record["val_loss"]))
        last = validations[-1].items()
        figures |= {key: value for key, value in last if key.startswith(("val_loss", "forgetting/"))}
        figures |= {"best_val_loss": best["val_loss"], "best_val_step": best["step"]}
    for key in ("tokens_per_second", "step_seconds", "data_seconds", "tflops_per_second", "mfu"):
        figures |= _median_of(steps, key)
    for key in sorted({key for record in steps for key in record if key.endswith("_peak_bytes")}):
        figures[key] = max(record[key] for record in steps if key in record)
    return figures


def _steadiness(steps: list[Record]) -> dict[str, float]:
    """Return the jitter of the step time and the share of it spent waiting for data."""
    seconds = sorted(record["step_seconds"] for record in steps if "step_seconds" in record)
    waiting = [(record["data_seconds"], record["step_seconds"]) for record in steps if "data_seconds" in record]
    figures = {}
    if len(seconds) > 1:
        figures["step_jitter"] = quantiles(seconds, n=20, method="inclusive")[-1] / median(seconds) - 1
    if waiting:
        figures["data_wait_share"] = sum(data for data, _ in waiting) / sum(whole for _, whole in waiting)
    return figures


def _median_of(steps: list[Record], key: str) -> dict[str, float]:
    values = [record[key] for record in steps if key in record and not record.get("timing_warmup")]
    values = values or [record[key] for record in steps if key in record]
    return {f"{key}_median": median(values)} if values else {}


def draw_losses(records: Iterable[Record], path: Path, title: str) -> None:
    """Draw the training loss (each step, and its running mean) and the validation losses of `records` to `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not pyplot: it keeps global state
    from matplotlib.figure import Figure

    losses: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for key, value in record.items():
            if key == "loss" or key.startswith("val_loss"):
                losses.setdefault(key, []).append((record["step"], value))
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="optimizer step", ylabel="loss (nats per token)", title=title)
    train = losses.pop("loss", [])
    if train:
        axes.plot(*zip(*train, strict=True), color="C0", alpha=0.3, linewidth=0.8)
        axes.plot(*zip(*_running_mean(train), strict=True), color="C0", label="training, running mean")
    by_source = [key for key in losses if key.startswith("val_loss/")]
    if len(by_source) == 1 and losses[by_source[0]] == losses.get("val_loss"):
        del losses[by_source[0]]  # the only source's curve would hide the equal total
    for index, (key, points) in enumerate(sorted(losses.items()), start=1):
        axes.plot(*zip(*points, strict=True), color=f"C{index}", marker="o", markersize=3, label=key)
    if train or losses:
        axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, format="png")


def _running_mean(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return an exponential running mean over about `SMOOTHING_SHARE` of the points, without bias at the start."""
    keep = 1 - 1 / max(1.0, SMOOTHING_SHARE * len(points))
    total = weight = 0.0
    smooth = []
    for step, value in points:
        if math.isfinite(value):
            total, weight = keep * total + value, keep * weight + 1
        smooth.append((step, total / weight if weight else math.nan))
    return smooth


STALLED_STEPS = 10
STALLED_SHARE = 100
"""A run is stalled if its last steps / STALLED_SHARE were skipped, see `stalled`."""


def stalled(steps: int, skipped_in_a_row: int) -> bool:
    """Return whether a run of `steps` steps skipped the updates of all its last max(10, 1 %) steps.

    `skipped_in_a_row`: number of consecutive skipped updates at the end. A loss scale that starts too high skips only a
    few updates.
    """
    return steps > 0 and skipped_in_a_row >= min(steps, max(STALLED_STEPS, math.ceil(steps / STALLED_SHARE)))
