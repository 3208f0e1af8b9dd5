"""Files of a sweep's folder: `sweep.json`, checked, and `search.json` with the trials of a search. No torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.tracking.files import write_json

FILE = "sweep.json"
LOCKS = ".claims"
"""The folder, beside `FILE`, of locks that starts of the sweep and its runs hold."""
DESIGN = "sequential"
"""The key, in `FILE`, of the looks that were declared before the first run (`compare.looks`)."""
SEARCH = "search"
"""The key, in `FILE`, of what a search was told to look for."""
OTHER_KEYS = "all_other_keys"
"""The key, there, of the hash of what its trials share; the values that it is of are below "derived"."""
TOLD = "mlflow_was_told"
"""The key, in `FILE`, of how the sweep ended as MLflow was told; a start that goes on takes it out."""
BEGINNING = (LOCKS, f"{FILE}.partial")
"""What is there before `FILE` is, while another start writes it."""


def checked_sweep(about: Any) -> dict[str, Any]:
    """Return the content of `sweep.json`. Raises ValueError where it is not what `write` wrote."""
    jobs = about.get("jobs") if isinstance(about, dict) else None
    if not isinstance(jobs, list) or not all(isinstance(job, dict) for job in jobs):
        raise ValueError("it is damaged: no list of jobs")
    numbers, keys = [job.get("number") for job in jobs], [job.get("key") for job in jobs]
    if not all(type(number) is int and number >= 0 for number in numbers) or len(set(numbers)) < len(numbers):
        raise ValueError("it is damaged: jobs without a number of their own")
    if not all(isinstance(key, str) for key in keys) or len(set(keys)) < len(keys):
        raise ValueError("it is damaged: jobs without a key of their own")
    words = [job.get("words") for job in jobs]
    if not all(isinstance(each, list) and all(isinstance(word, str) for word in each) for each in words):
        raise ValueError("it is damaged: jobs without words")
    if not all(type(job.get("seed")) is int and isinstance(job["kind"], str) for job in jobs if "kind" in job):
        raise ValueError("it is damaged: jobs whose seed or kind is none")
    if not all(isinstance(job.get("branch_from"), str | None) for job in jobs):
        raise ValueError("it is damaged: jobs whose branch_from is no path")
    for key in (DESIGN, SEARCH):
        if key in about and not (isinstance(about[key], dict) and about[key]):
            raise ValueError(f"it is damaged: '{key}' holds nothing that was declared")
    return dict(about)


def read_sweep_file(folder: Path) -> dict[str, Any]:
    """Return the checked content of `sweep.json` in `folder`, {} where no sweep has begun there.

    Raises:
        ConfigError: the folder holds something that is no sweep.
    """
    if not folder.exists() or (folder.is_dir() and all(path.name in BEGINNING for path in folder.iterdir())):
        return {}
    try:
        return checked_sweep(json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        text = f"{folder} holds something that is no sweep ({FILE}: {error}). Give another run.name, or move it away."
        raise ConfigError(Problem("run.name", text)) from error


def read_declared(folder: Path) -> dict[str, Any]:
    """Return what was declared for the sweep in `folder`, {} where nothing was, or its file cannot be read."""
    known = _as_it_is(folder)
    return {key: known[key] for key in (DESIGN, SEARCH) if key in known}


def parent_of_sweep(folder: Path) -> str | None:
    """Return the id of the MLflow run of the sweep in `folder`, None where it has none, or its file cannot be read."""
    return _as_it_is(folder).get("mlflow_run_id")


def title_of(run_folder: Path) -> str:
    """Return a title for a run: its folder's name; of a sweep's job the sweep, its number and what it differs in."""
    jobs = _as_it_is(run_folder.parent).get("jobs")
    for job in jobs if isinstance(jobs, list) else ():
        if isinstance(job, dict) and str(job.get("number")) == run_folder.name and isinstance(job.get("words"), list):
            return f"{run_folder.parent.name}/{run_folder.name}: {' '.join(map(str, job['words']))}"
    return run_folder.name


def _as_it_is(folder: Path) -> dict[str, Any]:
    """Return the unchecked content of the file in `folder`, {} where it cannot be read, of which `compare` tells."""
    try:
        known = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


SEARCH_FILE = "search.json"
ENDED_AT = "ended_at"
"""The key, in a trial's or recipe's row, of the `step` it was ended at and its `gap` there; null where it was not."""


def write_results(folder: Path, trials: Sequence[Mapping[str, Any]], ended: Mapping[int, str]) -> None:
    """Write the trials, and {job number: why it, or its recipe, was ended early}: those that are not compared."""
    write_json(
        folder / SEARCH_FILE, {"trials": list(trials), "ended": {str(number): why for number, why in ended.items()}}
    )


def ended_by_search(folder: Path) -> dict[Path, str]:
    """Return {a job's folder: why the search in `folder` ended it early}; {} where there is no search.

    Raises:
        ValueError: its file cannot be read.
    """
    return {(folder / number).resolve(): str(why) for number, why in _part(folder, "ended", dict).items()}


def read_trials(folder: Path) -> list[dict[str, Any]]:
    """Return the trials, or recipes, of the search in `folder`, a row each; [] where there is no search.

    Raises:
        ValueError: its file cannot be read.
    """
    rows: list[dict[str, Any]] = _part(folder, "trials", list)
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{folder / SEARCH_FILE} is damaged: a trial is no object")
    return rows


def _part(folder: Path, key: str, kind: type) -> Any:
    """Return one part of the file, empty without one. Raises ValueError."""
    file = folder / SEARCH_FILE
    if not file.is_file():
        return kind()
    try:
        found = json.loads(file.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(found, kind):
        raise ValueError(f"{file} is damaged: {key} is no {'list' if kind is list else 'object'}")
    return found
