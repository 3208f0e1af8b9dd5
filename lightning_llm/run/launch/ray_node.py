"""Ray actor that runs torch's agent on one machine. Imports only the standard library."""

import contextlib
import json
import os
import queue
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from lightning_llm.base.interpreter import python_environment, python_module

Event = tuple[str, Any]
"""("out" or "err", text written by the ranks); the last event is ("end", exit code and report of the agent)."""
ENDS = 2
"""Number of streams to read until their end."""


class RayNode:
    """Run one command and forward its output. `run` occupies one thread of the actor; other methods use another."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._before: list[int] = []  # signals received before the command was started
        self._changing = threading.Lock()

    def endpoint(self) -> str:
        """Return an address of this machine with a free port."""
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
        """Send a signal to the command, once it runs."""
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
    """Return the command that each machine runs, with the Python of Ray's workers there."""
    return python_module("lightning_llm.run.launch.node_agent")
