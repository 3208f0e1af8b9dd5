"""Signals from the start of the command to its end, outside of what a run or a sweep takes for itself.

The first ends the command with a line and the exit code 128 + signal; another one ends the process at once. During
imports the first does so, too: an exception might be lost in the callbacks of Python's import system, or become
another's. A signal that is ignored when the process starts (`nohup`) stays ignored. Imports nothing that takes time.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from lightning_llm.base.errors import Terminated
from lightning_llm.base.slow_imports import is_importing

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C; a scheduler, or whoever stops a process; a terminal that was closed."""

_received = 0
_words: list[str] = []


@contextmanager
def early_signals(words: list[str]) -> Iterator[None]:
    """Take the signals for a process that runs the command `words` alone; from its end on they end it at once."""
    global _words
    _words = words
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end_process)
    try:
        yield
    finally:
        _at_once()


@contextmanager
def raised_as_terminated() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise `Terminated` in a process that goes on, as SIGINT raises KeyboardInterrupt."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    mine = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, _end_process)]
    for number in mine:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, before[number])


def taken(error: BaseException) -> int:
    """Return the signal that `error` is of, 0 where it is none."""
    if isinstance(error, Terminated):
        return error.number
    return signal.SIGINT if isinstance(error, KeyboardInterrupt) else _received


def stop_line(number: int, words: list[str]) -> str:
    """Return the line that says that `number` ended the command `words`, "" where another process says it.

    Of several ranks the first speaks. An agent ends its ranks by SIGTERM where one has failed, and says why.
    """
    ranks = [os.environ.get(name) for name in ("RANK", "SLURM_PROCID")]
    of_agent = number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ
    if of_agent or next(filter(None, ranks), "0") != "0":
        return ""
    what = "; no step was under way, and what is saved stays as it is" if words[:1] == ["train"] else ""
    return f"stopped by {signal.Signals(number).name}{what}\n"


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated(number)


def _end_process(number: int, frame: FrameType | None) -> NoReturn:
    global _received
    _received = _received or number
    _at_once()
    if is_importing():
        with suppress(OSError):
            os.write(2, stop_line(number, _words).encode())
        os._exit(128 + number)
    raise Terminated(number)


def _at_once() -> None:
    for number in ENDING:
        if signal.getsignal(number) is _end_process:
            signal.signal(number, signal.SIG_DFL)
