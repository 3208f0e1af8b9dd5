"""Migration of config.yaml files of earlier releases: renamed and added keys."""

from collections.abc import MutableMapping
from typing import Any

RENAMED = {
    f"precision.modules.{key}": f"precision.modules.{key}_precision"
    for key in ("first_blocks_high", "last_blocks_high", "first_fraction_high", "last_fraction_high")
}
"""{first name of a dotted key: current name}. Hashes use the first name, so that they stay the same."""

ADDED = {
    "trainer.attention_kernel": "auto",
    "spikes.max_rollbacks": 3,
    "spikes.rollback_skip_steps": 2,
    "parallel.ep": 1,
}
"""{dotted key that affects training: value that reproduces the releases before it}. Configs of those releases are read
with this value, and hashes omit it, so that they stay the same."""

_FIRST_NAMES = {now: before for before, now in RENAMED.items()}


def first_name(key: str) -> str:
    """Return the name that the dotted `key` had in its first release; `key` itself if it was never renamed."""
    return _FIRST_NAMES.get(key, key)


def migrate(values: MutableMapping[Any, Any]) -> None:
    """Rename and add keys of a config that an earlier release wrote, in place.

    If a key is present under both names, both stay, and parsing reports the first as unknown.
    """
    for before, now in RENAMED.items():
        *parents, former = before.split(".")
        node: Any = values
        for parent in parents:
            node = node.get(parent) if isinstance(node, MutableMapping) else None
        name = now.rpartition(".")[2]
        if isinstance(node, MutableMapping) and former in node and name not in node:
            node[name] = node.pop(former)
    for key, value in ADDED.items():
        group, _, name = key.partition(".")
        if isinstance(node := values.get(group), MutableMapping):
            node.setdefault(name, value)
