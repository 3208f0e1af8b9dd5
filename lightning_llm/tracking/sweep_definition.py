"""Definition of a sweep: its jobs, the folder they share, which is which over repeated starts. Imports no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.identity import (
    config_hash,
    flatten,
    is_data_path,
    training_hash,
)
from lightning_llm.config.redact import redact_uri
from lightning_llm.config.schema import Config
from lightning_llm.tracking.declared_jobs import Asked, check_declared_jobs
from lightning_llm.tracking.job_keys import UNHASHED, axes_of, key_of, keys_of_jobs, kind_of
from lightning_llm.tracking.sweep_file import DESIGN, FILE, OTHER_KEYS, SEARCH, read_sweep_file

GIVEN_ANEW = ("seed", "run.name", "run.root", "run.dir")
"""Keys that a command with more seeds sets itself."""


@dataclass(frozen=True)
class Job:
    """One run of a sweep. `words` tell it from the others; `key` names it over all starts of the sweep."""

    number: int
    words: tuple[str, ...]
    key: str
    config: Config

    @property
    def name(self) -> str:
        """The number and the words."""
        return f"{self.number} {' '.join(self.words)}".strip()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.run.dir)


@dataclass(frozen=True)
class Typed:
    """What a sweep was composed of: the overrides as they were typed, and the folder of further groups.

    `folder`: where they were typed.
    """

    overrides: tuple[str, ...] = ()
    config_dir: Path | None = None
    folder: Path = field(default_factory=Path.cwd)

    @property
    def only_from(self) -> str | None:
        """The folder that a command with these overrides must be typed in, None where any will do."""
        paths = (is_data_path(key) or key == "branch_from" for key in map(key_of, self.overrides))
        return str(self.folder) if any(paths) else None

    def without_seeds_and_place(self) -> dict[str, Any]:
        """Return it as `sweep.json` keeps it, less what `command_with_seeds` gives anew."""
        words = [redact_uri(word) for word in self.overrides if key_of(word) not in GIVEN_ANEW]
        in_folder = {} if self.only_from is None else {"folder": self.only_from}
        return {
            "overrides": words,
            "config_dir": str(self.config_dir.absolute()) if self.config_dir else None,
            **in_folder,
        }


@dataclass(frozen=True)
class Sweep:
    """Jobs in one folder. `hash` is the definition's, whatever the folder is called."""

    folder: Path
    hash: str
    jobs: tuple[Job, ...]
    parent_run_id: str | None = None
    typed: Typed | None = None
    declared: Mapping[str, Any] = field(default_factory=dict)
    """What was laid down before the first run, by its key in `FILE`: `DESIGN`, `SEARCH`."""

    @property
    def experiment(self) -> str:
        """The MLflow experiment of all its runs."""
        return self.jobs[0].config.run.experiment

    @property
    def axes(self) -> dict[str, list[str]]:
        """The values that jobs differ in, by key."""
        return axes_of(job.words for job in self.jobs)


