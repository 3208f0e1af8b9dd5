"""Files of a sweep's folder: `sweep.json` (validated), and `search.json` with the trials of a search. No torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.tracking.files import write_json

FILE = "sweep.json"
LOCKS = ".claims"
"""Folder, next to `FILE`, of locks held by sessions of the sweep and its runs."""
DESIGN = "sequential"
"""Key in `FILE` of the looks declared before the first run (`compare.looks`)."""
SEARCH = "search"
"""Key in `FILE` of the declared terms of a search."""
OTHER_KEYS = "all_other_keys"
"""Key there of the hash of the settings that all trials share; the settings are below "derived"."""
TOLD = "mlflow_was_told"
"""Key in `FILE` of the end of the sweep as logged to MLflow; removed when the sweep is resumed."""
BEGINNING = (LOCKS, f"{FILE}.partial")
"""Content of the folder before `FILE` exists, while another session creates it."""


def checked_sweep(about: Any) -> dict[str, Any]:
    """Validate and return the content of `sweep.json`. Raises ValueError if it is damaged."""
    jobs = about.get("jobs") if isinstance(about, dict) else None
    if not isinstance(jobs, list) or not all(isinstance(job, dict) for job in jobs):
        raise ValueError("it is damaged: there is no list of jobs")
    numbers, keys = [job.get("number") for job in jobs], [job.get("key") for job in jobs]
    if not all(type(number) is int and number >= 0 for number in numbers) or len(set(numbers)) < len(numbers):
        raise ValueError("it is damaged: jobs without a unique number")
    if not all(isinstance(key, str) for key in keys) or len(set(keys)) < len(keys):
        raise ValueError("it is damaged: jobs without a unique key")
    words = [job.get("words") for job in jobs]
    if not all(isinstance(each, list) and all(isinstance(word, str) for word in each) for each in words):
        raise ValueError("it is damaged: jobs without words")
    if not all(type(job.get("seed")) is int and isinstance(job["kind"], str) for job in jobs if "kind" in job):
        raise ValueError("it is damaged: jobs with an invalid seed or kind")
    if not all(isinstance(job.get("branch_from"), str | None) for job in jobs):
        raise ValueError("it is damaged: jobs with an invalid branch_from")
    for key in (DESIGN, SEARCH):
        if key in about and not (isinstance(about[key], dict) and about[key]):
            raise ValueError(f"it is damaged: '{key}' is not a mapping of declared terms")
    return dict(about)


def read_sweep_file(folder: Path) -> dict[str, Any]:
    """Return the validated content of `sweep.json` in `folder`, {} if no sweep has begun there.

    Raises:
        ConfigError: the folder contains something else than a sweep.
    """
    if not folder.exists() or (folder.is_dir() and all(path.name in BEGINNING for path in folder.iterdir())):
        return {}
    try:
        return checked_sweep(json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        text = f"{folder} does not contain a valid sweep ({FILE}: {error}). Give another run.name, or move it away."
        raise ConfigError(Problem("run.name", text)) from error


def read_declared(folder: Path) -> dict[str, Any]:
    """Return the declared terms of the sweep in `folder`; {} if there are none or the file cannot be read."""
    known = _as_it_is(folder)
    return {key: known[key] for key in (DESIGN, SEARCH) if key in known}


def parent_of_sweep(folder: Path) -> str | None:
    """Return the id of the MLflow parent run of the sweep in `folder`; None if unknown."""
    return _as_it_is(folder).get("mlflow_run_id")


def title_of(run_folder: Path) -> str:
    """Return a title for a run: its folder's name, or for a sweep's job the sweep, its number and its overrides."""
    jobs = _as_it_is(run_folder.parent).get("jobs")
    for job in jobs if isinstance(jobs, list) else ():
        if isinstance(job, dict) and str(job.get("number")) == run_folder.name and isinstance(job.get("words"), list):
            return f"{run_folder.parent.name}/{run_folder.name}: {' '.join(map(str, job['words']))}"
    return run_folder.name


def _as_it_is(folder: Path) -> dict[str, Any]:
    """Return the content of the file in `folder` without validation; {} if it cannot be read (see `compare`)."""
    try:
        known = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


SEARCH_FILE = "search.json"
ENDED_AT = "ended_at"
"""Key in the row of a trial or arm with the `step` at which it was ended and its `gap` there; null if it was not."""


def write_results(folder: Path, trials: Sequence[Mapping[str, Any]], ended: Mapping[int, str]) -> None:
    """Write the trials, and {job number: reason} of jobs that were ended early and are not compared."""
    write_json(
        folder / SEARCH_FILE, {"trials": list(trials), "ended": {str(number): why for number, why in ended.items()}}
    )


def ended_by_search(folder: Path) -> dict[Path, str]:
    """Return {folder of a job: reason} of jobs that the search in `folder` ended early; {} without a search.

    Raises:
        ValueError: its file cannot be read.
    """
    return {(folder / number).resolve(): str(why) for number, why in _part(folder, "ended", dict).items()}


def read_trials(folder: Path) -> list[dict[str, Any]]:
    """Return the trials or arms of the search in `folder`, one row each; [] without a search.

    Raises:
        ValueError: its file cannot be read.
    """
    rows: list[dict[str, Any]] = _part(folder, "trials", list)
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{folder / SEARCH_FILE} is damaged: a trial is not an object")
    return rows


def _part(folder: Path, key: str, kind: type) -> Any:
    """Return one part of the file; empty if there is no file. Raises ValueError if it is damaged."""
    file = folder / SEARCH_FILE
    if not file.is_file():
        return kind()
    try:
        found = json.loads(file.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(found, kind):
        raise ValueError(f"{file} is damaged: {key} is not {'a list' if kind is list else 'an object'}")
    return found
