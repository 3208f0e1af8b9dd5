"""Read the selected runs, skip jobs that a search stopped, and add the jobs of a sweep that have no run."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.base.terminal import Waiting
from lightning_llm.compare.runs.find import RunSelection, has_begun
from lightning_llm.compare.runs.usable import UNREADABLE
from lightning_llm.tracking.reading import Run, read_run
from lightning_llm.tracking.sweep_file import FILE, SEARCH_FILE, checked_sweep, ended_by_search


class FoundRuns(NamedTuple):
    """The selected runs, read. `runs` includes jobs of a sweep that have no run, as runs without a step.

    `problems`: runs that cannot be read; `notes`: on jobs that a search stopped. `damaged`: folders of runs that cannot
    be read or contain modified files, and unreadable files of sweeps, without which missing runs cannot be detected.
    """

    runs: list[Run]
    problems: list[Problem]
    notes: list[str]
    damaged: list[Path]


def read_found(found: RunSelection) -> FoundRuns:
    """Read the runs of a selection, without jobs that a search stopped and with jobs of sweeps that have no run.

    Raises:
        ConfigError: the record of a search cannot be read.
    """
    kept = without_ended(found)
    runs, unreadable = read_all(kept.folders)
    unreadable += (misplaced := misplaced_runs(found.sweeps, runs))
    runs = [run for run in runs if str(run.folder) not in {each.key for each in misplaced}]
    damage = {Path(each.key): each.text.replace(f"{each.key}/", "") for each in unreadable}
    lost, of_sweeps = lost_jobs(found.sweeps, runs, kept.ended, damage)
    reported = {str(run.folder) for run in lost}  # as unfinished, with the reason
    problems = [each for each in unreadable if each.key not in reported]
    damaged = [*damage, *(Path(each.key) for each in of_sweeps)]
    return FoundRuns([*runs, *lost], [*problems, *of_sweeps], kept.notes, damaged)


def read_all(folders: Sequence[Path]) -> tuple[list[Run], list[Problem]]:
    """Return (the runs in `folders` that can be read, problems of the others)."""
    runs: list[Run] = []
    problems: list[Problem] = []
    with Waiting(f"reading {len(folders)} runs") as waiting:
        for number, folder in enumerate(folders):
            waiting.tell(number)
            with gathered(problems):
                runs.append(read_run(folder))
    return runs, problems


class Kept(NamedTuple):
    """Runs after those stopped by a search are left out: `folders` to compare, and `notes` on what was left out.

    `ended`: folders of the jobs that a search stopped or never began.
    """

    folders: list[Path]
    ended: set[Path]
    notes: list[str]


def without_ended(found: RunSelection) -> Kept:
    """Return the selected folders without those of jobs that a search stopped.

    Raises:
        ConfigError: the record of a search cannot be read.
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
    note = f"Stopped by the search and left out: job {numbers} ({why})."
    return Kept([folder for folder in found.folders if folder not in ended], set(ended), [note])


Described = Mapping[str, Any]
"""A job as `sweep.json` lists it."""


def lost_jobs(
    sweeps: Sequence[Path], runs: Sequence[Run], ended: Collection[Path] = (), damage: Mapping[Path, str] | None = None
) -> tuple[list[Run], list[Problem]]:
    """Return (jobs of `sweeps` that have no run in `runs`, as runs without a step; problems of unreadable sweep files).

    The config of a lost job is copied from a run of the sweep that only differs in the seed, the parent run, or in
    numbers of its overrides. Without such a run, only the job's overrides are known (`Run.overrides`).

    Args:
        sweeps: folders of sweeps that are compared as a whole.
        runs: the runs that were read.
        ended: folders of jobs that are not lost, because a search ended or never began them.
        damage: {folder: reason why it cannot be read}, reported as the run's detail.
    """
    by_folder = {run.folder: run for run in runs}
    lost, problems = [], []
    for sweep in sweeps:
        try:
            jobs = checked_sweep(json.loads((sweep / FILE).read_text(encoding="utf-8"))).get("jobs", [])
        except (OSError, ValueError, RecursionError) as error:
            text = f"cannot be read, so missing jobs cannot be detected: {error}. Restore it from a copy."
            problems.append(Problem(str(sweep / FILE), text))
            continue
        known = _Known([(job, by_folder[folder]) for job in jobs if (folder := _folder(sweep, job)) in by_folder])
        lost += [
            _lost(_folder(sweep, job), job, known, damage or {})
            for job in jobs
            if _folder(sweep, job) not in by_folder and _folder(sweep, job) not in ended
        ]
    return lost, problems


