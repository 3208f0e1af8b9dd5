"""Which machines are meant: figures of a cluster that nobody chose, and a recipe's device beside a chosen one."""

from collections.abc import Collection

from omegaconf import DictConfig

from lightning_llm.base.errors import Problem

NAMED = ("name", "hardware")
"""What every cluster's file says, and no single figure stands for."""


def without_cluster(tree: DictConfig) -> Problem | None:
    """Return what is wrong where single figures of `cluster` are set and no cluster is chosen, else None."""
    cluster = tree.get("cluster")
    if not isinstance(cluster, DictConfig) or not cluster or any(key in cluster for key in NAMED):
        return None
    keys = ", ".join(f"cluster.{key}" for key in map(str, cluster))
    text = f"is none, and {keys} changes a figure of one. Choose it, too: cluster=h100_dgx, say."
    return Problem("cluster", text)


def give_way_to_cluster(tree: DictConfig, typed: Collection[str]) -> None:
    """Forget the device that a recipe was planned on, in place, where `typed` has a cluster of others and no device."""
    cluster = tree.get("cluster")
    if "cluster" in typed and "hardware" not in typed and isinstance(cluster, DictConfig) and "hardware" in cluster:
        tree.hardware = None
