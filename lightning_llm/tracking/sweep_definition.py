"""Definition of a sweep: its jobs and folder, writing `sweep.json`, and commands that resume or extend it. No torch."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.config_hash import (
    config_hash,
    flatten,
    is_data_path,
    training_hash,
)
from lightning_llm.config.redact import redact_uri
from lightning_llm.config.schema import Config
from lightning_llm.config.workspace import default_outputs, sweep_command
from lightning_llm.tracking.files import write_json
from lightning_llm.tracking.sweep_file import (
    DESIGN,
    FILE,
    OTHER_KEYS,
    SEARCH,
    TOLD,
    UNHASHED,
    RequestedJob,
    axes_of,
    check_declared_jobs,
    key_of,
    keys_of_jobs,
    kind_of,
    read_sweep_file,
)

GIVEN_ANEW = ("seed", "run.name", "run.root", "run.dir")
"""Keys that a command with more seeds sets itself."""


@dataclass(frozen=True)
class Job:
    """One run of a sweep: its number, the overrides and the key that identify it in all starts, and its config."""

    number: int
    overrides: tuple[str, ...]
    key: str
    config: Config

    @property
    def name(self) -> str:
        """Name of the job in printed lines: its number and overrides."""
        return f"{self.number} {' '.join(self.overrides)}".strip()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.run.dir)


@dataclass(frozen=True)
class SweepSource:
    """Command line of a sweep: its overrides, its `--config-dir`, and the working directory (`folder`)."""

    overrides: tuple[str, ...] = ()
    config_dir: Path | None = None
    folder: Path = field(default_factory=Path.cwd)

    @property
    def only_from(self) -> str | None:
        """The working directory that the overrides need, because they have paths; None if any will do."""
        paths = (is_data_path(key) or key == "branch_from" for key in map(key_of, self.overrides))
        return str(self.folder) if any(paths) else None

    def without_seeds_and_place(self) -> dict[str, Any]:
        """Return its JSON data in `sweep.json`, without the keys that `command_with_seeds` sets."""
        in_folder = {} if self.only_from is None else {"folder": self.only_from}
        return {
            "overrides": [redact_uri(each) for each in self.overrides if key_of(each) not in GIVEN_ANEW],
            "config_dir": str(self.config_dir.absolute()) if self.config_dir else None,
            **in_folder,
        }


@dataclass(frozen=True)
class Sweep:
    """A sweep: its folder, the hash of its definition, its jobs, its MLflow parent run, and its command line."""

    folder: Path
    hash: str
    jobs: tuple[Job, ...]
    parent_run_id: str | None = None
    typed: SweepSource | None = None
    declared: Mapping[str, Any] = field(default_factory=dict)
    """Terms declared before the first run, by key in `FILE`: `DESIGN`, `SEARCH`."""

    @property
    def experiment(self) -> str:
        """`run.experiment` of all its jobs, which is MLflow's experiment."""
        return self.jobs[0].config.run.experiment

    @property
    def axes(self) -> dict[str, list[str]]:
        """{key: its values} of the keys that differ between jobs."""
        return axes_of(job.overrides for job in self.jobs)


def define(
    jobs: Sequence[tuple[list[str], Config]],
    name: str | None,
    typed: SweepSource | None = None,
    declared: Mapping[str, Any] | None = None,
) -> Sweep:
    """Return the sweep of composed `jobs` in `run.root/experiment/<name>/`.

    The default name consists of the preset and the hash. The hash is over the jobs' keys, which ignore callbacks that
    only observe, so the same command finds its folder again. If the folder already contains a sweep, its jobs keep
    their numbers and new jobs are appended. A sweep of an earlier version, where observers were part of the keys, keeps
    its keys. `declared` is part of the hash and must equal the terms in the folder; values derived from them when the
    sweep began ("derived") are kept.

    Raises:
        ConfigError: jobs have several experiments; the folder contains something else than a sweep, or a sweep that was
            begun with other declared terms, or with looks declared for other arms.
    """
    first = jobs[0][1]
    if len({config.run.experiment for _, config in jobs}) > 1:
        raise ConfigError(Problem("run.experiment", "must be the same for all jobs. Start one sweep per experiment."))
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
        asked = [RequestedJob(key, kind_of(job[1]), *job) for key, job in zip(keys, jobs, strict=True)]
        check_declared_jobs(folder, known, asked, by_looks=by_looks)
    following = max([*numbers.values(), *_numbered_folders(folder)], default=-1) + 1  # sweep.json may be an older copy
    made = []
    for key, (overrides, config) in zip(keys, jobs, strict=True):
        if key not in numbers:
            numbers[key], following = following, following + 1
        number = numbers[key]
        update = {"dir": str(folder / str(number)), "name": f"{number} {' '.join(overrides)}".strip()}
        placed = config.model_copy(update={"run": config.run.model_copy(update=update)})
        made.append(Job(number, tuple(overrides), key, placed))
    return Sweep(folder, digest, tuple(made), known.get("mlflow_run_id"), typed, declared)


def _digest(keys: list[str], declared: Mapping[str, Any] | None) -> str:
    whole = [sorted(keys), _terms_alone(declared)] if declared else sorted(keys)
    return sha256(json.dumps(whole).encode()).hexdigest()[:12]


