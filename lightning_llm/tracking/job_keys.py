"""What names a job of a sweep, over all of its starts and beside the others. Imports no torch."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256

from lightning_llm.config.identity import RUN_LOCATION, below, flatten, in_hash
from lightning_llm.config.schema import Config

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
