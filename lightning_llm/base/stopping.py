"""Signals that a run is stopped by between two steps, its state saved, and what follows: words, exit code, Slurm.

SIGHUP is a terminal that was closed, SIGALRM `trainer.max_time`, by this process's own timer; SIGUSR1 a scheduler's
word that the time is nearly up. After either of the last two the run is to go on, so the exit code is EX_TEMPFAIL of
sysexits.h, and a job of Slurm queues itself again (`run.launch.slurm`). Imports no torch.
"""

import ctypes
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM)
GOES_ON = (signal.SIGUSR1, signal.SIGALRM)
"""Those after which the run is to be started again."""
PR_SET_PDEATHSIG = 1
EXIT_GOES_ON = 75
STOPPED_CODES = frozenset({EXIT_GOES_ON, *(128 + number for number in STOPPING if number not in GOES_ON)})
"""Exit codes of runs that a signal stopped."""
MAX_TIME = re.compile(r"(?:(\d+):)?(\d+):([0-5]?\d):([0-5]?\d)")


def seconds_of(max_time: str) -> int:
    """Return the seconds of "[DD:]HH:MM:SS".

    Raises:
        ValueError: it is none, or no time at all.
    """
    found = MAX_TIME.fullmatch(max_time)
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise ValueError(f"{max_time!r} is no time: give HH:MM:SS or DD:HH:MM:SS, 12:00:00 say")
    return total


def not_ignored(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Return those of `numbers` that this process was not started to ignore, as `nohup` has SIGHUP ignored.

    The timer's is this process's own. For processes that a script starts with `&`, a shell has SIGINT ignored.
    """
    return [each for each in numbers if each == signal.SIGALRM or signal.getsignal(each) is not signal.SIG_IGN]


def die_with_parent() -> None:
    """Have Linux send this process SIGTERM when the one that started it is gone."""
    if not sys.platform.startswith("linux"):
        return
    launcher = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if launcher == 1:
        return  # a container's own first process, or started by it
    if os.getppid() != launcher:  # it died in between
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def alarm_after(max_time: str | None) -> Iterator[None]:
    """Have this process get SIGALRM once `max_time` is over, as long as the context lasts."""
    if max_time is None:
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds_of(max_time))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def what_came(number: int) -> str:
    """Return in a few words what a run was stopped by."""
    return "trainer.max_time" if number == signal.SIGALRM else signal.Signals(number).name


def exit_code(number: int) -> int:
    """Return the exit code of a run that was stopped by the signal."""
    return EXIT_GOES_ON if number in GOES_ON else 128 + number
