"""Forwarding of signals from a command to the jobs of a sweep or the ranks placed by Ray."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from lightning_llm.base.signals import not_ignored


class Started(Protocol):
    """Receiver of signals: a process, or a stand-in for processes of other machines."""

    def send_signal(self, number: int, /) -> None:
        """Receive a signal. Called in a signal handler of the main thread."""


class Relay:
    """Forward signals to the running jobs; `received` is the first signal, or 0."""

    def __init__(self) -> None:
        self.received = 0
        self.processes: set[Started] = set()
        self.of_job: dict[int, Started] = {}

    def runs(self, number: int) -> bool:
        """Return whether job `number` is running here."""
        return number in self.of_job

    def stop(self, number: int) -> None:
        """Let job `number` save and stop, if it is running."""
        if (process := self.of_job.get(number)) is not None:
            process.send_signal(signal.SIGTERM)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        for process in list(self.processes):
            process.send_signal(number)


@contextmanager
def signals_passed_on() -> Iterator[Relay]:
    """Forward signals to the jobs during the block."""
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