def define(
    jobs: Sequence[tuple[list[str], Config]],
    name: str | None,
    typed: Typed | None = None,
    declared: Mapping[str, Any] | None = None,
) -> Sweep:
    """Return the sweep of composed `jobs`, in `run.root/experiment/<name>/`; by default a name of the recipe and hash.

    The hash is over the jobs' keys, so the same command finds its folder again, whatever callbacks only watch. Where
    the folder holds a sweep already, jobs keep the numbers they have there and new ones are added behind: a sweep given
    a name can grow. One of an earlier version, whose keys told observers apart, goes on under the keys it has.
    `declared` is part of the hash, and what the folder holds has to have been declared alike; what was derived from it
    then ("derived", in its values) stays.

    Raises:
        ConfigError: jobs of several experiments, or the folder holds something that is no sweep, or one that was begun
            with something else declared, or with looks declared for other recipes.
    """
    first = jobs[0][1]
    if len({config.run.experiment for _, config in jobs}) > 1:
        raise ConfigError(Problem("run.experiment", "is one for all jobs of a sweep. Start one sweep per experiment."))
    keys, former = keys_of_jobs(jobs, training_hash, UNHASHED), keys_of_jobs(jobs, config_hash)
    digest, former_digest = (_digest(each, declared) for each in (keys, former))
    recipe, above = (first.recipe or "sweep").rpartition("/")[2], Path(first.run.root) / first.run.experiment
    folder = above / (name or f"{recipe}-{digest}")
    if not folder.exists() and (above / f"{recipe}-{former_digest}" / FILE).exists():
        folder, digest = above / f"{recipe}-{former_digest}", former_digest
    known = read_sweep_file(folder)
    by_looks = declared is not None
    declared = _as_declared(known, declared, folder)
    numbers = {each["key"]: each["number"] for each in known.get("jobs", [])}
    keys = [before if before in numbers else key for key, before in zip(keys, former, strict=True)]
    if DESIGN in known:
        asked = [Asked(key, kind_of(job[1]), *job) for key, job in zip(keys, jobs, strict=True)]
        check_declared_jobs(folder, known, asked, by_looks=by_looks)
    following = max([*numbers.values(), *_numbered_folders(folder)], default=-1) + 1  # a file from a copy knows fewer
    made = []
    for key, (words, config) in zip(keys, jobs, strict=True):
        if key not in numbers:
            numbers[key], following = following, following + 1
        number = numbers[key]
        update = {"dir": str(folder / str(number)), "name": f"{number} {' '.join(words)}".strip()}
        placed = config.model_copy(update={"run": config.run.model_copy(update=update)})
        made.append(Job(number, tuple(words), key, placed))
    return Sweep(folder, digest, tuple(made), known.get("mlflow_run_id"), typed, declared)


def _digest(keys: list[str], declared: Mapping[str, Any] | None) -> str:
    whole = [sorted(keys), _terms_alone(declared)] if declared else sorted(keys)
    return sha256(json.dumps(whole).encode()).hexdigest()[:12]


def _terms_alone(declared: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was declared without what follows from it, which another machine may round otherwise."""
    return {key: {k: v for k, v in each.items() if k not in ("derived", "hash")} for key, each in declared.items()}


def _as_declared(known: dict[str, Any], declared: Mapping[str, Any] | None, folder: Path) -> dict[str, Any]:
    """Return what is declared for the sweep in `folder`. Raises ConfigError where it was begun with something else."""
    before = {key: known[key] for key in (DESIGN, SEARCH) if key in known}
    if declared is None or not known:
        return before or dict(declared or {})
    ours, theirs = (json.loads(json.dumps(_terms_alone(each))) for each in (declared, before))
    if OTHER_KEYS not in theirs.get(SEARCH, {OTHER_KEYS: ""}):  # an earlier version's, which did not note it
        ours.get(SEARCH, {}).pop(OTHER_KEYS, None)
    if ours == theirs:
        return before
    if not before:
        text = f"{folder} was begun without: it has to be declared before the first run. Give another run.name."
    else:
        is_now, was = (flatten(each) for each in (ours, theirs))
        values = [each.get(SEARCH, {}).get("derived", {}).get(OTHER_KEYS) for each in (declared, before)]
        if None not in values:  # said key by key, and not as their hash
            is_now, was = (
                {key: value for key, value in {**each, **own}.items() if key != f"{SEARCH}.{OTHER_KEYS}"}
                for each, own in zip((is_now, was), json.loads(json.dumps(values)), strict=True)
            )
        keys = sorted(key for key in is_now.keys() | was.keys() if is_now.get(key) != was.get(key))
        others = "; ".join(f"{key} was {was.get(key)}, is {is_now.get(key)}" for key in keys)
        text = f"{folder} was begun with others declared ({others}). Give these again, or another run.name."
    raise ConfigError(Problem("sweep", text))


def tracked(sweep: Sweep, parent_run_id: str | None) -> Sweep:
    """Return the sweep with its MLflow parent run, which every job names in its tags."""
    tags = {"sweep": sweep.folder.name, "sweep_hash": sweep.hash}
    if parent_run_id:
        tags["mlflow.parentRunId"] = parent_run_id
    jobs = []
    for job in sweep.jobs:
        logger = job.config.logger.model_copy(update={"tags": job.config.logger.tags | tags})
        jobs.append(replace(job, config=job.config.model_copy(update={"logger": logger})))
    return replace(sweep, jobs=tuple(jobs), parent_run_id=parent_run_id)


def _numbered_folders(folder: Path) -> list[int]:
    return [int(each.name) for each in folder.iterdir() if each.name.isdecimal()] if folder.is_dir() else []
