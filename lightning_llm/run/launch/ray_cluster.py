"""A Ray cluster (https://docs.ray.io) that ranks are placed on: reaching it, and asking it. Imports no torch."""

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
"""Ray's own variable: `ray job submit` sets it for what it starts."""
OWN = "LIGHTNING_LLM_RAY_ADDRESS"
"""Of a Ray that a sweep has started here, for its jobs."""
NAMESPACE = "lightning-llm"
OF_THIS_MACHINE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_worker_niceness": "0",
}
"""For a Ray that is started here: it reports to nobody, and listens on the loopback interface alone, as it does by
default on systems that it makes no clusters of (ray/_private/services.py, get_node_ip_address). Its workers, and what
they start, are no nicer than others: 15 is its default."""

ONE_TRY = "RAY_NUM_REDIS_GET_RETRIES", "1"
"""Where something else listens at an address, Ray says so after 40 seconds: 20 tries of them are its default (2.60)."""


def ray_problems(config: Config) -> Iterator[Problem]:
    """Yield what keeps ranks from being placed by Ray."""
    launcher, devices = config.launcher, config.trainer.devices
    if launcher.name != "ray":
        return
    if find_spec("ray") is None:
        yield Problem("launcher.name", "is ray, which needs Ray: pip install 'lightning-llm[ray]'.")
    if (launcher.address or "").startswith("ray://"):
        text = f"is {launcher.address}, of Ray's client. Start on a machine of the cluster with address=auto, or by "
        yield Problem("launcher.address", text + "ray job submit, which sets RAY_ADDRESS.")
    if config.world is not None and config.world % devices:
        text = f"is {config.world}, no multiple of trainer.devices={devices}, the ranks of each machine. Set either."
        yield Problem("world", text)


def machines(config: Config) -> int:
    """Return how many machines a run's ranks are placed on, `trainer.devices` ranks on each."""
    return max(1, (config.world or config.trainer.devices) // config.trainer.devices)


def bundle(config: Config, gpus_there: bool) -> dict[str, float]:
    """Return what the ranks of one machine ask Ray for; `gpus_there`: whether the cluster has any GPU."""
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
    """Return a bundle for a message: "2 CPU, 1 GPU"."""
    shown = {name: amount / 2**30 if "memory" in name else amount for name, amount in asked.items()}
    return ", ".join(f"{amount:g} {'GiB of memory' if name == 'memory' else name}" for name, amount in shown.items())


@contextmanager
def connected(launcher: LauncherConfig) -> Iterator[Any]:
    """Yield the module `ray`, connected to `launcher.address`, RAY_ADDRESS, or a Ray that is started here meanwhile.

    Raises:
        ConfigError: there is no Ray at that address, or none can be started.
    """
    address = address_of(launcher)
    if address is None:
        for name, value in {**OF_THIS_MACHINE, **ray_environment()}.items():
            os.environ.setdefault(name, value)
    else:
        os.environ.setdefault(*ONE_TRY)
    import ray

    if ray.is_initialized():  # by whoever called, from Python
        yield ray
        return
    own = {"include_dashboard": False} if address is None else {}
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        _knock(ray, address or "")
        ray.init(address or "local", namespace=NAMESPACE, **quiet, **own)
    except (ConnectionError, RuntimeError, ValueError, OverflowError, OSError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"is {address}, and no Ray is to be reached there" if address else "is null, and no Ray can start here"
        raise ConfigError(Problem("launcher.address", f"{what}: {why}")) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _knock(ray: Any, address: str) -> None:
    """Raise OSError, or what `socket` raises of a bad name, if `address` is HOST:PORT and nobody listens there.

    Ray would look for a quarter of an hour. `ray start` returns once the head of a cluster listens.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    host = host.strip("[]")
    if host in ("localhost", "127.0.0.1", "::1"):  # Ray takes them for this machine's address in the cluster
        with suppress(OSError):
            socket.create_connection((ray.util.get_node_ip_address(), int(port)), timeout=10).close()
            return
    socket.create_connection((host, int(port)), timeout=10).close()


@contextmanager
def in_sweep(launcher: LauncherConfig) -> Iterator[None]:
    """Have the jobs of a sweep share one Ray, where one is to be started here; each reaches it by itself."""
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
    """Return why the cluster, as it is, can never hold `count` machines' ranks, None if it can."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fit = sum(all(node.get(name, 0) >= amount for name, amount in asked.items()) for node in alive)
    if fit >= count:
        return None
    has = "; ".join(in_words({name: node.get(name, 0) for name in asked}) for node in alive)
    return f"{count} machine{'s' if count > 1 else ''} with {in_words(asked)} each, and Ray has {len(alive)}: {has}"


def address_of(launcher: LauncherConfig) -> str | None:
    """Return where the cluster is, by the config or by RAY_ADDRESS; None: one is started on this machine."""
    return launcher.address or os.environ.get(ADDRESS) or None


def is_own(launcher: LauncherConfig) -> bool:
    """Return whether the cluster is one that was started here, of this machine alone: no other will ever join it."""
    return address_of(launcher) in (None, os.environ.get(OWN))
