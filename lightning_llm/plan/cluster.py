"""Rules of a cluster's keys, alone and with the rest of a config; and the file of a measured cluster. No torch."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lightning_llm.base.errors import Problem
from lightning_llm.base.hardware import planned_peak_flops
from lightning_llm.config.schema import ClusterConfig, Config
from lightning_llm.config.schema.strict import Rule

_MEMORY = "cluster.memory_gb_per_second"
LEAST, MOST = 0.01, 1.2
"""Of the data sheet's dense peak: what a measured one may be. Figures with sparsity are twice the dense ones."""
ClusterRule = Callable[[Config, ClusterConfig], Iterator[Problem]]


def cluster_rules(config: Config) -> list[Rule]:
    """Return the rules of `cluster`, one for each pair of figures, so that one wrong figure silences no other rule."""
    figures = _memory_problems, _link_problems, _package_problems, _package_memory_problems
    rules = (_device_problems, _peak_problems, _node_problems, *figures)
    return [partial(_found, rule, config) for rule in rules]


def _found(rule: ClusterRule, config: Config) -> list[Problem]:
    return list(rule(config, config.cluster)) if config.cluster else []


def _device_problems(config: Config, cluster: ClusterConfig) -> Iterator[Problem]:
    if config.hardware not in (None, cluster.hardware):
        text = (
            f"is {config.hardware}, and cluster={cluster.name} has {cluster.hardware}. Set it to null, or to "
            f"{cluster.hardware}, or take another cluster."
        )
        yield Problem("hardware", text)
    compute, measured = config.precision.compute_dtype, cluster.peak_tflops
    if measured is not None and compute not in measured:
        text = f"has no {compute}, in which the run computes: give it, 10^12 FLOP/s, or null for the data sheet's."
        yield Problem("cluster.peak_tflops", text)
    elif measured is None and planned_peak_flops(cluster.hardware, compute) is None:
        text = f"has no {compute}, and no table has that peak of {cluster.hardware}: give it, 10^12 FLOP/s."
        yield Problem("cluster.peak_tflops", text)


def _peak_problems(config: Config, cluster: ClusterConfig) -> Iterator[Problem]:
    """Yield measured peaks that are no dense GEMM's on this device: a sparse figure, or one in another unit."""
    for number_format, measured in (cluster.peak_tflops or {}).items():
        peak = planned_peak_flops(cluster.hardware, number_format)
        if peak is None or LEAST * peak <= 1e12 * measured <= MOST * peak:
            continue
        text = (
            f"is {measured:g}, and a {cluster.hardware}'s data sheet has {peak / 1e12:g}, dense: between {LEAST:g} and "
            f"{MOST:g} times that. It is in 10^12 FLOP/s, without sparsity."
        )
        yield Problem(f"cluster.peak_tflops.{number_format}", text)


def _node_problems(config: Config, cluster: ClusterConfig) -> Iterator[Problem]:
    devices, there = config.trainer.devices, cluster.devices_per_node
    if devices > there:
        world = config.world or devices
        text = f"is {devices}: must be at most {there}, the devices of a machine of cluster={cluster.name}. Set it to"
        yield Problem("trainer.devices", f"{text} {there}, and world={world} for all ranks.")


def _memory_problems(config: Config, cluster: ClusterConfig) -> Iterator[Problem]:
    within, memory = cluster.within_node.gb_per_second, cluster.memory_gb_per_second
    if within > memory:
        text = f"is {within:g}, above {_MEMORY}={memory:g}, from which it is read. Are these Gb/s?"
        yield Problem("cluster.within_node.gb_per_second", text)


def _link_problems(config: Config, cluster: ClusterConfig) -> Iterator[Problem]:
    within, between = cluster.within_node.gb_per_second, cluster.between_nodes.gb_per_second
    if between > within:
        text = f"is {between:g}, above cluster.within_node.gb_per_second={within:g}. Are these Gb/s, or all devices'?"
        yield Problem("cluster.between_nodes.gb_per_second", text)


def _package_problems(config: Config, cluster: ClusterConfig) -> Iterator[Problem]:
    devices, package = cluster.devices_per_package, cluster.within_package
    if cluster.devices_per_node % devices:
        text = f"is {devices}, and does not divide cluster.devices_per_node={cluster.devices_per_node}."
        yield Problem("cluster.devices_per_package", text)
    if (devices > 1) != (package is not None):
        text = f"is {devices}, and cluster.within_package is {'null' if package is None else 'given'}. Give both."
        yield Problem("cluster.devices_per_package", text)
    within = cluster.within_node.gb_per_second
    if package is not None and package.gb_per_second < within:
        text = f"is {package.gb_per_second:g}, below cluster.within_node.gb_per_second={within:g}. Leave it out."
        yield Problem("cluster.within_package.gb_per_second", text)


def _package_memory_problems(config: Config, cluster: ClusterConfig) -> Iterator[Problem]:
    package, memory = cluster.within_package, cluster.memory_gb_per_second
    if package is not None and package.gb_per_second > memory:
        text = f"is {package.gb_per_second:g}, above {_MEMORY}={memory:g}, from which it is read. Are these Gb/s?"
        yield Problem("cluster.within_package.gb_per_second", text)


MEASURED = "measured"


def write_cluster(folder: Path, values: Mapping[str, Any], how: str) -> Path:
    """Write `folder`/cluster/measured.yaml, of which `how` says whence it is; return it.

    `values` are the keys of `cluster` but its name. Links are at most as fast as the memory that they are read from.
    """
    most = values["memory_gb_per_second"]
    links = {
        key: {**values[key], "gb_per_second": min(values[key]["gb_per_second"], most)}
        for key in ("within_node", "between_nodes")
    }
    whole = ClusterConfig.model_validate({"name": MEASURED, **values, **links})
    file = folder / "cluster" / f"{MEASURED}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    content = yaml.safe_dump(whole.model_dump(exclude_unset=True), sort_keys=False)
    file.write_text(f"# {how}\n{content}", encoding="utf-8")
    return file
