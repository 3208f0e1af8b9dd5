"""Signals to a command that are for what it has started: jobs of a sweep, ranks that Ray has placed."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol


class Started(Protocol):
    """What a signal is handed to: a process, or what stands for those of other machines."""

    def send_signal(self, number: int, /) -> None:
        """Take a signal, in the midst of whatever the main thread does."""


class Relay:
    """Hands a signal to the jobs under way, whenever it comes; `received`: the first, or 0."""

    def __init__(self) -> None:
        self.received = 0
        self.processes: set[Started] = set()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        for process in list(self.processes):
            process.send_signal(number)


@contextmanager
def signals_passed_on() -> Iterator[Relay]:
    """Catch these signals for the jobs while the context lasts."""
    relay = Relay()
    before: dict[Any, Any] = {
        number: signal.signal(number, relay) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    }
    try:
        yield relay
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
