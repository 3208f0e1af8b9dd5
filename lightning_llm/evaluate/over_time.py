"""Evaluation over time: evaluate every checkpoint of a run; table and picture of its metrics over the steps.

Each checkpoint is written when it is done (`evaluation/step=N.json`), so an interrupted evaluation continues with the
next one. `compare --metric eval/NAME` reads the same files as a curve.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.evaluate.evaluation import AS_CODES, Evaluation
from lightning_llm.evaluate.request import EvaluationRequest
from lightning_llm.run.subject import Subject
from lightning_llm.tracking.evaluations import FOLDER, Metrics, comparable, read_evaluations, recorded_requests
from lightning_llm.train.checkpoint.manifest import DamagedError, open_checkpoint, step_folders, step_of
from lightning_llm.train.checkpoint.verification import content_damage
from lightning_llm.train.checkpoint.weights import CheckpointWeights

PICTURE = "trend.svg"
STANDARD_ERRORS = 1.96
"""Half width of a drawn interval, in standard errors: 95 % if the error is normal."""
PER_BYTE = ("bits_per_byte", "byte_perplexity")
COLUMNS = 3
MOST_PANELS = 30
SHOWN = 8
"""Most steps in a note."""


@dataclass(frozen=True)
class Trend:
    """Evaluations of a run's checkpoints: `metrics`, {step: metrics}.

    They include earlier evaluations of checkpoints that were deleted since, if measured on the same data.
    `step_tokens`: tokens of one step; `names`: the metrics of this request. `evaluated`: steps evaluated now;
    `skipped`: steps that the same request evaluated before; `deleted`: saved steps without a checkpoint today;
    `damaged`: {checkpoint folder: reason}.
    """

    folder: Path
    step_tokens: int
    names: tuple[str, ...]
    metrics: dict[int, Metrics]
    evaluated: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()
    deleted: tuple[int, ...] = ()
    damaged: dict[Path, str] = field(default_factory=dict)

    @property
    def shown(self) -> tuple[str, ...]:
        """Names of the metrics in the table and the picture.

        Losses per byte are left out; with a single validation source also its own loss, which equals `val_loss`.
        """
        of_model = {name: AS_CODES.sub("", name) for name in self.names}
        sources = [name for name in of_model.values() if name.startswith("val_loss/")]
        hidden = (*PER_BYTE, "val_loss/") if len(sources) == 1 else PER_BYTE
        return tuple(name for name, plain in of_model.items() if not plain.startswith(hidden))

    @property
    def picture(self) -> Path:
        """Path of the picture of the trend, an SVG file."""
        return self.folder / FOLDER / PICTURE

    @property
    def notes(self) -> list[str]:
        """Lines that name the checkpoints that were not evaluated, and why."""
        found = []
        if self.skipped:
            found.append(f"note   already evaluated by this request: steps {_listed(self.skipped)}")
        if self.deleted:
            found.append(
                f"note   deleted by retention, so not evaluated: steps {_listed(self.deleted)}. Keep checkpoints with "
                "checkpoint.keep_every or checkpoint.keep_last, or use callbacks=evaluate"
            )
        return found

    def as_data(self) -> dict[str, Any]:
        """Return the data that --json prints."""
        steps = [
            {"step": step, "tokens": step * self.step_tokens, "evaluated": step in self.evaluated, "metrics": metrics}
            for step, metrics in self.metrics.items()
        ]
        return {
            "run": str(self.folder),
            "steps": steps,
            "deleted": list(self.deleted),
            "damaged": [str(folder) for folder in self.damaged],
            "picture": str(self.picture),
        }


def trend_problems(path: Path | None, *, average: Sequence[Any], ensemble: Sequence[Any], output: Any) -> list[Problem]:
    """Return a problem for each other argument of `evaluate` that cannot be used with --all-checkpoints."""
    given = {"--average": average, "--ensemble": ensemble, "--output": output}
    text = "cannot be used with --all-checkpoints, which writes into the run's evaluation/. Remove it."
    problems = [Problem(flag, text) for flag, value in given.items() if value]
    if path is None or not (path.expanduser() / "config.yaml").is_file():
        text = f"needs the folder of a run as PATH, but PATH is {path or 'missing'}. Name one."
        problems.append(Problem("--all-checkpoints", text))
    return problems


def evaluate_over_time(
    request: EvaluationRequest, evaluate: Callable[[EvaluationRequest], Evaluation], say: Callable[[str], None]
) -> Trend:
    """Evaluate every checkpoint of a run, draw the trend into the run's folder, and return it.

    Args:
        request: the evaluation of the run's newest checkpoint; the others are evaluated in the same way.
        evaluate: evaluates one checkpoint and writes its results into the run's folder.
        say: prints a line per checkpoint.

    Raises:
        ConfigError: an input of a checkpoint cannot be read.
    """
    newest = request.subjects[0]
    folder = newest.folder
    evaluated, skipped, damaged = [], [], dict[Path, str]()
    names: dict[str, None] = {}
    for path in reversed(step_folders(folder / "checkpoints")):
        try:
            one = replace(request, subjects=[_subject_at(newest, path)])
            known = recorded_requests(folder, step_of(path)).get(one.digest)
            if known is None:
                if damage := content_damage(open_checkpoint(path)):
                    raise DamagedError(*damage)
                known = list(evaluate(one).metrics)
                evaluated.append(step_of(path))
                say(f"step={step_of(path)} evaluated")
            else:
                skipped.append(step_of(path))
        except (DamagedError, ConfigError) as error:
            if not path.is_dir():  # the training run has deleted it since
                continue
            if isinstance(error, ConfigError) and not any(each.key.startswith(str(path)) for each in error.problems):
                raise
            damaged[path] = _first_line(error)
            continue
        names |= dict.fromkeys(known)
    saved = newest.config.checkpoint.every_steps
    there = {step_of(path) for path in step_folders(folder / "checkpoints")}
    last = max(there - {step_of(path) for path in damaged}, default=0)
    deleted = [step for step in range(saved, last, saved) if step not in there] if saved else []
    data = newest.config.data
    tokens = data.global_batch_size * data.sequence_length
    metrics = _on_same_data(folder, names, [*evaluated, *skipped])
    trend = Trend(folder, tokens, tuple(names), metrics, tuple(evaluated), tuple(skipped), tuple(deleted), damaged)
    if metrics:
        draw_trend(trend)
    return trend


def _on_same_data(folder: Path, names: Collection[str], steps: Collection[int]) -> dict[int, Metrics]:
    """Return the metrics `names` of every step, measured on the data of this request, which has evaluated `steps`."""
    every = read_evaluations(folder)
    data = {name: each.get("of") for step in sorted(steps) for name, each in every[step].items() if name in names}
    found = {
        step: {name: each for name, each in its.items() if name in names}
        for step, its in comparable(every, data).items()
    }
    return {step: its for step, its in found.items() if its}


def _subject_at(newest: Subject, folder: Path) -> Subject:
    plain = replace(newest, weights=CheckpointWeights(open_checkpoint(folder), newest.config.model))
    return plain.as_codes(newest.codes) if newest.codes else plain


def _first_line(error: Exception) -> str:
    text = error.problems[0].text if isinstance(error, ConfigError) else str(error)
    return (text.splitlines() or [type(error).__name__])[0].rstrip(".")


def _listed(steps: Sequence[int]) -> str:
    if len(steps) <= SHOWN:
        return ", ".join(map(str, steps))
    return f"{', '.join(map(str, steps[: SHOWN - 1]))}, ..., {steps[-1]} ({len(steps)} in all)"


def trend_table(trend: Trend) -> Table:
    """Return a table for the terminal: a row per step, each metric with its standard error if that is known."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("step", "tokens", *trend.shown):
        table.add_column(name, justify="right", overflow="fold")
    for step, metrics in trend.metrics.items():
        table.add_row(str(step), f"{step * trend.step_tokens:,}", *(_cell(metrics.get(name)) for name in trend.shown))
    return table


