"""CUDA devices that a job of a sweep may use, so that jobs side by side do not all take the first one."""

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning_llm.precision.native.capability import DRIVER_FILES

VISIBLE = "CUDA_VISIBLE_DEVICES"


def cuda_devices() -> list[str]:
    """Return the CUDA devices of this machine by the names that `CUDA_VISIBLE_DEVICES` takes; [] without a driver."""
    if VISIBLE in os.environ:
        return [name.strip() for name in os.environ[VISIBLE].split(",") if name.strip() not in ("", "-1")]
    if not any(Path(file).exists() for file in DRIVER_FILES):
        return []
    import torch  # seconds, which a machine without a GPU does not need to spend; it makes no CUDA context here

    return [str(number) for number in range(torch.cuda.device_count())]


class DevicePool:
    """Lends devices to jobs side by side: each gets those with the fewest jobs on them, in the order of `devices`."""

    def __init__(self, devices: Sequence[str]):
        self.devices = list(devices)
        self._jobs: Counter[str] = Counter()
        self._changing = threading.Lock()

    @contextmanager
    def lent(self, count: int) -> Iterator[list[str]]:
        """Yield `count` different devices until the context ends; [] where the machine has fewer: the job says so."""
        with self._changing:
            enough = count <= len(self.devices)
            chosen = sorted(self.devices, key=lambda name: self._jobs[name])[:count] if enough else []
            chosen.sort(key=self.devices.index)
            self._jobs.update(chosen)
        try:
            yield chosen
        finally:
            with self._changing:
                self._jobs.subtract(chosen)
