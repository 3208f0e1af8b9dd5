"""The config hash of a run, and the keys that may change when a run resumes."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b, sha256
from typing import Any

from lightning_llm.config.schema import Config
from lightning_llm.config.schema.aliases import ADDED, first_name

RUN_LOCATION = ("run.", "logger.", "launcher.", "resume", "resume_strict", "hardware", "cluster.")
"""Keys of where and how a run is planned, started, stored and tracked."""

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
"""Keys that are not in the config hash: where a run is stored, tracked and started, how casts and their GEMMs are
executed, kept and gathered, processes that build the token cache, health checks, and how checkpoints are written and
kept. (checkpoint.every_steps and keep_last stay in the hash, as in earlier releases.)"""

ONCE_WRITTEN = {"data.num_workers": 0, "parallel.compile": False, "trainer.compile": False}
"""Values in earlier releases of keys that may now be null; hashes use them for null."""

OBSERVERS = "lightning_llm.callbacks."
"""Package of callbacks that only observe; others may affect training."""

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
"""Keys that may change when a run resumes, because they do not affect training."""
MAY_MOVE = ("model.init_from", "model.name", "distil.teachers")
"""Paths of weights, and the model's name, which may be the name of their folder."""

DATA_PATH = re.compile(r"data\.((sources\.[^.]+|tokenizer)\.path|mixture\.scores)")


def is_data_path(key: str) -> bool:
    """Return whether the dotted `key` is a path of data, whose content `data_hash` in a run's summary identifies."""
    return DATA_PATH.fullmatch(key) is not None


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping as a flat one with dotted keys; empty mappings and lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def in_hash(key: str) -> bool:
    """Return whether the config hash includes the dotted `key` or group."""
    return not below(key, NOT_IDENTITY)


def config_hash(config: Config) -> str:
    """Return the config hash, 16 hex digits: equal for configs with equal `hashed_values`."""
    return sha256(json.dumps(hashed_values(config), sort_keys=True).encode()).hexdigest()[:16]


def hashed_values(config: Config) -> dict[str, Any]:
    """Return {dotted key: value} of the keys that the config hash covers: all except `NOT_IDENTITY`.

    Null values are omitted, so that optional keys added later do not change hashes; so are values that reproduce the
    behavior before a key existed. Renamed keys use their first name.
    """
    return _as_hashed(flatten(config.model_dump()))


def _as_hashed(flat: Mapping[str, Any]) -> dict[str, Any]:
    flat = {key: ONCE_WRITTEN.get(key) if value is None else value for key, value in flat.items() if in_hash(key)}
    flat = {key: value for key, value in flat.items() if ADDED.get(key) != value}
    return {first_name(key): value for key, value in flat.items() if value is not None}


def frozen_values(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return {dotted key: value} of the keys that must not change when a run resumes.

    `flat`: a config from `flatten`. Values are as JSON restores them. As in `hashed_values`, keys have their first
    names and null is omitted.
    """
    kept = {key: value for key, value in _as_hashed(flat).items() if not below(key, FREE_ON_RESUME)}
    return dict(json.loads(json.dumps(kept)))


def config_digest(flat: Mapping[str, Any]) -> str:
    """Return a hash of `frozen_values` (32 hex digits) without paths, whose content may have moved.

    A release that adds a key to `FREE_ON_RESUME` must keep it in this digest, or runs of earlier releases do not
    verify.
    """
    kept = {key: value for key, value in frozen_values(flat).items() if not may_move(key)}
    return blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16).hexdigest()


def may_move(key: str) -> bool:
    """Return whether the dotted `key` is a path of data or weights, which have separate digests."""
    return is_data_path(key) or key in MAY_MOVE


def training_hash(config: Config) -> str:
    """Return the config hash without callbacks that only observe: it is equal for equal training."""
    return config_hash(without_observers(config))


def without_observers(config: Config) -> Config:
    """Return `config` with only those callbacks that may affect training."""
    acting = {name: node for name, node in config.callbacks.items() if node and not is_observer(node)}
    return config.model_copy(update={"callbacks": acting})


def is_observer(callback: Mapping[str, Any]) -> bool:
    """Return whether the class of this callback only observes."""
    return str(callback.get("_target_")).startswith(OBSERVERS)


def differences_on_resume(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return {dotted key: (old value, new value)} of the differences that are not allowed when a run resumes."""
    before, after = flatten(old.model_dump()), flatten(new.model_dump())
    keys = sorted(before.keys() | after.keys())
    return {
        key: (before.get(key), after.get(key))
        for key in keys
        if before.get(key) != after.get(key) and not below(key, FREE_ON_RESUME)
    }


@lru_cache(maxsize=65536)
def below(key: str, prefixes: tuple[str, ...]) -> bool:
    """Return whether `key` is one of `prefixes`, or below one that ends with a dot."""
    return any(key == prefix.rstrip(".") or (prefix.endswith(".") and key.startswith(prefix)) for prefix in prefixes)