def misplaced_runs(sweeps: Sequence[Path], runs: Sequence[Run]) -> list[Problem]:
    """Return a problem for each run in the folder of a sweep's job with another seed or a duplicate run id.

    A run copied over another job's folder would hide that the other is lost. Unreadable files of sweeps are reported by
    `lost_jobs`.
    """
    by_folder = {run.folder: run for run in runs}
    problems = []
    for sweep in sweeps:
        try:
            jobs = checked_sweep(json.loads((sweep / FILE).read_text(encoding="utf-8"))).get("jobs", [])
        except (OSError, ValueError, RecursionError):
            continue
        there = [(run, job.get("seed", run.seed)) for job in jobs if (run := by_folder.get(_folder(sweep, job)))]
        ids = Counter(run.summary["run_id"] for run, _ in there if run.summary.get("run_id"))
        for run, seed in there:
            if run.seed != seed:
                what = f"contains a run of seed {run.seed}, but the job in {FILE} has seed {seed}"
            elif ids[run.summary.get("run_id")] > 1:
                what = "has the run id of another job of its sweep, so one was copied over the other"
            else:
                continue
            problems.append(Problem(str(run.folder), f"{what}. Restore the job's own folder, or rerun it."))
    return problems


def _folder(sweep: Path, job: Described) -> Path:
    return sweep / str(job["number"])


class _Known:
    """The jobs of a sweep that have runs: one run of each kind, of similar overrides, and of each parent run."""

    def __init__(self, jobs: Sequence[tuple[Described, Run]]):
        self.by_kind: dict[str, Run] = {}
        self.by_overrides: dict[frozenset[str], Run] = {}
        self.branches: dict[str, dict[str, Any]] = {}
        for job, run in jobs:
            self.by_kind.setdefault(_kind_and_seed(job)[0], run)
            self.by_overrides.setdefault(_without_numbers(job["words"]), run)
            if trunk := run.config.get("branch_from"):
                self.branches.setdefault(trunk, run.branch)


def _lost(folder: Path, job: Described, known: _Known, damage: Mapping[Path, str]) -> Run:
    """Return the job as a run without a step."""
    kind, seed = _kind_and_seed(job)
    summary: dict[str, Any] = {"status": UNREADABLE} if has_begun(folder) else {}
    if folder in damage:
        summary["detail"] = damage[folder]
    own: dict[str, Any] = {} if seed is None else {"seed": seed}
    if (sibling := known.by_kind.get(kind)) is not None and seed is not None:
        trunk = job.get("branch_from")
        if branch := known.branches.get(str(trunk)):
            summary["branch"] = branch
        return Run(folder, {**sibling.config, **own, "branch_from": trunk}, summary, typed=sibling.typed)
    if config := _config_by_overrides(job["words"], known):
        return Run(folder, config | own, summary)
    return Run(folder, own, summary, overrides=tuple(job["words"]))


def _config_by_overrides(overrides: Sequence[str], known: _Known) -> dict[str, Any]:
    """Return the config of a run with the same overrides except for numbers, with these numbers; {} without such a run.

    A number gets the type of the run's value: 1 becomes 1.0 if that is a float. An override of a group
    (precision=mxfp8) stands for many keys, and one such as step_law for a number that is not known here.
    """
    run = known.by_overrides.get(_without_numbers(overrides))
    numbers = dict(filter(None, map(_number, overrides)))
    if run is None or not all(type(run.config.get(key)) in (float, type(n)) for key, n in numbers.items()):
        return {}
    return {**run.config, **{key: type(run.config[key])(n) for key, n in numbers.items()}}


def _without_numbers(overrides: Iterable[str]) -> frozenset[str]:
    """Return the overrides, reduced to the key if they set a single key to a number."""
    return frozenset(found[0] if (found := _number(word)) else word for word in overrides)


def _number(word: str) -> tuple[str, int | float] | None:
    key, _, value = word.lstrip("+").partition("=")
    if "." not in key and key != "seed":
        return None
    for kind in (int, float):
        try:
            return key, kind(value)
        except ValueError:
            continue
    return None


def _kind_and_seed(job: Described) -> tuple[str, int | None]:
    """Return the kind that a job shares with those of other seeds, and its seed; from overrides in older files."""
    if "kind" in job:
        return job["kind"], job["seed"]
    seeds = [word.partition("=")[2] for word in job["words"] if word.startswith("seed=")]
    kind = " ".join(word for word in job["words"] if not word.startswith("seed="))
    return kind, int(seeds[0]) if seeds and seeds[0].isdigit() else None
