"""Definition of a sweep: its jobs, their shared folder, `sweep.json` as written, commands that resume it. No torch."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.commands import sweep_command
from lightning_llm.config.config_hash import (
    config_hash,
    flatten,
    is_data_path,
    training_hash,
)
from lightning_llm.config.redact import redact_uri
from lightning_llm.config.schema import Config
from lightning_llm.config.workspace import default_outputs
from lightning_llm.tracking.files import write_json
from lightning_llm.tracking.sweep_file import DESIGN, FILE, OTHER_KEYS, SEARCH, TOLD, read_sweep_file
from lightning_llm.tracking.sweep_jobs import (
    UNHASHED,
    Asked,
    axes_of,
    check_declared_jobs,
    key_of,
    keys_of_jobs,
    kind_of,
)

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


def command_with_seeds(folder: Path, seeds: Iterable[int]) -> str:
    """Return the command that runs the sweep in `folder` with `seeds`, in the same folder, repeating no finished job.

    A sweep that grew by other overrides under one name has a command for each, joined by " && ". "" where its
    `sweep.json` says nothing of how it was composed (written by an earlier version), or cannot be read.
    """
    return _command_adding(folder, seeds, {})


def command_with_values(folder: Path, key: str, values: Iterable[float], seeds: Iterable[int]) -> str:
    """Return the command that adds jobs of other `values` of `key` to the sweep in `folder`, at its `seeds`.

    As `command_with_seeds`.
    """
    return _command_adding(folder, seeds, {key: ",".join(f"{value:g}" for value in values)})


def command_for_the_rest(folder: Path) -> str:
    """Return the command that runs what is left of the sweep in `folder`, "" where there is none.

    Of a sweep that looks at seeds as it goes, with all that its looks may need.
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
            [*(word for word in each["overrides"] if key_of(word) not in choices), *in_folder],
            each["config_dir"],
            each.get("folder"),
        )
        for each in _readable(folder).get("typed", [])
    )


def _readable(folder: Path) -> dict[str, Any]:
    try:
        return read_sweep_file(folder)
    except ConfigError:  # whoever asks for a command has said so, of the jobs
        return {}


def command_to_go_on(sweep: Sweep) -> str:
    """Return the command that starts what is left of `sweep`, wherever it is typed."""
    typed = sweep.typed or Typed()
    words = [redact_uri(word) for word in typed.overrides if key_of(word) not in ("run.name", "run.root", "run.dir")]
    config_dir = typed.config_dir and typed.config_dir.absolute()
    return sweep_command([*words, *_folder_overrides(sweep.folder)], config_dir, typed.only_from)


def _folder_overrides(folder: Path) -> list[str]:
    """Return the overrides that lead to the folder of a sweep from anywhere."""
    root = folder.absolute().parent.parent
    return [f"run.name={folder.name}", *([] if str(root) == default_outputs() else [f"run.root={root}"])]
