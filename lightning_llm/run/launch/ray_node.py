"""One machine of a run placed by Ray: the actor that Ray starts there, and the command that the actor runs.

The actor `RayNode` runs `python -m lightning_llm.run.launch.ray_node REPORT`. That command reads its `Task` from stdin
as JSON, runs the machine's ranks with torch's agent, and writes failures to the file REPORT.
"""

import contextlib
import json
import os
import platform
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from lightning_llm.base.errors import ConfigError
from lightning_llm.base.process import python_environment, python_module, slow_imports
from lightning_llm.base.signals import die_with_parent
from lightning_llm.config.from_file import load_config
from lightning_llm.config.redact import redacted
from lightning_llm.config.schema import Config
from lightning_llm.config.workspace import open_config_dir
from lightning_llm.config.yaml_file import in_memory
from lightning_llm.parallel.cuda_environment import set_allocator, set_missing, wanted
from lightning_llm.plan.resolve import DerivedConfig
from lightning_llm.run.launch.local_ranks import SAVE_SECONDS, passed_on
from lightning_llm.run.launch.torch_agent import Node, launch_ranks

Event = tuple[str, Any]
"""("out" or "err", a line that a rank has printed). The last event is ("end", {"code": exit code, **report})."""
ENDS = 2
"""Number of streams to read until their end."""


class RayNode:
    """Ray actor that runs one command on its machine and forwards the command's output.

    `run` occupies one thread of the actor until the command has ended; Ray calls the other methods in other threads.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._before: list[int] = []  # signals received before the command was started
        self._changing = threading.Lock()

    def endpoint(self) -> str:
        """Return "ADDRESS:PORT" of this machine, with a port that is free now."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0)) as free:
            return f"{address}:{free.getsockname()[1]}"

    def run(
        self, task: Mapping[str, Any], environment: Mapping[str, str], command: Sequence[str] | None = None
    ) -> Iterator[Event]:
        """Run `command`, by default this machine's `agent_command`, with `task` as JSON on stdin. Yield its events.

        Linux sends the parent-death signal when the *thread* that started a process ends, so this thread stays until
        the command has ended.
        """
        command = command or agent_command()  # resolved here: Python may have another path on the driver's machine
        own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # Ray sets it for itself
        with tempfile.TemporaryDirectory(prefix="lightning-llm-ray-") as folder:
            report = Path(folder) / "report.json"
            pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            process = subprocess.Popen(
                [*command, str(report)],
                encoding="utf-8",
                errors="backslashreplace",
                process_group=0,
                env={**own, **environment, **python_environment()},
                **pipes,
            )
            with self._changing:
                self._process = process
            for number in self._before:
                process.send_signal(number)
            yield from _events(process, json.dumps(task))
            found = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}
            yield "end", {"code": process.wait(), **found}

    def send_signal(self, number: int) -> None:
        """Send signal `number` to the command; if it does not run yet, as soon as it does."""
        with self._changing:
            if self._process is None:
                self._before.append(number)
            else:
                self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the command and all its descendants, including stopped ones."""
        import psutil

        if self._process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            agent = psutil.Process(self._process.pid)
            for each in [agent, *agent.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


def _events(process: subprocess.Popen[str], task: str) -> Iterator[Event]:
    found: queue.SimpleQueue[Event | None] = queue.SimpleQueue()

    def read(kind: str, stream: IO[str]) -> None:
        for line in stream:
            found.put((kind, line))
        found.put(None)

    streams = {"out": process.stdout, "err": process.stderr}
    readers = [threading.Thread(target=read, args=each, daemon=True) for each in streams.items()]
    for reader in readers:
        reader.start()
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # the command has already ended and reports why
            process.stdin.write(task)
            process.stdin.close()
    ended = 0
    while ended < ENDS:
        if (event := found.get()) is None:
            ended += 1
        else:
            yield event


def agent_command() -> list[str]:
    """Return the command line that runs `main` with the Python interpreter of this process."""
    return python_module("lightning_llm.run.launch.ray_node")


@dataclass(frozen=True)
class Task:
    """Work of one machine: the ranks to start there."""

    config: str
    """The run's config as YAML."""
    config_dir: list[str]
    """["--config-dir", FOLDER], or [] without such a folder."""
    cpus: int
    """CPU cores for all ranks of the machine."""
    node: dict[str, Any] | None
    """Fields of this machine's `Node`; None if the run has only one machine."""
    quiet: bool
    """Whether to discard the ranks' stdout."""

    def as_json(self) -> dict[str, Any]:
        """Return the task as JSON data."""
        return asdict(self)


def main() -> int:
    """Run this machine's ranks until all have ended; return the exit code.

    0: all ranks succeeded. 1: a rank failed or a signal was received, as described in the report. 2: the config is not
    valid on this machine (reported on stderr).
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # it is started by a thread of Ray with SIGINT blocked
    die_with_parent()
    report, task = Path(sys.argv[1]), Task(**json.load(sys.stdin))
    try:
        config = _read(task)
        set_allocator()
        set_missing(wanted(DerivedConfig(config, to_train=True).plan()))
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: on {platform.node()}: {redacted(str(problem))}", file=sys.stderr)
        return 2
    found = _run(config, task)
    report.write_text(json.dumps(found), encoding="utf-8")
    return 1 if found else 0


def _read(task: Task) -> Config:
    open_config_dir(Path(task.config_dir[1]) if task.config_dir else None)
    with os.fdopen(os.memfd_create("task.yaml"), "wb") as file:
        file.write(task.config.encode())
        file.flush()
        return load_config(Path(f"/proc/{os.getpid()}/fd/{file.fileno()}"), [])


def _run(config: Config, task: Task) -> dict[str, Any]:
    """Return {} if all ranks succeeded, else the received signal or the failures by rank."""
    with slow_imports():
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    count, node = config.trainer.devices, Node(**task.node) if task.node else None
    threads = config.trainer.threads or max(1, task.cpus // count)
    try:
        with in_memory(config) as file, passed_on(Path(config.run.dir)):
            words = "train", "--config", str(file), *task.config_dir
            seconds = SAVE_SECONDS
            launch_ranks(count, words, threads=threads, shutdown_seconds=seconds, quiet=task.quiet, node=node)
    except SignalException as stop:
        return {"signal": int(stop.sigval)}
    except ChildFailedError as error:
        return {"failures": {rank: _as_data(failure) for rank, failure in error.failures.items()}}
    return {}


def _as_data(failure: Any) -> dict[str, Any]:
    return {
        "local_rank": failure.local_rank,
        "pid": failure.pid,
        "exitcode": failure.exitcode,
        "timestamp": failure.timestamp,
        "error": failure.error_file_data if isinstance(failure.message, dict) else None,
    }


if __name__ == "__main__":
    sys.exit(main())
