"""The runs that were found, as they are compared: without jobs that a search ended, with those that are lost."""

from pathlib import Path
from typing import NamedTuple

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.compare.comparison import read_all
from lightning_llm.compare.runs.find import Found
from lightning_llm.compare.runs.lost_jobs import lost_jobs, misplaced_runs
from lightning_llm.tracking.reading import Run
from lightning_llm.tracking.sweep_file import SEARCH_FILE, ended_by_search


class Kept(NamedTuple):
    """The `folders` of runs to compare, those of jobs that a search `ended` or never began, and `notes` on these."""

    folders: list[Path]
    ended: set[Path]
    notes: list[str]


def without_ended(found: Found) -> Kept:
    """Return the folders that were found less those of jobs that a search ended.

    Raises:
        ConfigError: a search's record cannot be read.
    """
    ended: dict[Path, str] = {}
    for sweep in dict.fromkeys([*found.sweeps, *(folder.parent for folder in found.folders)]):
        try:
            ended |= ended_by_search(sweep)
        except ValueError as error:
            raise ConfigError(
                Problem(str(sweep / SEARCH_FILE), f"cannot be read: {error}. Start the search again.")
            ) from error
    left_out = [folder for folder in found.folders if folder in ended]
    if not left_out:
        return Kept(found.folders, set(ended), [])
    why = "; ".join(dict.fromkeys(ended[folder] for folder in left_out))
    numbers = ", ".join(folder.name for folder in left_out)
    note = f"Ended by the search, and left out here: job {numbers} ({why})."
    return Kept([folder for folder in found.folders if folder not in ended], set(ended), [note])


class FoundRuns(NamedTuple):
    """The `runs` that were found, and those of lost jobs; `problems` with others, and `notes`.

    `damaged`: folders of runs that cannot be read, or whose files are not what the run wrote, and files of sweeps that
    cannot be read: they would say whether a run is missing.
    """

    runs: list[Run]
    problems: list[Problem]
    notes: list[str]
    damaged: list[Path]


def read_found(found: Found) -> FoundRuns:
    """Return the runs that were found.

    Raises:
        ConfigError: a search's record cannot be read.
    """
    kept = without_ended(found)
    runs, unreadable = read_all(kept.folders)
    unreadable += (misplaced := misplaced_runs(found.sweeps, runs))
    runs = [run for run in runs if str(run.folder) not in {each.key for each in misplaced}]
    damage = {Path(each.key): each.text.replace(f"{each.key}/", "") for each in unreadable}
    lost, of_sweeps = lost_jobs(found.sweeps, runs, kept.ended, damage)
    told = {str(run.folder) for run in lost}  # as unfinished, with why
    problems = [each for each in unreadable if each.key not in told]
    damaged = [*damage, *(Path(each.key) for each in of_sweeps)]
    return FoundRuns([*runs, *lost], [*problems, *of_sweeps], kept.notes, damaged)
