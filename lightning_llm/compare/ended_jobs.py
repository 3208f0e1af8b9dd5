"""Jobs of a search that it ended on the way: results of the search, and no runs to compare."""

from pathlib import Path

from lightning_llm.compare.find import Found
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.record.search_results import FILE, ended_by_search


def without_ended(found: Found) -> tuple[list[Path], list[str]]:
    """Return the folders that were found less those of jobs that a search ended, and a note on these.

    Raises:
        ConfigError: a search's record cannot be read.
    """
    ended: dict[Path, str] = {}
    for sweep in dict.fromkeys(folder.parent for folder in found.folders):
        try:
            ended |= ended_by_search(sweep)
        except ValueError as error:
            raise ConfigError(
                Problem(str(sweep / FILE), f"cannot be read: {error}. Start the search again.")
            ) from error
    left_out = [folder for folder in found.folders if folder in ended]
    if not left_out:
        return found.folders, []
    why = "; ".join(dict.fromkeys(ended[folder] for folder in left_out))
    numbers = ", ".join(folder.name for folder in left_out)
    note = f"Ended by the search before their last step, and left out here: job {numbers} ({why})."
    return [folder for folder in found.folders if folder not in ended], [note]
