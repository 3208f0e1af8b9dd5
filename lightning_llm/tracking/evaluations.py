"""Evaluations of a run: `evaluation/step=N.json` with the metrics of its weights after N steps. Imports no torch.

    {"step": 4, "metrics": {"hellaswag/acc": {"value": 0.31, "higher_is_better": true, "of": "...", ...}, ...}}

`of` identifies the data (the data's fingerprint, or the task's version and limit). Numbers of a metric are comparable
only if it is equal. `requests`: {digest of a request: its metrics}, of requests with all their metrics in the file.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lightning_llm.tracking.files import NON_FINITE, summary_of, write_json

FOLDER = "evaluation"
PREFIX = "eval/"
"""Prefix of a metric's name in summary.json, MLflow and `compare --metric`."""

Metrics = dict[str, dict[str, Any]]


def read_evaluations(folder: Path) -> dict[int, Metrics]:
    """Return {step: metrics} of the evaluations in a run's folder, by ascending step.

    Raises ValueError with the name of a damaged file.
    """
    found: dict[int, Metrics] = {}
    for file in (folder / FOLDER).glob("step=*.json"):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            metrics = {name: {**each, "value": _number(each["value"])} for name, each in content["metrics"].items()}
            found[int(content["step"])] = metrics
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            text = f"{file} is damaged ({type(error).__name__}: {error}). Remove it and evaluate again"
            raise ValueError(text) from error
    return dict(sorted(found.items()))


def comparable(evaluations: Mapping[int, Metrics], data: Mapping[str, Any] | None = None) -> dict[int, Metrics]:
    """Return `evaluations` ({step: metrics}) with only those values of a metric that were measured on the same data.

    `data`: {metric: identity of its data ("of")}; default: that of each metric's newest step.
    """
    wanted = {name: each.get("of") for _, its in sorted(evaluations.items()) for name, each in its.items()}
    wanted |= data or {}
    return {
        step: {name: each for name, each in its.items() if each.get("of") == wanted[name]}
        for step, its in evaluations.items()
    }


def _number(value: Any) -> float:
    value = NON_FINITE.get(value, value) if isinstance(value, str) else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{str(value)[:40]!r} is not a number")
    return float(value)


def record_evaluation(
    folder: Path,
    step: int,
    metrics: Mapping[str, Mapping[str, Any]],
    ended: bool,
    unknown: Collection[str] = (),
    request: str | None = None,
) -> Path:
    """Add `metrics` to those of `step` atomically, replacing those of the same names; return the file.

    Earlier values of metrics that are now `unknown` are removed. The metrics of the newest step are also written to the
    summary as "eval/NAME" if the run has `ended`; otherwise the training process owns the summary. `request`: digest of
    the request that measured them. Raises ValueError if an existing file is damaged.
    """
    known = read_evaluations(folder)
    earlier = {name: each for name, each in known.get(step, {}).items() if name not in unknown}
    known[step] = {**earlier, **{name: dict(each) for name, each in metrics.items()}}
    file = folder / FOLDER / f"step={step}.json"
    file.parent.mkdir(exist_ok=True)
    replaced = {*metrics, *unknown}
    whole = {each: names for each, names in recorded_requests(folder, step).items() if not replaced & {*names}}
    whole |= {request: sorted(metrics)} if request else {}
    write_json(file, {"step": step, "metrics": known[step], "requests": whole})
    summary = summary_of(folder)
    if summary and ended:
        kept = {key: value for key, value in summary.items() if not key.startswith(PREFIX)}
        newest = max(known)
        values = {f"{PREFIX}{name}": each["value"] for name, each in sorted(known[newest].items())}
        write_json(folder / "summary.json", {**kept, f"{PREFIX}step": newest, **values})
    return file


def recorded_requests(folder: Path, step: int) -> dict[str, list[str]]:
    """Return {digest of a request: names of its metrics} of the requests that were completely evaluated at `step`."""
    file = folder / FOLDER / f"step={step}.json"
    found = json.loads(file.read_text(encoding="utf-8")).get("requests") if file.is_file() else None
    return {str(each): list(names) for each, names in found.items()} if isinstance(found, dict) else {}


def evaluation_points(folder: Path) -> list[dict[str, Any]]:
    """Return a record for each evaluated step: its `step`, and each metric's number as "eval/NAME"."""
    return [
        {"step": step, **{f"{PREFIX}{name}": each["value"] for name, each in metrics.items()}}
        for step, metrics in comparable(read_evaluations(folder)).items()
    ]
