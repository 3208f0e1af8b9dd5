"""Ranks of a run placed by Ray on one or more machines: start, watch, restart after a loss.

On each machine torch's agent starts the ranks, as under torchrun (`ray_node`); Ray chooses the machines.
"""

import json
import os
import queue
import re
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.process import slow_imports
from lightning_llm.base.signals import Relay, exit_code, signals_passed_on
from lightning_llm.config.schema import Config
from lightning_llm.config.workspace import config_dir_arguments, how_to_resume
from lightning_llm.config.yaml_file import config_text
from lightning_llm.run.launch.local_ranks import (
    SAVE_SECONDS,
    ExitStatus,
    Restarts,
    ended_by_failure,
    ended_by_signal,
    with_auto_resume,
)
from lightning_llm.run.launch.lock import lock_run
from lightning_llm.run.launch.ray_cluster import bundle, connected, in_words, is_own, machines, too_small
from lightning_llm.run.launch.ray_node import RayNode, Task
from lightning_llm.run.launch.torch_agent import Node
from lightning_llm.tracking.files import mark_failed
from lightning_llm.tracking.rank_liveness import clear_beats

FAILING_SECONDS = 30.0
"""Time for the ranks of other machines to end by themselves after those of one have failed.

After a signal they get the time to save instead.
"""
COMMAND: list[str] | None = None
"""Command that each machine runs; None: its own `agent_command`."""
NOTED_AFTER_SECONDS = 10.0
PASSED_ON = re.compile(r"PYTHONPATH|(LIGHTNING_LLM|MLFLOW|WANDB|HF|AWS|GLOO|NCCL|TORCH|TORCHINDUCTOR|PYTORCH)_\w+")
"""Environment variables passed on to ranks. They are sent only to Ray's actors and appear in no log of Ray."""


def start_ranks_on_ray(config: Config, quiet: bool = False) -> int:
    """Run `world` ranks on `world / trainer.devices` machines and restart them if lost; return the run's exit code.

    Raises:
        ConfigError: Ray cannot be reached, or has not enough resources.
    """
    with connected(config.launcher) as ray, signals_passed_on() as relay:
        restarts = Restarts(config)
        while restarts.again(ended := _run_once(ray, config, relay, quiet)):
            config = with_auto_resume(config)
        return ended.code


def _run_once(ray: Any, config: Config, relay: Relay, quiet: bool) -> ExitStatus:
    folder = Path(config.run.dir)
    lock_run(folder).release()  # raises if another process trains there: its heartbeats must stay
    clear_beats(folder)
    asked = bundle(config, ray.cluster_resources().get("GPU", 0) > 0)
    with _placed(ray, config, asked, relay) as nodes:
        if not nodes:
            return ExitStatus(exit_code(relay.received))
        start = PlacedRanks(ray, nodes)
        relay.processes.add(start)
        try:
            for number in (relay.received,) if relay.received else ():
                start.send_signal(number)  # received while the ranks were being placed
            start.run(config, int(asked["CPU"]), quiet)
        except ray.exceptions.RayError as error:
            return _lost(f"Ray lost a machine before its ranks started: {_first_line(error)}", folder)
        finally:
            relay.processes.discard(start)
    return _how_it_ended(start, config)


@contextmanager
def _placed(ray: Any, config: Config, asked: dict[str, float], relay: Relay) -> Iterator[list[Any]]:
    """Yield one actor per machine, each in one bundle of a placement group; [] if a signal was received first.

    Raises:
        ConfigError: Ray on this machine is too small, or a cluster had no room within `launcher.timeout_minutes`.
    """
    count, launcher = machines(config), config.launcher
    key = "launcher.cpus_per_task" if count == 1 else "world"
    small = too_small(ray, count, asked)
    if small and len(ray.nodes()) == 1 and is_own(launcher):
        text = f"the ranks need {small}. Request less (launcher.*), or set launcher.address to a cluster."
        raise ConfigError(Problem(key, text))
    spread = "STRICT_SPREAD" if count > 1 else "PACK"
    group = ray.util.placement_group([asked] * count, strategy=spread)
    actors: list[Any] = []
    try:
        began, noted = time.monotonic(), False
        while not relay.received and not group.wait(timeout_seconds=1):
            waited = time.monotonic() - began
            if waited > launcher.timeout_minutes * 60:
                needed = small or f"{count} x {in_words(asked)}"
                text = f"timeout: Ray had no room for the ranks, which need {needed}. Request less, or wait longer."
                raise ConfigError(Problem("launcher.timeout_minutes", text, launcher.timeout_minutes))
            if waited > NOTED_AFTER_SECONDS and not noted:
                noted = True
                what = small or f"{count} x {in_words(asked)}, in use by others"
                print(f"note   waiting for resources of Ray: {what}", file=sys.stderr, flush=True)
        if not relay.received:
            actors += [_actor(ray, group, number, asked) for number in range(count)]
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)


def _actor(ray: Any, group: Any, number: int, asked: dict[str, float]) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)
    options = {"num_cpus": asked["CPU"], "num_gpus": asked.get("GPU", 0), "memory": asked.get("memory")}
    return ray.remote(RayNode).options(scheduling_strategy=where, max_concurrency=3, **options).remote()


