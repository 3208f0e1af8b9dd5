"""What a search has left: runs of recipes that it did not end, which share values that it tried others of."""

from collections.abc import Sequence

from lightning_llm.tracking.reading import Run
from lightning_llm.tracking.sweep_file import ended_by_search, read_sweep_file


def ended_some(runs: Sequence[Run]) -> bool:
    """Return whether a search ended some recipes of the runs' sweeps early, and so chose those that are judged."""
    return any(ended_by_search(folder) for folder in {run.folder.parent for run in runs})


def survived_at(runs: Sequence[Run]) -> str:
    """Return the values, as overrides, that all `runs` have of keys of which a search tried others; "" without one."""
    keys: dict[str, None] = {}
    for folder in dict.fromkeys(run.folder.parent for run in runs):
        if ended_by_search(folder):
            keys |= dict.fromkeys(read_sweep_file(folder).get("axes", {}))
    shared = {key: {str(run.config.get(key)) for run in runs} for key in keys if key != "seed"}
    return ", ".join(
        f"{key}={words.pop()}"
        for key, words in shared.items()
        if len(words) == 1 and all(key in run.config for run in runs)
    )
