"""`sweep.json` as a sweep writes it (`sweep_file` reads it): jobs of all starts, and how each start was composed."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_llm.tracking.files import write_json
from lightning_llm.tracking.job_keys import axes_of, kind_of
from lightning_llm.tracking.sweep_definition import Job, Sweep, Typed
from lightning_llm.tracking.sweep_file import FILE, TOLD, read_sweep_file


def write_sweep(sweep: Sweep, told: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Write and return `sweep.json`, beside the jobs' folders; jobs of earlier definitions there stay listed.

    `told`: how the sweep ended, where MLflow has been told.
    """
    before = read_sweep_file(sweep.folder)
    known = {each["key"]: each for each in before.get("jobs", [])}
    known |= {job.key: _described(job) for job in sweep.jobs}
    typed = _merged(before.get("typed", []), sweep.typed)
    listed = sorted(known.values(), key=lambda each: each["number"])
    sweep.folder.mkdir(parents=True, exist_ok=True)
    about = {
        "hash": sweep.hash,
        "experiment": sweep.experiment,
        "recipe": sweep.jobs[0].config.recipe,
        "axes": _axes_of_all(listed),
        "typed": typed,
        "mlflow_run_id": sweep.parent_run_id,
        **sweep.declared,
        "jobs": listed,
        **({TOLD: dict(told)} if told else {}),
    }
    write_json(sweep.folder / FILE, about)
    return about


def _axes_of_all(listed: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the axes over jobs of all starts. A start of one seed has no word for it, which is an axis once there are
    several."""
    axes = axes_of(each.get("words", ()) for each in listed)
    seeds = list(dict.fromkeys(str(each["seed"]) for each in listed if "seed" in each))
    return {**axes, "seed": seeds} if len(seeds) > 1 else axes


def _merged(starts: list[dict[str, Any]], typed: Typed | None) -> list[dict[str, Any]]:
    """Return how the sweep was composed over all its starts; one that only added seeds is no other."""
    now = typed.without_seeds_and_place() if typed else None
    return starts if now is None or now in starts else [*starts, now]


def _described(job: Job) -> dict[str, Any]:
    """Return a job as `sweep.json` lists it; those of one `kind` differ in seed and trunk alone."""
    digest = kind_of(job.config)
    trunk = {} if job.config.branch_from is None else {"branch_from": job.config.branch_from}
    return {
        "number": job.number, "words": list(job.words), "key": job.key, "seed": job.config.seed, "kind": digest, **trunk
    }  # fmt: skip
