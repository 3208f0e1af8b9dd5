"""Seconds in which this rank's own work stands still for others: the waits at the end of collectives and messages.

On a CPU the main thread waits, and the clock says how long. On CUDA the host goes on, and the stream that computes
waits: events around what makes it wait say how long, once the device has come past them.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Mark(NamedTuple):
    """A moment of this rank's work: seconds or a CUDA event, and what had been waited for, or how many times, by it."""

    moment: Any
    waited: float


class WaitClock:
    """Tells how long the main thread's work on `device` took between two marks, and how long of that it waited.

    `now` is the clock, in seconds.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter):
        self.now = now
        self._thread = threading.get_ident()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._waited = 0.0
        self._pairs: list[tuple[Any, Any]] = []
        self._inside = False

    @property
    def host_waits(self) -> bool:
        """Whether the host waits, and goes on with nothing else meanwhile."""
        return self._stream is None

    @property
    def host_waited(self) -> float:
        """Seconds that it has waited by now; 0 where it does not."""
        return self._waited

    def mark(self) -> Mark:
        """Return this moment."""
        if self._stream is None:
            return Mark(self.now(), self._waited)
        return Mark(self._event(), len(self._pairs))

    def between(self, first: Mark, last: Mark) -> tuple[float, float]:
        """Return the seconds between two marks that the device has come past, and those of them that it waited."""
        if self._stream is None:
            return last.moment - first.moment, last.waited - first.waited
        waits = self._pairs[int(first.waited) : int(last.waited)]
        waited = sum(begin.elapsed_time(end) for begin, end in waits)
        return first.moment.elapsed_time(last.moment) / 1e3, waited / 1e3  # in milliseconds

    def forget(self) -> None:
        """Let go of the events of all marks so far; there is no telling about them any more."""
        self._pairs.clear()

    def timed(self, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Return what `call` does, and count how long it makes this rank's work wait, if that is what it does."""
        if self._inside or not self._is_of_own_work():
            return call(*arguments, **keywords)
        self._inside = True
        begin = self.now() if self._stream is None else self._event()
        try:
            return call(*arguments, **keywords)
        finally:
            if self._stream is None:
                self._waited += self.now() - begin
            else:
                self._pairs.append((begin, self._event()))
            self._inside = False

    def _is_of_own_work(self) -> bool:
        """Whether the main thread would wait, not one that saves; of CUDA, whose backward passes have a thread of their
        own, the stream that computes, not one beside it."""
        if self._stream is None:
            return threading.get_ident() == self._thread
        return bool(torch.cuda.current_stream(self._stream.device) == self._stream)

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


_clocks: list[WaitClock] = []


def waited(wait: Callable[[Any], Any], value: Any) -> Any:
    """Return `wait(value)` of a functional collective; it is counted, but not where it is compiled into a graph."""
    if torch.compiler.is_compiling() or not _clocks:
        return wait(value)
    return _clocks[-1].timed(wait, value)


@contextmanager
def waits_counted(clock: WaitClock) -> Iterator[None]:
    """Have `clock` count meanwhile: torch's works when they are waited for, and on CUDA streams that wait.

    Whoever begins a collective waits for it through one of these: torch.distributed itself, FSDP2, pipelines.
    """
    places: list[tuple[Any, str]] = [(dist.Work, "wait")]
    if clock._stream is not None:
        places += [(torch.cuda.Stream, "wait_event"), (torch.cuda.Stream, "wait_stream")]
    originals = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, original in originals:
        setattr(owner, name, _counted(clock, original))
    _clocks.append(clock)
    try:
        yield
    finally:
        _clocks.remove(clock)
        for owner, name, original in originals:
            setattr(owner, name, original)


def _counted(clock: WaitClock, original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(waiting: Any, *arguments: Any, **keywords: Any) -> Any:
        # `wait_stream` and `wait_event` are of the stream that waits, which need not be the current one.
        if isinstance(waiting, torch.cuda.Stream) and waiting != clock._stream:
            return original(waiting, *arguments, **keywords)
        return clock.timed(original, waiting, *arguments, **keywords)

    return wait
