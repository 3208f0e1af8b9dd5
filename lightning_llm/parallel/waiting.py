"""Measure the seconds that this rank waits for others, at the end of collectives and point-to-point messages.

On a CPU the main thread waits, and the clock measures the wait. On CUDA the compute stream waits while the host
continues; CUDA events around each wait measure it, once the device has passed them.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Mark(NamedTuple):
    """A point in time: (clock in seconds, seconds waited so far), or on CUDA (event, number of waits so far)."""

    moment: Any
    waited: float


class WaitClock:
    """Measures the time between two marks of the main thread's work on `device`, and the part of it spent waiting.

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
        """Whether the host itself waits for others (on a CPU), rather than a CUDA stream."""
        return self._stream is None

    @property
    def host_waited(self) -> float:
        """Seconds that the host has waited so far; always 0 on CUDA."""
        return self._waited

    def mark(self) -> Mark:
        """Return a mark of the current time."""
        if self._stream is None:
            return Mark(self.now(), self._waited)
        return Mark(self._event(), len(self._pairs))

    def between(self, first: Mark, last: Mark) -> tuple[float, float]:
        """Return (seconds between two marks that the device has passed, seconds of these spent waiting)."""
        if self._stream is None:
            return last.moment - first.moment, last.waited - first.waited
        waits = self._pairs[int(first.waited) : int(last.waited)]
        waited = sum(begin.elapsed_time(end) for begin, end in waits)
        return first.moment.elapsed_time(last.moment) / 1e3, waited / 1e3  # in milliseconds

    def forget(self) -> None:
        """Free the events of all marks so far; `between` no longer works for them."""
        self._pairs.clear()

    def timed(self, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Call `call`, add the time that this rank's work waits in it, and return its result."""
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
        """Whether this is the main thread, not one that saves; on CUDA, where the backward pass has its own thread,
        whether the current stream is the compute stream."""
        if self._stream is None:
            return threading.get_ident() == self._thread
        return bool(torch.cuda.current_stream(self._stream.device) == self._stream)

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event


_clocks: list[WaitClock] = []


def waited(wait: Callable[[Any], Any], value: Any) -> Any:
    """Return `wait(value)` of a functional collective and measure it, except within a compiled graph."""
    if torch.compiler.is_compiling() or not _clocks:
        return wait(value)
    return _clocks[-1].timed(wait, value)


@contextmanager
def waits_counted(clock: WaitClock) -> Iterator[None]:
    """Context in which `clock` measures all waits for torch's works, and on CUDA those of streams.

    torch.distributed, FSDP2 and pipelines all wait for collectives through these methods.
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
        # `wait_stream` and `wait_event` are methods of the waiting stream, which may not be the current one.
        if isinstance(waiting, torch.cuda.Stream) and waiting != clock._stream:
            return original(waiting, *arguments, **keywords)
        return clock.timed(original, waiting, *arguments, **keywords)

    return wait