def _terms_alone(declared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the declared terms without derived values, which may be rounded differently on another machine."""
    return {key: {k: v for k, v in each.items() if k not in ("derived", "hash")} for key, each in declared.items()}


def _as_declared(known: dict[str, Any], declared: Mapping[str, Any] | None, folder: Path) -> dict[str, Any]:
    """Return the declared terms of the sweep in `folder`. Raises ConfigError if it was begun with other terms."""
    before = {key: known[key] for key in (DESIGN, SEARCH) if key in known}
    if declared is None or not known:
        return before or dict(declared or {})
    ours, theirs = (json.loads(json.dumps(_terms_alone(each))) for each in (declared, before))
    if OTHER_KEYS not in theirs.get(SEARCH, {OTHER_KEYS: ""}):  # not recorded by an earlier version
        ours.get(SEARCH, {}).pop(OTHER_KEYS, None)
    if ours == theirs:
        return before
    if not before:
        text = f"{folder} was begun without declared terms, which must precede the first run. Give another run.name."
    else:
        is_now, was = (flatten(each) for each in (ours, theirs))
        values = [each.get(SEARCH, {}).get("derived", {}).get(OTHER_KEYS) for each in (declared, before)]
        if None not in values:  # report each key instead of their hash
            is_now, was = (
                {key: value for key, value in {**each, **own}.items() if key != f"{SEARCH}.{OTHER_KEYS}"}
                for each, own in zip((is_now, was), json.loads(json.dumps(values)), strict=True)
            )
        keys = sorted(key for key in is_now.keys() | was.keys() if is_now.get(key) != was.get(key))
        others = "; ".join(f"{key} {was.get(key)} -> {is_now.get(key)}" for key in keys)
        text = f"{folder} was begun with other terms ({others}). Restore them, or give another run.name."
    raise ConfigError(Problem("sweep", text))


def tracked(sweep: Sweep, parent_run_id: str | None) -> Sweep:
    """Return the sweep with this id of its MLflow parent run (None: without one), also in the tags of every job."""
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


def write_sweep(sweep: Sweep, told: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Write and return `sweep.json` in the sweep's folder; jobs of earlier definitions stay listed.

    `told`: the end of the sweep as logged to MLflow, if it was; recorded at `TOLD`.
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
    """Return the axes over the jobs of all sessions, with an axis for the seed if there are several seeds."""
    axes = axes_of(each.get("words", ()) for each in listed)
    seeds = list(dict.fromkeys(str(each["seed"]) for each in listed if "seed" in each))
    return {**axes, "seed": seeds} if len(seeds) > 1 else axes


def _merged(starts: list[dict[str, Any]], typed: SweepSource | None) -> list[dict[str, Any]]:
    """Return the distinct sources of the sweep over all sessions, ignoring seeds."""
    now = typed.without_seeds_and_place() if typed else None
    return starts if now is None or now in starts else [*starts, now]


def _described(job: Job) -> dict[str, Any]:
    """Return a job's entry in `sweep.json`; jobs of one `kind` differ only in seed and parent run."""
    digest = kind_of(job.config)
    begun = {} if job.config.branch_from is None else {"branch_from": job.config.branch_from}
    return {
        "number": job.number, "words": list(job.overrides), "key": job.key, "seed": job.config.seed, "kind": digest,
        **begun
    }  # fmt: skip


def command_with_seeds(folder: Path, seeds: Iterable[int]) -> str:
    """Return the command that runs the sweep in `folder` with `seeds` in the same folder, without finished jobs.

    A sweep composed of several sets of overrides has a command for each, joined by " && ". Returns "" if `sweep.json`
    cannot be read or has no record of them (earlier versions).
    """
    return _command_adding(folder, seeds, {})


def command_with_values(folder: Path, key: str, values: Iterable[float], seeds: Iterable[int]) -> str:
    """Return the command that adds jobs with other `values` of `key` to the sweep in `folder`, with `seeds`.

    See `command_with_seeds`.
    """
    return _command_adding(folder, seeds, {key: ",".join(f"{value:g}" for value in values)})


def command_for_the_rest(folder: Path) -> str:
    """Return the command that runs the remaining jobs of the sweep in `folder`; "" if `sweep.json` has no seeds.

    For a sequential sweep it contains all seeds that its looks may need.
    """
    known = _readable(folder)
    looked_at = known.get(DESIGN, {}).get("seeds", [])
    seeds = [*looked_at, *(job["seed"] for job in known.get("jobs", []) if "seed" in job)]
    return command_with_seeds(folder, seeds) if seeds else ""


def _command_adding(folder: Path, seeds: Iterable[int], choices: Mapping[str, str]) -> str:
    in_folder = [f"{key}={value}" for key, value in choices.items()]
    in_folder += [f"seed={','.join(map(str, sorted(set(seeds))))}", *_folder_overrides(folder)]
    return " && ".join(
        sweep_command(
            [*(own for own in each["overrides"] if key_of(own) not in choices), *in_folder],
            each["config_dir"],
            each.get("folder"),
        )
        for each in _readable(folder).get("typed", [])
    )


def _readable(folder: Path) -> dict[str, Any]:
    try:
        return read_sweep_file(folder)
    except ConfigError:  # already reported when the jobs were read
        return {}


def command_to_go_on(sweep: Sweep) -> str:
    """Return the command that starts the remaining jobs of `sweep`, from any working directory."""
    typed = sweep.typed or SweepSource()
    own = [redact_uri(each) for each in typed.overrides if key_of(each) not in ("run.name", "run.root", "run.dir")]
    config_dir = typed.config_dir and typed.config_dir.absolute()
    return sweep_command([*own, *_folder_overrides(sweep.folder)], config_dir, typed.only_from)


def _folder_overrides(folder: Path) -> list[str]:
    """Return the overrides that select the folder of a sweep from any working directory."""
    root = folder.absolute().parent.parent
    return [f"run.name={folder.name}", *([] if str(root) == default_outputs() else [f"run.root={root}"])]
