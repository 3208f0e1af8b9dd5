"""Jobs that a whole sweep should have and that no run can be read of."""

import json
from collections.abc import Sequence
from pathlib import Path

from lightning_llm.compare.reading import Run
from lightning_llm.errors import Problem
from lightning_llm.sweep.definition import FILE


def lost_jobs(sweeps: Sequence[Path], runs: Sequence[Run]) -> tuple[list[Run], list[Problem]]:
    """Return the jobs of whole `sweeps` that none of `runs` is, as runs without a step; and what nothing is known of.

    What such a job was is known from a run whose words differ in the seed alone.
    """
    by_folder = {run.folder: run for run in runs}
    lost, problems = [], []
    for sweep in sweeps:
        try:
            jobs = json.loads((sweep / FILE).read_text(encoding="utf-8")).get("jobs", [])
        except (OSError, ValueError) as error:
            problems.append(Problem(str(sweep / FILE), f"cannot be read, so a job may be missing unseen: {error}."))
            continue
        here = {job["number"]: by_folder.get(sweep / str(job["number"])) for job in jobs}
        for job in jobs:
            if here[job["number"]] is not None:
                continue
            folder, kind = sweep / str(job["number"]), _without_seed(job["words"])
            alike = [here[other["number"]] for other in jobs if _without_seed(other["words"]) == kind]
            sibling = next((run for run in alike if run is not None), None)
            seed = next((word.partition("=")[2] for word in job["words"] if word.startswith("seed=")), "")
            if sibling is None or not seed.isdigit():
                text = f"this job of the sweep ({' '.join(job['words'])}) has no run that can be read."
                problems.append(Problem(str(folder), text))
                continue
            summary = {"status": "unreadable"} if folder.exists() else {}
            lost.append(Run(folder, {**sibling.config, "seed": int(seed)}, summary, typed=sibling.typed))
    return lost, problems


def _without_seed(words: Sequence[str]) -> list[str]:
    return [word for word in words if not word.startswith("seed=")]