def _cell(metric: Mapping[str, Any] | None) -> str:
    if metric is None:
        return "-"
    error = metric.get("stderr")
    return f"{metric['value']:.4f}" + ("" if error is None else f" ± {error:.4f}")


def draw_trend(trend: Trend) -> None:
    """Draw each metric over tokens, with 95 % intervals if its standard error is known, to the file `trend.picture`."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # not pyplot: it keeps global state
    from matplotlib.figure import Figure

    names = trend.shown[:MOST_PANELS]
    rows = math.ceil(len(names) / COLUMNS)
    figure = Figure(figsize=(4 * min(len(names), COLUMNS), 2.6 * rows), layout="constrained")
    FigureCanvasSVG(figure)
    for place, name in enumerate(names, 1):
        axes = figure.add_subplot(rows, min(len(names), COLUMNS), place)
        points = [(step * trend.step_tokens, each[name]) for step, each in trend.metrics.items() if name in each]
        errors = [STANDARD_ERRORS * (each.get("stderr") or 0.0) for _, each in points]
        axes.errorbar(
            [tokens for tokens, _ in points], [each["value"] for _, each in points], errors,
            marker="o", markersize=3, linewidth=1, capsize=2,
        )  # fmt: skip
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("tokens", fontsize=8)
        axes.tick_params(labelsize=8)
    figure.savefig(trend.picture, metadata={"Date": None})
