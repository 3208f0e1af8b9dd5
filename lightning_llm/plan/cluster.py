"""Rules of the keys of `cluster`, and the file of a measured cluster. Imports no torch."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lightning_llm.base.errors import Problem
from lightning_llm.base.hardware import planned_peak_flops
from lightning_llm.config.schema import ClusterConfig, Config
from lightning_llm.config.schema.validation import Rule

_MEMORY = "cluster.memory_gb_per_second"
LEAST, MOST = 0.01, 1.2
"""Allowed range of a measured peak, relative to the data sheet's dense peak. It excludes peaks with sparsity (2)."""
ClusterRule = Callable[[Config, ClusterConfig], Iterator[Problem]]


def cluster_rules(config: Config) -> list[Rule]:
    """Return the rules of `cluster`, one per pair of figures, since an invalid figure skips the rules that read it."""
    figures = _memory_problems, _link_problems, _package_problems, _package_memory_problems
    rules = (_device_problems, _peak_problems, _node_problems, *figures)
    return [partial(_found, rule, config) for rule in rules]


def _found(rule: ClusterRule, config: Config) -> list[Problem]:
    return list(rule(config, config.cluster)) if config.cluster else []


def _device_problems(config: Config, cluster: ClusterConfig) -> Iterator[Problem]:
    if config.hardware not in (None, cluster.hardware):
        text = (
            f"is {config.hardware}, and cluster={cluster.name} has {cluster.hardware}. Set it to null, or to "
            f"{cluster.hardware}, or use another cluster."
        )
        yield Problem("hardware", text)
    compute, measured = config.precision.compute_dtype, cluster.peak_tflops
    if measured is not None and compute not in measured:
        text = f"has no {compute}, the run's compute dtype. Add it in 10^12 FLOP/s, or set null for the data sheet's."
        yield Problem("cluster.peak_tflops", text)
    elif measured is None and planned_peak_flops(cluster.hardware, compute) is None:
        text = f"has no {compute}, and no peak of {cluster.hardware} is known. Add it in 10^12 FLOP/s."
        yield Problem("cluster.peak_tflops", text)


def _peak_problems(config: Config, cluster: ClusterConfig) -> Iterator[Problem]:
    """Yield measured peaks that no dense GEMM reaches on this device: figures with sparsity, or in another unit."""
    for number_format, measured in (cluster.peak_tflops or {}).items():
        peak = planned_peak_flops(cluster.hardware, number_format)
        if peak is None or LEAST * peak <= 1e12 * measured <= MOST * peak:
            continue
        text = (
            f"must be {LEAST:g} to {MOST:g} times {peak / 1e12:g}, the dense peak of {cluster.hardware}. Give 10^12 "
            "FLOP/s, without sparsity."
        )
        yield Problem(f"cluster.peak_tflops.{number_format}", text, f"{measured:g}")


def _node_problems(config: Config, cluster: ClusterConfig) -> Iterator[Problem]:
    devices, there = config.trainer.devices, cluster.devices_per_node
    if devices > there:
        world = config.world or devices
        text = f"must be at most {there}, the devices per machine of cluster={cluster.name}. Set it to {there}, and"
        yield Problem("trainer.devices", f"{text} world={world} for all ranks.", devices)


def _memory_problems(config: Config, cluster: ClusterConfig) -> Iterator[Problem]:
    within, memory = cluster.within_node.gb_per_second, cluster.memory_gb_per_second
    if within > memory:
        text = f"is {within:g}, above {_MEMORY}={memory:g}, from which it is read. Are these Gb/s?"
        yield Problem("cluster.within_node.gb_per_second", text)


def _link_problems(config: Config, cluster: ClusterConfig) -> Iterator[Problem]:
    within, between = cluster.within_node.gb_per_second, cluster.between_nodes.gb_per_second
    if between > within:
        text = f"is {between:g}, above cluster.within_node.gb_per_second={within:g}. Is it in Gb/s, or of all devices?"
        yield Problem("cluster.between_nodes.gb_per_second", text)


def _package_problems(config: Config, cluster: ClusterConfig) -> Iterator[Problem]:
    devices, package = cluster.devices_per_package, cluster.within_package
    if cluster.devices_per_node % devices:
        text = f"must divide cluster.devices_per_node={cluster.devices_per_node}."
        yield Problem("cluster.devices_per_package", text, devices)
    if (devices > 1) != (package is not None):
        text = f"is {devices}, and cluster.within_package is {'null' if package is None else 'given'}. Give both."
        yield Problem("cluster.devices_per_package", text)
    within = cluster.within_node.gb_per_second
    if package is not None and package.gb_per_second < within:
        text = f"is {package.gb_per_second:g}, below cluster.within_node.gb_per_second={within:g}. Omit it."
        yield Problem("cluster.within_package.gb_per_second", text)


def _package_memory_problems(config: Config, cluster: ClusterConfig) -> Iterator[Problem]:
    package, memory = cluster.within_package, cluster.memory_gb_per_second
    if package is not None and package.gb_per_second > memory:
        text = f"is {package.gb_per_second:g}, above {_MEMORY}={memory:g}, from which it is read. Are these Gb/s?"
        yield Problem("cluster.within_package.gb_per_second", text)


MEASURED = "measured"


def write_cluster(folder: Path, values: Mapping[str, Any], how: str) -> Path:
    """Write `folder`/cluster/measured.yaml and return its path. `how`: how it was measured, as a comment in the file.

    `values` are the keys of `cluster` except its name. Link speeds are capped at the memory bandwidth.
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
