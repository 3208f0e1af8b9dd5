"""State of a run (finished, diverged, failed, stopped, running, new), read from its folder. Imports no torch."""

import os
from pathlib import Path
from typing import Any, Literal

from lightning_llm.base.errors import ConfigError
from lightning_llm.tracking.files import ended_not_finite, summary_of
from lightning_llm.tracking.liveness import await_sign, has_died
from lightning_llm.tracking.reading import read_run

State = Literal["new", "finished", "diverged", "failed", "stopped", "running"]
SETTLED: tuple[State, State] = ("finished", "diverged")
"""Nothing is left to do: a run that diverged would do so again."""
JOB_VARIABLE = "LIGHTNING_LLM_SWEEP_JOB"
"""Set for a job that speaks on the terminal of its sweep."""


def is_among_jobs() -> bool:
    """Return whether the sweep says on this terminal what holds for all its jobs, so that one says its own alone."""
    return JOB_VARIABLE in os.environ


def state_of(folder: Path) -> State:
    """Return what `summary.json` in `folder` says; a run whose process is gone is "stopped", whatever it says.

    So is one whose summary is damaged: it did begin, and nothing says that it came to an end.
    """
    try:
        summary = summary_of(folder)
    except ValueError:
        return "stopped"
    if not summary:
        return "new"
    if summary.get("status") == "running" and not has_died(folder, summary.get("process", "")):
        return "running"
    if _diverged(folder, summary):
        return "diverged"
    return summary["status"] if summary.get("status") in ("finished", "failed") else "stopped"


def _diverged(folder: Path, summary: dict[str, Any]) -> bool:
    """Return whether the run lost its loss, as `compare` sees it: not finite, or ended by spikes.policy over it."""
    if ended_not_finite(summary):
        return True
    if summary.get("status") != "failed" or not str(summary.get("detail", "")).startswith("SpikeStop"):
        return False
    try:
        return read_run(folder).lost_its_loss
    except ConfigError:  # its records are damaged: `compare` says so
        return False


def settled_state(folder: Path) -> State:
    """Return `state_of`, "running" only on a sign of life: one from another machine is waited for, for minutes."""
    state = state_of(folder)
    if state == "running" and not await_sign(folder, summary_of(folder).get("process", "")):
        return state_of(folder)
    return state


def detail_of(folder: Path) -> str:
    """Return the last line of why the run ended, "" where nothing says so; or that its summary is damaged."""
    try:
        lines = str(summary_of(folder).get("detail", "")).splitlines()
    except ValueError as error:
        return str(error)
    return lines[-1] if lines else ""


def mlflow_facts(folder: Path) -> dict[str, Any]:
    """Return what the run's summary says of MLflow, {} where it says nothing or is damaged."""
    try:
        return dict(summary_of(folder).get("mlflow") or {})
    except ValueError:
        return {}
