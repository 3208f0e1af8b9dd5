"""System metrics of rank 0: processor, memory and GPU."""

import logging
import time
from typing import Any

import lightning.pytorch as pl
import psutil
import torch

log = logging.getLogger(__name__)


class System(pl.Callback):
    """Adds figures of rank 0's machine to the first step's record and then every `every_seconds`:

    - `system/cpu_percent`: of all its cores, by all processes, since the last such record
    - `system/process_cpu_percent`: by rank 0's process, 100 per busy core
    - `system/rss_bytes`: resident memory of rank 0; `system/available_bytes`: available memory of the machine
    - `system/gpu_percent`: share of the time that a kernel ran on rank 0's GPU, `system/gpu_watts`: its power, both by
      NVML; `system/gpu_memory_bytes`: its memory in use by all processes. Absent on CPU
    """

    def __init__(self, every_seconds: float = 10.0):
        self.every_seconds = every_seconds
        self._process = psutil.Process()
        self._due = 0.0
        self._nvml = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Start to count processor time."""
        psutil.cpu_percent()
        self._process.cpu_percent()
        self._due = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Add the figures if they are due."""
        now = time.monotonic()
        if not trainer.is_global_zero or now < self._due:
            return
        self._due = now + self.every_seconds
        pl_module.step_record.update(
            {
                "system/cpu_percent": psutil.cpu_percent(),
                "system/process_cpu_percent": self._process.cpu_percent(),
                "system/rss_bytes": self._process.memory_info().rss,
                "system/available_bytes": psutil.virtual_memory().available,
                **self._gpu(trainer.strategy.root_device),
            }
        )

    def _gpu(self, device: torch.device) -> dict[str, float]:
        if device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(device)
        figures: dict[str, float] = {"system/gpu_memory_bytes": total - free}
        if self._nvml:
            try:
                figures["system/gpu_percent"] = torch.cuda.utilization(device)
                figures["system/gpu_watts"] = torch.cuda.power_draw(device) / 1000
            except Exception as error:  # a missing package, driver or permission each raises another exception
                self._nvml = False
                log.warning("no GPU utilisation is recorded: %s: %s", type(error).__name__, error)
        return figures
