"""Files of a sweep's folder: `sweep.json` with its jobs, and `search.json` with the trials of a search. No torch.

A job has the same key in all starts of the sweep. In a sweep with declared looks, the error rate holds only for the
declared arms, so other arms cannot be added later; seeds can.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.config_hash import RUN_LOCATION, below, flatten, hashed_values, in_hash, without_observers
from lightning_llm.config.schema import Config
from lightning_llm.tracking.files import write_json

FILE = "sweep.json"
LOCKS = ".claims"
"""Folder next to `FILE` with the locks of the sweep and its jobs."""
DESIGN = "sequential"
"""Key in `FILE` of the looks declared before the first run (`compare.looks`)."""
SEARCH = "search"
"""Key in `FILE` of the declared terms of a search."""
OTHER_KEYS = "all_other_keys"
"""Key within the terms of a search: hash of the settings that all trials share, which are below "derived"."""
TOLD = "mlflow_was_told"
"""Key in `FILE` of the end of the sweep as logged to MLflow; removed when the sweep is resumed."""
BEGINNING = (LOCKS, f"{FILE}.partial")
"""Files that the folder may contain before `FILE` exists, while another start creates it."""
SEARCH_FILE = "search.json"
ENDED_AT = "ended_at"
"""Key in the row of a trial or arm with the `step` at which it was ended and its `gap` there; null if it was not."""
UNHASHED = ("callbacks.",)
"""Prefixes of keys that `training_hash` covers only in part."""
SHOWN_KEYS = 5
"""Maximum number of keys named in a message about differences from a declared job."""


def checked_sweep(about: Any) -> dict[str, Any]:
    """Return `about`, the parsed content of `sweep.json`. Raises ValueError if it is not valid."""
    jobs = about.get("jobs") if isinstance(about, dict) else None
    if not isinstance(jobs, list) or not all(isinstance(job, dict) for job in jobs):
        raise ValueError("it is damaged: there is no list of jobs")
    numbers, keys = [job.get("number") for job in jobs], [job.get("key") for job in jobs]
    if not all(type(number) is int and number >= 0 for number in numbers) or len(set(numbers)) < len(numbers):
        raise ValueError("it is damaged: jobs without a unique number")
    if not all(isinstance(key, str) for key in keys) or len(set(keys)) < len(keys):
        raise ValueError("it is damaged: jobs without a unique key")
    listed = [job.get("words") for job in jobs]
    if not all(isinstance(own, list) and all(isinstance(each, str) for each in own) for own in listed):
        raise ValueError("it is damaged: jobs without words")
    if not all(type(job.get("seed")) is int and isinstance(job["kind"], str) for job in jobs if "kind" in job):
        raise ValueError("it is damaged: jobs with an invalid seed or kind")
    if not all(isinstance(job.get("branch_from"), str | None) for job in jobs):
        raise ValueError("it is damaged: jobs with an invalid branch_from")
    for key in (DESIGN, SEARCH):
        if key in about and not (isinstance(about[key], dict) and about[key]):
            raise ValueError(f"it is damaged: '{key}' is not a mapping of declared terms")
    return dict(about)


def read_sweep_file(folder: Path) -> dict[str, Any]:
    """Return the validated content of `sweep.json` in `folder`; {} if no sweep has begun there.

    Raises:
        ConfigError: the folder contains something else than a sweep.
    """
    if not folder.exists() or (folder.is_dir() and all(path.name in BEGINNING for path in folder.iterdir())):
        return {}
    try:
        return checked_sweep(json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        text = f"{folder} does not contain a valid sweep ({FILE}: {error}). Give another run.name, or move it away."
        raise ConfigError(Problem("run.name", text)) from error


def read_declared(folder: Path) -> dict[str, Any]:
    """Return the declared terms of the sweep in `folder`; {} if there are none or the file cannot be read."""
    known = _as_it_is(folder)
    return {key: known[key] for key in (DESIGN, SEARCH) if key in known}


def parent_of_sweep(folder: Path) -> str | None:
    """Return the id of the MLflow parent run of the sweep in `folder`; None if unknown."""
    return _as_it_is(folder).get("mlflow_run_id")


def title_of(run_folder: Path) -> str:
    """Return a title for the run in `run_folder`: the folder's name; for a sweep's job "SWEEP/N: OVERRIDES"."""
    jobs = _as_it_is(run_folder.parent).get("jobs")
    for job in jobs if isinstance(jobs, list) else ():
        if isinstance(job, dict) and str(job.get("number")) == run_folder.name and isinstance(job.get("words"), list):
            return f"{run_folder.parent.name}/{run_folder.name}: {' '.join(map(str, job['words']))}"
    return run_folder.name


def _as_it_is(folder: Path) -> dict[str, Any]:
    """Return the content of the file in `folder` without validation; {} if it cannot be read (see `compare`)."""
    try:
        known = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def kind_of(config: Config) -> str:
    """Return the kind of a job: a hash (12 hex digits), equal for jobs that differ only in seed and parent run."""
    flat = flatten(config.model_dump(mode="json"))
    rest = (*RUN_LOCATION, "recipe", "seed", "branch_from")
    kind = {key: value for key, value in flat.items() if value is not None and not below(key, rest)}
    return sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:12]


def keys_of_jobs(
    jobs: Sequence[tuple[list[str], Config]], hash_of: Callable[[Config], str], partly: tuple[str, ...] = ()
) -> list[str]:
    """Return the key of each job, which identifies it in all starts of a sweep.

    A key is the hash of the job's config and those of its overrides that the hash does not cover but that differ
    between jobs (`precision.backend=auto`). Repetitions of a job (to compare it with itself) get the suffix "-1", ...

    Args:
        jobs: (overrides, config) of each job.
        hash_of: returns the hash of a config.
        partly: prefixes of keys that `hash_of` covers only in part.
    """
    unhashed = [{each for each in own if not in_hash(key_of(each)) or below(key_of(each), partly)} for own, _ in jobs]
    shared = set.intersection(*unhashed)
    seen: Counter[str] = Counter()
    keys = []
    for (_, config), own in zip(jobs, unhashed, strict=True):
        each = " ".join([hash_of(config), *sorted(own - shared)])
        keys.append(f"{each}-{seen[each]}" if seen[each] else each)
        seen[each] += 1
    return keys


def key_of(override: str) -> str:
    """Return the key of an override: "a.b" of "a.b=1" or "+a.b=1"."""
    return override.lstrip("+").partition("=")[0]


def axes_of(jobs: Iterable[Sequence[str]]) -> dict[str, list[str]]:
    """Return {key: its values} over all jobs of a sweep; `jobs`: the overrides that identify each job."""
    found: dict[str, dict[str, None]] = {}
    for overrides in jobs:
        for each in overrides:
            found.setdefault(key_of(each), {})[each.partition("=")[2]] = None
    return {key: list(values) for key, values in found.items()}


class RequestedJob(NamedTuple):
    """A job that a command requests: its key (`keys_of_jobs`), its kind (`kind_of`), its overrides and config."""

    key: str
    kind: str
    overrides: Sequence[str]
    config: Config


def check_declared_jobs(
    folder: Path, known: Mapping[str, Any], asked: Sequence[RequestedJob], *, by_looks: bool
) -> None:
    """Raise ConfigError if a requested job belongs to an arm that was not declared for the sweep in `folder`.

    Args:
        folder: the sweep's folder.
        known: its `sweep.json`, which contains all jobs of the first look.
        asked: the requested jobs.
        by_looks: jobs run as the looks need them; a job of a kind without a seed of the first look is then an A/A run,
            not an arm.
    """
    design = known[DESIGN]
    first = set(design["seeds"][: design["looks"][0]])
    listed = {each["key"]: each for each in known["jobs"]}
    kinds = {each.get("kind") for each in listed.values()} | {each.kind for each in asked if each.key in listed}
    foreign = [each for each in asked if each.kind not in kinds and (not by_looks or each.config.seed in first)]
    if not foreign:
        return
    declared = dict.fromkeys(_recipe(each["words"]) for each in listed.values())
    others = dict.fromkeys(_recipe(each.overrides) for each in foreign)
    differing = _differing(folder, listed.values(), foreign[0])
    text = (
        f"{folder} was begun with looks declared for {_list(declared)}, so {_list(others)}{differing} cannot be added: "
        "its error rate holds only for the arms declared before the first run. Use those, or give another run.name."
    )
    raise ConfigError(Problem("run.name", text))


def _recipe(overrides: Sequence[str]) -> str:
    return " ".join(each for each in overrides if not each.startswith("seed=")) or "one recipe"


def _list(recipes: Collection[str]) -> str:
    return "; ".join(recipes)


def _differing(folder: Path, listed: Collection[Mapping[str, Any]], asked: RequestedJob) -> str:
    """Return the differences from the job with the same overrides; "" if there is none or it has not begun."""
    same = [each for each in listed if _recipe(each["words"]) == _recipe(asked.overrides)]
    file = next((file for each in same if (file := folder / str(each["number"]) / "config.yaml").is_file()), None)
    if file is None:
        return ""
    from lightning_llm.config.from_file import load_config  # imports Hydra, which takes half a second

    try:
        was, now = (hashed_values(without_observers(each)) for each in (load_config(file, []), asked.config))
    except ConfigError:  # a damaged file, reported when the run is read
        return ""
    keys = sorted(key for key in was.keys() | now.keys() if was.get(key) != now.get(key) and key != "seed")
    shown = [f"{key} {was.get(key)} -> {now.get(key)}" for key in keys[:SHOWN_KEYS]]
    more = [f"{len(keys) - SHOWN_KEYS} more keys"] if len(keys) > SHOWN_KEYS else []
    return f" ({'; '.join([*shown, *more])})" if keys else ""


def write_results(folder: Path, trials: Sequence[Mapping[str, Any]], ended: Mapping[int, str]) -> None:
    """Write `search.json` of a search into its sweep's folder, for `compare`.

    `trials`: a row (JSON data) per trial or arm. `ended`: {job number: reason} of jobs that must not be compared.
    """
    write_json(
        folder / SEARCH_FILE, {"trials": list(trials), "ended": {str(number): why for number, why in ended.items()}}
    )


def ended_by_search(folder: Path) -> dict[Path, str]:
    """Return {folder of a job: reason} of jobs that the search in `folder` ended early; {} without a search.

    Raises:
        ValueError: its file cannot be read.
    """
    return {(folder / number).resolve(): str(why) for number, why in _part(folder, "ended", dict).items()}


def read_trials(folder: Path) -> list[dict[str, Any]]:
    """Return the trials or arms of the search in `folder`, one row each; [] without a search.

    Raises:
        ValueError: its file cannot be read.
    """
    rows: list[dict[str, Any]] = _part(folder, "trials", list)
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{folder / SEARCH_FILE} is damaged: a trial is not an object")
    return rows


def _part(folder: Path, key: str, kind: type) -> Any:
    """Return one part of the file; empty if there is no file. Raises ValueError if it is damaged."""
    file = folder / SEARCH_FILE
    if not file.is_file():
        return kind()
    try:
        found = json.loads(file.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(found, kind):
        raise ValueError(f"{file} is damaged: {key} is not {'a list' if kind is list else 'an object'}")
    return found
