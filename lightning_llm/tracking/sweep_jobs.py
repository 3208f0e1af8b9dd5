"""Jobs of a sweep: their keys over all sessions, and which jobs may join a sweep with declared looks. No torch.

The declared error rate holds only for the declared arms, so other arms cannot be added later; seeds can.
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
from lightning_llm.tracking.sweep_file import DESIGN

UNHASHED = ("callbacks.",)
"""Prefixes of keys that `training_hash` covers only in part."""


def kind_of(config: Config) -> str:
    """Return a hash (12 hex digits) that jobs share if they differ only in seed and parent run."""
    flat = flatten(config.model_dump(mode="json"))
    rest = (*RUN_LOCATION, "recipe", "seed", "branch_from")
    kind = {key: value for key, value in flat.items() if value is not None and not below(key, rest)}
    return sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:12]


def keys_of_jobs(
    jobs: Sequence[tuple[list[str], Config]], hash_of: Callable[[Config], str], partly: tuple[str, ...] = ()
) -> list[str]:
    """Return the key of each job: its hash, and the overrides that differ between jobs but are not in the hash.

    Such overrides are `precision.backend=auto` and those below `partly`. Repetitions of a job (to compare it with
    itself) get the suffix "-1", ...
    """
    unhashed = [
        {word for word in words if not in_hash(key_of(word)) or below(key_of(word), partly)} for words, _ in jobs
    ]
    shared = set.intersection(*unhashed)
    seen: Counter[str] = Counter()
    keys = []
    for (_, config), words in zip(jobs, unhashed, strict=True):
        each = " ".join([hash_of(config), *sorted(words - shared)])
        keys.append(f"{each}-{seen[each]}" if seen[each] else each)
        seen[each] += 1
    return keys


def key_of(word: str) -> str:
    """Return the key of an override."""
    return word.lstrip("+").partition("=")[0]


def axes_of(words_of_jobs: Iterable[Sequence[str]]) -> dict[str, list[str]]:
    """Return the keys that differ between jobs with their values, from the overrides of each job."""
    found: dict[str, dict[str, None]] = {}
    for words in words_of_jobs:
        for word in words:
            found.setdefault(key_of(word), {})[word.partition("=")[2]] = None
    return {key: list(values) for key, values in found.items()}


SHOWN_KEYS = 5
"""Maximum number of keys named in a message about differences from a declared job."""


class RequestedJob(NamedTuple):
    """A requested job: its `key` over all sessions, its `kind` (see `kind_of`), overrides and config."""

    key: str
    kind: str
    words: Sequence[str]
    config: Config


def check_declared_jobs(
    folder: Path, known: Mapping[str, Any], asked: Sequence[RequestedJob], *, by_looks: bool
) -> None:
    """Raise ConfigError if `asked` contains an arm that was not declared for the sweep in `folder`.

    `known`: its `sweep.json`, which contains all jobs of the first look. `by_looks`: jobs run as the looks need them; a
    job of a kind without a seed of the first look is an A/A run, not an arm.
    """
    design = known[DESIGN]
    first = set(design["seeds"][: design["looks"][0]])
    listed = {each["key"]: each for each in known["jobs"]}
    kinds = {each.get("kind") for each in listed.values()} | {each.kind for each in asked if each.key in listed}
    foreign = [each for each in asked if each.kind not in kinds and (not by_looks or each.config.seed in first)]
    if not foreign:
        return
    declared = dict.fromkeys(_recipe(each["words"]) for each in listed.values())
    others = dict.fromkeys(_recipe(each.words) for each in foreign)
    differing = _differing(folder, listed.values(), foreign[0])
    text = (
        f"{folder} was begun with looks declared for {_list(declared)}, so {_list(others)}{differing} cannot be added: "
        "its error rate holds only for the arms declared before the first run. Use those, or give another run.name."
    )
    raise ConfigError(Problem("run.name", text))


def _recipe(words: Sequence[str]) -> str:
    return " ".join(word for word in words if not word.startswith("seed=")) or "one recipe"


def _list(recipes: Collection[str]) -> str:
    return "; ".join(recipes)


def _differing(folder: Path, listed: Collection[Mapping[str, Any]], asked: RequestedJob) -> str:
    """Return the differences from the job with the same overrides; "" if there is none or it has not begun."""
    same = [each for each in listed if _recipe(each["words"]) == _recipe(asked.words)]
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
