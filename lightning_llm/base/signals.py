"""Signals that stop a run between two steps, and signals that end a command before and after its run.

A run stops between two steps and saves its state. SIGHUP is a closed terminal, SIGALRM the timer of
`trainer.max_time`, SIGUSR1 a scheduler's notice that the time is nearly up. After the last two the run should be
resumed, so the exit code is EX_TEMPFAIL of sysexits.h, and a Slurm job requeues itself (`run.launch.slurm`).

Outside of a run or a sweep (`early_signals`), the first signal ends the command with one line and the exit code
128 + signal; a second one ends the process immediately. During imports the first one does, too, because an exception
could be lost or replaced in Python's import system. Signals that are ignored when the process starts (`nohup`) stay
ignored.

A command that starts other processes (the jobs of a sweep, ranks placed by Ray) forwards signals to them (`Relay`). No
slow imports.
"""

import ctypes
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, Protocol

from lightning_llm.base.errors import Terminated
from lightning_llm.base.process import is_importing

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM)
GOES_ON = (signal.SIGUSR1, signal.SIGALRM)
"""Signals after which the run should be resumed."""
PR_SET_PDEATHSIG = 1
EXIT_GOES_ON = 75
STOPPED_CODES = frozenset({EXIT_GOES_ON, *(128 + number for number in STOPPING if number not in GOES_ON)})
"""Exit codes of runs stopped by a signal."""
MAX_TIME = re.compile(r"(?:(\d+):)?(\d+):([0-5]?\d):([0-5]?\d)")
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command: Ctrl-C, a scheduler or `kill`, a closed terminal."""

_received = 0
_argv: list[str] = []


def seconds_of(max_time: str) -> int:
    """Return the number of seconds in `max_time`, a text "HH:MM:SS" or "DD:HH:MM:SS".

    Raises:
        ValueError: it has another format, or is zero.
    """
    found = MAX_TIME.fullmatch(max_time)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise ValueError(f"{max_time!r} is not a time: give HH:MM:SS or DD:HH:MM:SS, for example 12:00:00")
    return total


def not_ignored(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Return the signals in `numbers` that were not ignored when this process started.

    `nohup` ignores SIGHUP, and a shell ignores SIGINT for background processes of a script. The timer's signal is never
    ignored.
    """
    return [each for each in numbers if each == signal.SIGALRM or signal.getsignal(each) is not signal.SIG_IGN]


def die_with_parent() -> None:
    """Let Linux send SIGTERM to this process when its parent dies."""
    if not sys.platform.startswith("linux"):
        return
    launcher = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if launcher == 1:
        return  # a container's own first process, or started by it
    if os.getppid() != launcher:  # the parent died in the meantime
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def alarm_after(max_time: str | None) -> Iterator[None]:
    """Context that sends SIGALRM to this process after `max_time` ("HH:MM:SS"; None: never), unless it ends before."""
    if max_time is None:
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds_of(max_time))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def stop_reason(number: int) -> str:
    """Return the reason why the signal `number` stopped a run, as text for a message."""
    return "trainer.max_time" if number == signal.SIGALRM else signal.Signals(number).name


def exit_code(number: int) -> int:
    """Return the exit code of a run that the signal `number` stopped: 75 if it should be resumed, else 128 + number."""
    return EXIT_GOES_ON if number in GOES_ON else 128 + number


@contextmanager
def early_signals(argv: list[str]) -> Iterator[None]:
    """Context that handles signals in a process that only runs the command with arguments `argv`.

    After the context a signal ends the process immediately.
    """
    global _argv
    _argv = argv
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end_process)
    try:
        yield
    finally:
        _at_once()


@contextmanager
def raised_as_terminated() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise `Terminated`, as SIGINT raises KeyboardInterrupt."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    mine = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, _end_process)]
    for number in mine:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, before[number])


def signal_of(error: BaseException) -> int:
    """Return the number of the signal that raised `error` (`Terminated` or KeyboardInterrupt); 0 if none did."""
    if isinstance(error, Terminated):
        return error.number
    return signal.SIGINT if isinstance(error, KeyboardInterrupt) else _received


def stop_line(number: int, argv: list[str]) -> str:
    """Return the line that reports that signal `number` ended the command `argv`; "" if another process reports it.

    Of several ranks only the first reports it. An agent that ends its ranks by SIGTERM after a failure reports that.
    """
    ranks = [os.environ.get(name) for name in ("RANK", "SLURM_PROCID")]
    of_agent = number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ
    if of_agent or next(filter(None, ranks), "0") != "0":
        return ""
    what = "; no step was interrupted, and saved files are unchanged" if argv[:1] == ["train"] else ""
    return f"stopped by {signal.Signals(number).name}{what}\n"


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated(number)


def _end_process(number: int, frame: FrameType | None) -> NoReturn:
    global _received
    _received = _received or number
    _at_once()
    if is_importing():
        with suppress(OSError):
            os.write(2, stop_line(number, _argv).encode())
        os._exit(128 + number)
    raise Terminated(number)


def _at_once() -> None:
    for number in ENDING:
        if signal.getsignal(number) is _end_process:
            signal.signal(number, signal.SIG_DFL)


class Started(Protocol):
    """Receiver of signals: a process, or a stand-in for processes of other machines."""

    def send_signal(self, number: int, /) -> None:
        """Receive a signal. Called in a signal handler of the main thread."""


class Relay:
    """Signal handler that forwards every signal to the processes in `processes`."""

    def __init__(self) -> None:
        self.received = 0
        """Number of the first signal received, 0 if none."""
        self.processes: set[Started] = set()
        self.of_job: dict[int, Started] = {}
        """Running processes by the number of their job in a sweep."""

    def runs(self, number: int) -> bool:
        """Return whether job `number` of a sweep is running on this machine."""
        return number in self.of_job

    def stop(self, number: int) -> None:
        """Send SIGTERM to job `number` if it is running, so that it saves and stops."""
        if (process := self.of_job.get(number)) is not None:
            process.send_signal(signal.SIGTERM)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        for process in list(self.processes):
            process.send_signal(number)


@contextmanager
def signals_passed_on() -> Iterator[Relay]:
    """Install a new `Relay` as signal handler during the block, and yield it."""
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
