"""`search.json`, beside a search's `sweep.json`: what became of its trials, and which jobs it ended early."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.record.files import write_json

FILE = "search.json"


def write_results(folder: Path, trials: Sequence[Mapping[str, Any]], ended: Mapping[int, str]) -> None:
    """Write the trials, and {job number: why it, or its recipe, was ended early}: those that are not compared."""
    write_json(folder / FILE, {"trials": list(trials), "ended": {str(number): why for number, why in ended.items()}})


def ended_by_search(folder: Path) -> dict[Path, str]:
    """Return {a job's folder: why the search in `folder` ended it early}; {} where there is no search.

    Raises:
        ValueError: its file cannot be read.
    """
    file = folder / FILE
    if not file.is_file():
        return {}
    try:
        ended = json.loads(file.read_text(encoding="utf-8"))["ended"]
        return {(folder / number).resolve(): str(why) for number, why in ended.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