class PlacedRanks:
    """One start of a run's ranks on the machines of the actors `nodes` (`RayNode`).

    A receiver of signals (`base.signals.Started`): a signal goes to all machines.
    """

    def __init__(self, ray: Any, nodes: list[Any]):
        self.ray, self.nodes = ray, nodes
        self.reports: dict[int, dict[str, Any]] = {}
        self.lost: dict[int, str] = {}
        self._events: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.addresses: list[str] = []

    def send_signal(self, number: int, /) -> None:
        """Queue a signal, within a handler; `run` sends it."""
        self._signals.put(number)

    def run(self, config: Config, cpus: int, quiet: bool) -> None:
        """Start the ranks of all machines, forward their output, and return when all have ended."""
        environment = {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)}
        for number, task in enumerate(self._tasks(config, cpus, quiet)):
            stream = self.nodes[number].run.options(num_returns="streaming")
            events = stream.remote(task.as_json(), environment, COMMAND)
            threading.Thread(target=self._read, args=(number, events), daemon=True).start()
        until, stopping = float("inf"), False
        while len(self.reports) + len(self.lost) < len(self.nodes):
            while not self._signals.empty():
                self._to_all("send_signal", self._signals.get())
                stopping = True
            if time.monotonic() > until:
                until = float("inf")
                self._to_all("kill")
            try:
                number, kind, what = self._events.get(timeout=0.2)
            except queue.Empty:
                continue
            if kind in ("out", "err"):
                print(what, end="", file=sys.stdout if kind == "out" else sys.stderr, flush=True)
            elif kind == "end":
                self.reports[number] = what
            else:
                self.lost[number] = what
            if kind == "lost" or (kind == "end" and what["code"]):
                saves = stopping or (kind == "end" and "signal" in what)
                until = min(until, time.monotonic() + (SAVE_SECONDS if saves else FAILING_SECONDS))

    def _tasks(self, config: Config, cpus: int, quiet: bool) -> Iterator[Task]:
        count, text, run_id = len(self.nodes), config_text(config), uuid.uuid4().hex
        endpoints = self.ray.get([node.endpoint.remote() for node in self.nodes])
        self.addresses = [each.rpartition(":")[0] for each in endpoints]
        for number in range(count):
            node = asdict(Node(number, count, endpoints[0], run_id)) if count > 1 else None
            yield Task(text, config_dir_arguments(), cpus, node, quiet)

    def _read(self, number: int, events: Any) -> None:
        try:
            for reference in events:
                self._events.put((number, *self.ray.get(reference)))
        except self.ray.exceptions.RayError as error:
            self._events.put((number, "lost", _first_line(error)))

    def _to_all(self, method: str, *arguments: Any) -> None:
        for number, node in enumerate(self.nodes):
            if number not in self.reports and number not in self.lost:
                getattr(node, method).remote(*arguments)

    @property
    def failures(self) -> dict[int, dict[str, Any]]:
        """Failures by rank over all machines, as reported by torch's agents: exit code, time, exception."""
        found: dict[int, dict[str, Any]] = {}
        for report in self.reports.values():
            found |= {int(rank): each for rank, each in report.get("failures", {}).items()}
        return found


def _how_it_ended(start: PlacedRanks, config: Config) -> ExitStatus:
    """Return how a run ended from the reports of its machines; report the first failure."""
    folder = Path(config.run.dir)
    reports = start.reports.values()
    if start.lost:
        number, why = min(start.lost.items())
        detail = (
            f"machine {number} of {len(start.nodes)} ({start.addresses[number]}, ranks from "
            f"{number * config.trainer.devices}) was lost: {why}"
        )
        return _lost(detail, folder)
    if start.failures:
        return ended_by_failure(_child_failed(start.failures), folder, config.parallel.timeout_seconds)
    if signals := [report["signal"] for report in reports if "signal" in report]:
        return ended_by_signal(signals[0], folder)
    codes = [report["code"] for report in reports if report["code"]]
    if 2 in codes:
        return ExitStatus(2)  # the config's problems on that machine are already reported, and would recur
    if codes:
        return _lost(f"torch's agent on a machine of Ray exited with {codes[0]}", folder)
    return ExitStatus(0)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _lost(detail: str, folder: Path) -> ExitStatus:
    print(f"error: {detail}", file=sys.stderr)
    mark_failed(folder, detail)
    if hint := how_to_resume(folder):
        print(hint, file=sys.stderr)
    return ExitStatus(1, detail)


def _child_failed(failures: dict[int, dict[str, Any]]) -> Any:
    """Return torch's ChildFailedError for the failures of all machines, as one agent would raise it."""
    with slow_imports():
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    found = {}
    with tempfile.TemporaryDirectory(prefix="lightning-llm-ray-") as folder:
        for rank, each in failures.items():
            file = Path(folder) / f"{rank}.json"
            if each["error"] is not None:
                file.write_text(json.dumps(each["error"]), encoding="utf-8")
            failure = ProcessFailure(each["local_rank"], each["pid"], each["exitcode"], str(file))
            failure.timestamp = each["timestamp"]
            found[rank] = failure
    return ChildFailedError("lightning_llm", found)
