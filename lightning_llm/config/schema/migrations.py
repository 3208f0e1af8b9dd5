"""Keys of config.yaml files that earlier versions wrote -> the keys of today."""

from collections.abc import MutableMapping
from typing import Any

RENAMED = {
    f"precision.modules.{key}": f"precision.modules.{key}_precision"
    for key in ("first_blocks_high", "last_blocks_high", "first_fraction_high", "last_fraction_high")
}
"""{dotted key as it was first called: as it is called now}. Hashes are over the first name, so that they stay."""

ADDED = {"trainer.attention_kernel": "auto", "spikes.max_rollbacks": 3, "spikes.rollback_skip_steps": 2}
"""{dotted key that shapes what is learned: the value that says what every version before it did}. Runs of these are
read as if they said so, and hashes leave it out, so that they stay."""

_FIRST_NAMES = {now: before for before, now in RENAMED.items()}


def first_name(key: str) -> str:
    """Return what the dotted `key` was first called."""
    return _FIRST_NAMES.get(key, key)


def migrate(values: MutableMapping[Any, Any]) -> None:
    """Rename and complete the keys of a whole config in place, where an earlier version wrote it.

    Where it has a key under both names, both stay, and reading it reports the former as unknown.
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
