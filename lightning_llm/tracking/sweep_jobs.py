"""Jobs of a sweep: their keys over repeated starts, and which jobs may join a sweep with declared looks. No torch.

The declared error rate holds for the declared recipes alone, so no other recipe joins later; seeds may.
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
"""Of which `training_hash` leaves some out."""


def kind_of(config: Config) -> str:
    """Return what a job shares with those of other seeds and trunks, and with no other: 12 hex digits."""
    flat = flatten(config.model_dump(mode="json"))
    rest = (*RUN_LOCATION, "recipe", "seed", "branch_from")
    kind = {key: value for key, value in flat.items() if value is not None and not below(key, rest)}
    return sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:12]


def keys_of_jobs(
    jobs: Sequence[tuple[list[str], Config]], hash_of: Callable[[Config], str], partly: tuple[str, ...] = ()
) -> list[str]:
    """Return what names each job: its hash, and the words that jobs differ in and that the hash leaves out.

    Such a word is `precision.backend=auto`, or one below `partly`. A second run of the same (to compare it with itself)
    gets "-1", ...
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
    """Return the values that jobs differ in, by key, from the words of each."""
    found: dict[str, dict[str, None]] = {}
    for words in words_of_jobs:
        for word in words:
            found.setdefault(key_of(word), {})[word.partition("=")[2]] = None
    return {key: list(values) for key, values in found.items()}


SHOWN_KEYS = 5
"""How many keys that differ from a declared job's a message names."""


class Asked(NamedTuple):
    """A job that is asked for: its `key` over all starts, its `kind`, as `kind_of` says, its words and config."""

    key: str
    kind: str
    words: Sequence[str]
    config: Config


def check_declared_jobs(folder: Path, known: Mapping[str, Any], asked: Sequence[Asked], *, by_looks: bool) -> None:
    """Raise ConfigError where `asked` has a recipe that was not among those declared for the sweep in `folder`.

    `known`: its `sweep.json`, which has had all jobs of the first look since before the first run. `by_looks`: jobs
    are run as looks ask for them; one of a kind without a seed of the first is of no recipe, but an A/A run.
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
        f"{folder} was begun with looks declared for {_list(declared)}, and this asks for {_list(others)}{differing}: "
        "its intervals hold together over the recipes that were declared before the first run. Give those again, or "
        "another run.name."
    )
    raise ConfigError(Problem("run.name", text))


def _recipe(words: Sequence[str]) -> str:
    return " ".join(word for word in words if not word.startswith("seed=")) or "one recipe"


def _list(recipes: Collection[str]) -> str:
    return "; ".join(recipes)


def _differing(folder: Path, listed: Collection[Mapping[str, Any]], asked: Asked) -> str:
    """Return what the job of the same words has otherwise, "" where there is none, or it has not begun."""
    same = [each for each in listed if _recipe(each["words"]) == _recipe(asked.words)]
    file = next((file for each in same if (file := folder / str(each["number"]) / "config.yaml").is_file()), None)
    if file is None:
        return ""
    from lightning_llm.config.from_file import load_config  # Hydra: half a second that readers of sweeps do without

    try:
        was, now = (hashed_values(without_observers(each)) for each in (load_config(file, []), asked.config))
    except ConfigError:  # a damaged file: whoever reads the run says so
        return ""
    keys = sorted(key for key in was.keys() | now.keys() if was.get(key) != now.get(key) and key != "seed")
    shown = [f"{key} was {was.get(key)}, is {now.get(key)}" for key in keys[:SHOWN_KEYS]]
    more = [f"{len(keys) - SHOWN_KEYS} more keys"] if len(keys) > SHOWN_KEYS else []
    return f" ({'; '.join([*shown, *more])})" if keys else ""
