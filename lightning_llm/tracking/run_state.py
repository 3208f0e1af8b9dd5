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
"""States in which nothing is left to do. A run that diverged would do so again."""
JOB_VARIABLE = "LIGHTNING_LLM_SWEEP_JOB"
"""Environment variable of a job that prints to the terminal of its sweep."""


def is_among_jobs() -> bool:
    """Return whether this is a job of a sweep on its terminal, which should not repeat lines common to all jobs."""
    return JOB_VARIABLE in os.environ


def state_of(folder: Path) -> State:
    """Return the state of the run in `folder`, from `summary.json` and the liveness of its process.

    A run is "stopped" if its process has ended without writing a status, or if its summary is damaged.
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
    """Return whether the run diverged, as in `compare`: not finite, or ended by spikes.policy because of it."""
    if ended_not_finite(summary):
        return True
    if summary.get("status") != "failed" or not str(summary.get("detail", "")).startswith("SpikeStop"):
        return False
    try:
        return read_run(folder).diverged
    except ConfigError:  # its records are damaged, which `compare` reports
        return False


def settled_state(folder: Path) -> State:
    """Return `state_of`, but "running" only after a heartbeat, which may take minutes for another machine."""
    state = state_of(folder)
    if state == "running" and not await_sign(folder, summary_of(folder).get("process", "")):
        return state_of(folder)
    return state


def detail_of(folder: Path) -> str:
    """Return the last line of the reason why the run ended, or that its summary is damaged; "" if unknown."""
    try:
        lines = str(summary_of(folder).get("detail", "")).splitlines()
    except ValueError as error:
        return str(error)
    return lines[-1] if lines else ""


def mlflow_facts(folder: Path) -> dict[str, Any]:
    """Return the facts about MLflow in the run's summary; {} if there are none or it is damaged."""
    try:
        return dict(summary_of(folder).get("mlflow") or {})
    except ValueError:
        return {}
