"""Contenders in separate processes, started like a user's, each with its own allocator and threads."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks import rotation

END_SECONDS = 60


class Turns:
    """Called by a contender's process when it is ready, and after each step."""

    def __init__(self, connection: Connection):
        self._connection = connection

    def done(self) -> bool:
        """Report it, wait, and return whether to make another step."""
        self._connection.send(time.process_time())
        return bool(self._connection.recv())


class OwnProcess:
    """A contender: `work(turns, *args)` in a new process with as many threads as this one; prints nothing."""

    def __init__(self, work: Callable[..., None], *args: Any):
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(work, theirs, torch.get_num_threads(), args))
        self._process.start()
        theirs.close()
        self.cpu_seconds: float = self._connection.recv()
        """CPU seconds of all its threads up to the last step; EOFError if it has died."""

    def steps(self) -> Iterator[None]:
        """Make one step per `next`, and yield after it."""
        while True:
            self._connection.send(True)
            self.cpu_seconds = self._connection.recv()
            yield

    def end(self) -> None:
        """End the process, by force if necessary."""
        with contextlib.suppress(OSError):
            self._connection.send(False)
        self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def minima(contenders: Mapping[str, tuple[Any, ...]], rounds: int, steps: int) -> dict[str, float]:
    """Return each contender's fastest step in seconds; a contender is `(work, *args)`, see `OwnProcess`."""
    processes: dict[str, OwnProcess] = {}
    try:
        for name, (work, *args) in contenders.items():
            processes[name] = OwnProcess(work, *args)
        turns = {name: each.steps() for name, each in processes.items()}
        clock = time.perf_counter
        if rotation.by_cpu_time():
            clock = lambda: sum(each.cpu_seconds for each in processes.values())  # noqa: E731  (one at a time runs)
        return rotation.interleaved_minima(turns, rounds, steps, clock=clock)
    finally:
        for each in processes.values():
            each.end()


def _run(work: Callable[..., None], connection: Connection, threads: int, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(threads)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        work(Turns(connection), *args)
