"""`search.json`, beside a search's `sweep.json`: what became of its trials, and which jobs it ended early."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.tracking.files import write_json

FILE = "search.json"
ENDED_AT = "ended_at"
"""The key, in a trial's or recipe's row, of the `step` it was ended at and its `gap` there; null where it was not."""


def write_results(folder: Path, trials: Sequence[Mapping[str, Any]], ended: Mapping[int, str]) -> None:
    """Write the trials, and {job number: why it, or its recipe, was ended early}: those that are not compared."""
    write_json(folder / FILE, {"trials": list(trials), "ended": {str(number): why for number, why in ended.items()}})


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
        raise ValueError(f"{folder / FILE} is damaged: a trial is no object")
    return rows


def _part(folder: Path, key: str, kind: type) -> Any:
    """Return one part of the file, empty without one. Raises ValueError."""
    file = folder / FILE
    if not file.is_file():
        return kind()
    try:
        found = json.loads(file.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(found, kind):
        raise ValueError(f"{file} is damaged: {key} is no {'list' if kind is list else 'object'}")
    return found
