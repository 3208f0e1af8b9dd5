"""Seconds of work on a device: by CUDA's events, or by the clock. A wait for a peer that never comes has an end."""

import time
from collections.abc import Callable
from typing import Any

import torch


class PeerTimeoutError(RuntimeError):
    """What was started on a CUDA device is not done in time: a peer has not come."""


class Timer:
    """Times calls on `device`; none waits longer than `timeout_seconds` for what they have started there."""

    def __init__(self, device: torch.device, timeout_seconds: float):
        self.device, self.timeout_seconds = device, timeout_seconds

    def seconds(self, call: Callable[[], Any], times: int = 1) -> float:
        """Return the mean seconds of `times` calls, one behind the other.

        Raises:
            PeerTimeoutError: they are not done in time. On a CPU the process group says so by itself.
        """
        if self.device.type != "cuda":
            start = time.perf_counter()
            for _ in range(times):
                call()
            return (time.perf_counter() - start) / times
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            call()
        end.record()
        self._wait(end)
        return float(begin.elapsed_time(end)) / 1e3 / times  # in milliseconds

    def wait(self) -> None:
        """Return once all that was started on the device is done. Raises as `seconds` does."""
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
            self._wait(done)

    def _wait(self, event: Any) -> None:
        """Look whether `event` has come: to wait for it (synchronize) would be to wait for ever, or for NCCL's end."""
        deadline = time.monotonic() + self.timeout_seconds
        while not event.query():
            if time.monotonic() > deadline:
                raise PeerTimeoutError(f"not done on {self.device} within {self.timeout_seconds:g} s")
            time.sleep(20e-6)
