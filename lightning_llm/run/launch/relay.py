"""Signals to a command that are for what it has started: jobs of a sweep, ranks that Ray has placed."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from lightning_llm.base.signals import not_ignored


class Started(Protocol):
    """What a signal is handed to: a process, or what stands for those of other machines."""

    def send_signal(self, number: int, /) -> None:
        """Take a signal, in the midst of whatever the main thread does."""


class Relay:
    """Hands a signal to the jobs under way, whenever it comes; `received`: the first, or 0."""

    def __init__(self) -> None:
        self.received = 0
        self.processes: set[Started] = set()
        self.of_job: dict[int, Started] = {}

    def runs(self, number: int) -> bool:
        """Return whether the job of this number is under way here."""
        return number in self.of_job

    def stop(self, number: int) -> None:
        """Have the job of this number, if it is under way, save and stop."""
        if (process := self.of_job.get(number)) is not None:
            process.send_signal(signal.SIGTERM)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        for process in list(self.processes):
            process.send_signal(number)


@contextmanager
def signals_passed_on() -> Iterator[Relay]:
    """Catch these signals for the jobs while the context lasts."""
    relay = Relay()
    before: dict[Any, Any] = {
        number: signal.signal(number, relay)
        for number in not_ignored([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
    }
    try:
        yield relay
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
