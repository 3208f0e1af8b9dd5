"""Jobs of a sweep without a readable run."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.errors import Problem
from lightning_llm.record.reading import Run
from lightning_llm.record.sweep_file import FILE, checked_sweep


def lost_jobs(
    sweeps: Sequence[Path], runs: Sequence[Run], ended: Collection[Path] = ()
) -> tuple[list[Run], list[Problem]]:
    """Return the jobs of whole `sweeps` that none of `runs` is, as runs without a step; and what nothing is known of.

    `ended`: folders of jobs that are not to be missed.

    What such a job was is known from a run that differs in the seed alone, or the trunk, as the sweep's file says.
    """
    by_folder = {run.folder: run for run in runs}
    lost, problems = [], []
    for sweep in sweeps:
        try:
            jobs = checked_sweep(json.loads((sweep / FILE).read_text(encoding="utf-8"))).get("jobs", [])
        except (OSError, ValueError, RecursionError) as error:
            problems.append(Problem(str(sweep / FILE), f"cannot be read, so a job may be missing unseen: {error}."))
            continue
        here = {job["number"]: by_folder.get(sweep / str(job["number"])) for job in jobs}
        for job in jobs:
            if here[job["number"]] is not None or sweep / str(job["number"]) in ended:
                continue
            folder, (kind, seed) = sweep / str(job["number"]), _kind_and_seed(job)
            alike = [run for other in jobs if _kind_and_seed(other)[0] == kind and (run := here[other["number"]])]
            sibling = next(iter(alike), None)
            if sibling is None or seed is None:
                text = f"this job of the sweep ({' '.join(job['words'])}) has no run that can be read."
                problems.append(Problem(str(folder), text))
                continue
            summary: dict[str, Any] = {"status": "unreadable"} if folder.exists() else {}
            config = {**sibling.config, "seed": seed, "branch_from": job.get("branch_from")}
            if branch := _branch_of(config["branch_from"], [run for run in here.values() if run is not None]):
                summary["branch"] = branch
            lost.append(Run(folder, config, summary, typed=sibling.typed))
    return lost, problems


def _branch_of(named: str | None, runs: Sequence[Run]) -> dict[str, Any]:
    """Return what the summary of a run that branched off there says of it; {} where none of `runs` did."""
    return next((run.branch for run in runs if named is not None and run.config.get("branch_from") == named), {})


def _kind_and_seed(job: Mapping[str, Any]) -> tuple[str, int | None]:
    """Return what the job shares with those of other seeds, and its seed; earlier versions noted words alone."""
    if "kind" in job:
        return job["kind"], job["seed"]
    seeds = [word.partition("=")[2] for word in job["words"] if word.startswith("seed=")]
    kind = " ".join(word for word in job["words"] if not word.startswith("seed="))
    return kind, int(seeds[0]) if seeds and seeds[0].isdigit() else None
