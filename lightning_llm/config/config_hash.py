"""Identity of a run: its config hash, and what may differ when it resumes."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b, sha256
from typing import Any

from lightning_llm.config.schema import Config
from lightning_llm.config.schema.migrations import ADDED, first_name

RUN_LOCATION = ("run.", "logger.", "launcher.", "resume", "resume_strict", "hardware", "cluster.")
"""How and where a run was planned and started, is kept and tracked."""

NOT_IDENTITY = (
    *RUN_LOCATION,
    "precision.casts",
    "precision.backend",
    "precision.parameter_gather",
    "precision.keep_weight_casts",
    "data.tokenize_processes",
    "trainer.max_restarts",
    "trainer.health",
    "trainer.max_time",
    "checkpoint.asynchronous",
    "checkpoint.keep_every",
    "checkpoint.keep_best",
)
"""Left out of the config hash: where a run is kept and tracked, how it was started, how casts and their GEMMs run, are
kept and travel, how many processes built its token cache, whether its ranks were looked at before, how checkpoints are
written and which of them stay. (Runs of earlier releases have checkpoint.every_steps and keep_last in their hashes.)"""

ONCE_WRITTEN = {"data.num_workers": 0, "parallel.compile": False, "trainer.compile": False}
"""What earlier releases had for keys that may be null by now: it stands in the hashes of their runs."""

OBSERVERS = "lightning_llm.callbacks."
"""Where callbacks lie that only watch; others may act on training."""

FREE_ON_RESUME = (
    *NOT_IDENTITY,
    "data.epochs",
    "trainer.max_steps",
    "trainer.validate_every_steps",
    "trainer.devices",
    "trainer.attention_kernel",
    "trainer.compile",
    "world",
    "parallel.",
    "data.micro_batch_size",
    "data.cache_dir",
    "data.num_workers",
    "data.skip_samples",
    "checkpoint.",
    "callbacks.",
)
"""May differ between a run and its continuation: none of these chooses what is learned from which token."""
MAY_MOVE = ("model.init_from", "model.name", "distil.teachers")
"""Places of weights, and the model's name, which may be the name of their folder."""

DATA_PATH = re.compile(r"data\.((sources\.[^.]+|tokenizer)\.path|mixture\.scores)")


def is_data_path(key: str) -> bool:
    """Return whether the dotted `key` says where data lie. What they are, `data_hash` in a run's summary says."""
    return DATA_PATH.fullmatch(key) is not None


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one of dotted keys; an empty mapping stays a value, lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def in_hash(key: str) -> bool:
    """Return whether the config hash depends on the dotted `key`, or group."""
    return not below(key, NOT_IDENTITY)


def config_hash(config: Config) -> str:
    """Return 16 hex digits over `hashed_values`."""
    return sha256(json.dumps(hashed_values(config), sort_keys=True).encode()).hexdigest()[:16]


def hashed_values(config: Config) -> dict[str, Any]:
    """Return everything in the config that is not `NOT_IDENTITY`, by dotted key.

    What is null is left out, so that an optional key that is added later changes no hash; so is what runs did before
    there was a key for it, and a key goes by its first name.
    """
    return _as_hashed(flatten(config.model_dump()))


def _as_hashed(flat: Mapping[str, Any]) -> dict[str, Any]:
    flat = {key: ONCE_WRITTEN.get(key) if value is None else value for key, value in flat.items() if in_hash(key)}
    flat = {key: value for key, value in flat.items() if ADDED.get(key) != value}
    return {first_name(key): value for key, value in flat.items() if value is not None}


def frozen_values(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a flat config that must stay the same on resume, as JSON reads them back.

    They are normalized as `hashed_values` are: keys by their first names, null left out.
    """
    kept = {key: value for key, value in _as_hashed(flat).items() if not below(key, FREE_ON_RESUME)}
    return dict(json.loads(json.dumps(kept)))


def config_digest(flat: Mapping[str, Any]) -> str:
    """Return 32 hex digits over `frozen_values`, except those that may name the same content at another place.

    A release that adds a key to `FREE_ON_RESUME` must keep it in this digest, or earlier runs no longer verify.
    """
    kept = {key: value for key, value in frozen_values(flat).items() if not may_move(key)}
    return blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16).hexdigest()


def may_move(key: str) -> bool:
    """Return whether the dotted `key` names data or weights by place, whose content has a digest of its own."""
    return is_data_path(key) or key in MAY_MOVE


def training_hash(config: Config) -> str:
    """Return the `config_hash` of `config` without its observers: the same where the same is learned."""
    return config_hash(without_observers(config))


def without_observers(config: Config) -> Config:
    """Return `config` with those callbacks alone that may act on training."""
    acting = {name: node for name, node in config.callbacks.items() if node and not is_observer(node)}
    return config.model_copy(update={"callbacks": acting})


def is_observer(callback: Mapping[str, Any]) -> bool:
    """Return whether the callback of these keys only watches, as far as its class tells."""
    return str(callback.get("_target_")).startswith(OBSERVERS)


def differences_on_resume(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return {key: (old, new)} for every difference that a resumed run must not have."""
    before, after = flatten(old.model_dump()), flatten(new.model_dump())
    keys = sorted(before.keys() | after.keys())
    return {
        key: (before.get(key), after.get(key))
        for key in keys
        if before.get(key) != after.get(key) and not below(key, FREE_ON_RESUME)
    }


@lru_cache(maxsize=65536)
def below(key: str, prefixes: tuple[str, ...]) -> bool:
    """Return whether `key` is one of `prefixes`, or lies below one that ends with a dot."""
    return any(key == prefix.rstrip(".") or (prefix.endswith(".") and key.startswith(prefix)) for prefix in prefixes)
