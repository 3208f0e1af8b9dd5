"""Connection to a Ray cluster (https://docs.ray.io) and its resources. Imports no torch."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.folders import ray_environment
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.run import LauncherConfig

ADDRESS = "RAY_ADDRESS"
"""Ray's environment variable with the cluster's address, set by `ray job submit`."""
OWN = "LIGHTNING_LLM_RAY_ADDRESS"
"""Environment variable with the address of a Ray that a sweep has started for its jobs."""
NAMESPACE = "lightning-llm"
OF_THIS_MACHINE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_worker_niceness": "0",
}
"""Environment of a Ray that is started here: no usage statistics, loopback interface only, and no niceness of workers
(default: 15). Ray uses only the loopback interface on systems where it does not support clusters
(ray/_private/services.py, get_node_ip_address)."""

ONE_TRY = "RAY_NUM_REDIS_GET_RETRIES", "1"
"""Try once if something else listens at the address. A try takes 40 seconds, and Ray 2.60 makes 20 by default."""


def ray_problems(config: Config) -> Iterator[Problem]:
    """Yield the reasons why Ray cannot place the ranks of the run; none if `launcher` is not ray."""
    launcher, devices = config.launcher, config.trainer.devices
    if launcher.name != "ray":
        return
    if find_spec("ray") is None:
        yield Problem("launcher.name", "needs Ray. Install it: pip install 'lightning-llm[ray]'.", "ray")
    if (launcher.address or "").startswith("ray://"):
        text = "Ray client addresses are not supported. Start on a machine of the cluster with address=auto, or with "
        yield Problem("launcher.address", text + "`ray job submit`, which sets RAY_ADDRESS.", launcher.address)
    if config.world is not None and config.world % devices:
        text = f"must be a multiple of trainer.devices={devices}, the ranks of each machine. Change either."
        yield Problem("world", text, config.world)


def machines(config: Config) -> int:
    """Return the number of machines of a run, with `trainer.devices` ranks each."""
    return max(1, (config.world or config.trainer.devices) // config.trainer.devices)


def bundle(config: Config, gpus_there: bool) -> dict[str, float]:
    """Return the resources to request from Ray for one machine's ranks; `gpus_there`: whether the cluster has GPUs."""
    launcher, devices = config.launcher, config.trainer.devices
    accelerator = config.trainer.accelerator
    on_gpus = accelerator == "cuda" or (accelerator == "auto" and gpus_there)
    asked = {
        "CPU": launcher.cpus_per_task or devices,
        "GPU": launcher.gpus_per_node or (devices if on_gpus else 0),
        "memory": (launcher.memory_gb or 0) * 2**30,
    }
    return {name: float(amount) for name, amount in asked.items() if amount}


def in_words(asked: dict[str, float]) -> str:
    """Return requested resources as text: "2 CPU, 1 GPU"."""
    shown = {name: amount / 2**30 if "memory" in name else amount for name, amount in asked.items()}
    return ", ".join(f"{amount:g} {'GiB of memory' if name == 'memory' else name}" for name, amount in shown.items())


@contextmanager
def connected(launcher: LauncherConfig) -> Iterator[Any]:
    """Yield the module `ray`, connected to `launcher.address`, RAY_ADDRESS, or a Ray started here for the block.

    Raises:
        ConfigError: Ray cannot be reached at the address, or cannot be started.
    """
    address = address_of(launcher)
    if address is None:
        for name, value in {**OF_THIS_MACHINE, **ray_environment()}.items():
            os.environ.setdefault(name, value)
    else:
        os.environ.setdefault(*ONE_TRY)
    import ray

    if ray.is_initialized():  # by a Python caller
        yield ray
        return
    own = {"include_dashboard": False} if address is None else {}
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        _knock(ray, address or "")
        ray.init(address or "local", namespace=NAMESPACE, **quiet, **own)
    except (ConnectionError, RuntimeError, ValueError, OverflowError, OSError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = "Ray cannot be reached there" if address else "Ray cannot be started here"
        remedy = "Check the address, and start Ray there." if address else "Fix this, or set the address of a cluster."
        text = f"{what}: {why.rstrip('.')}. {remedy}"
        raise ConfigError(Problem("launcher.address", text, address or "null")) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _knock(ray: Any, address: str) -> None:
    """Raise OSError, or another error of `socket` for a bad name, if `address` is HOST:PORT and nothing listens there.

    Ray would try for 15 minutes. `ray start` returns once the head of the cluster listens.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    host = host.strip("[]")
    if host in ("localhost", "127.0.0.1", "::1"):  # Ray replaces them by this machine's address in the cluster
        with suppress(OSError):
            socket.create_connection((ray.util.get_node_ip_address(), int(port)), timeout=10).close()
            return
    socket.create_connection((host, int(port)), timeout=10).close()


@contextmanager
def in_sweep(launcher: LauncherConfig) -> Iterator[None]:
    """Context of a sweep in which its jobs share one Ray, started here if `launcher` names none.

    Each job connects to it by the environment variable RAY_ADDRESS.
    """
    if launcher.name != "ray" or address_of(launcher) is not None:
        yield
        return
    with connected(launcher) as ray:
        os.environ[ADDRESS] = os.environ[OWN] = ray.get_runtime_context().gcs_address
        try:
            yield
        finally:
            del os.environ[ADDRESS], os.environ[OWN]


def too_small(ray: Any, count: int, asked: dict[str, float]) -> str | None:
    """Return why the cluster is too small for the ranks of `count` machines; None if it is large enough."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fit = sum(all(node.get(name, 0) >= amount for name, amount in asked.items()) for node in alive)
    if fit >= count:
        return None
    has = "; ".join(in_words({name: node.get(name, 0) for name in asked}) for node in alive)
    return f"{count} machine{'s' if count > 1 else ''} with {in_words(asked)} each, but Ray has {len(alive)}: {has}"


def address_of(launcher: LauncherConfig) -> str | None:
    """Return the cluster's address from the config or RAY_ADDRESS; None: start Ray on this machine."""
    return launcher.address or os.environ.get(ADDRESS) or None


def is_own(launcher: LauncherConfig) -> bool:
    """Return whether Ray was started here for this machine only, so that no other machine can join."""
    return address_of(launcher) in (None, os.environ.get(OWN))
