"""Peak memory of a run."""

from typing import Any

import lightning.pytorch as pl
import torch

from lightning_llm.base.hardware import host_peak_bytes


class Memory(pl.Callback):
    """Adds to every `every_steps`-th record (and the first) rank 0's peaks since the process began, in bytes.

    `host_memory_peak_bytes`: resident set; `device_memory_peak_bytes`: PyTorch's CUDA allocator, absent on CPU.
    """

    def __init__(self, every_steps: int = 10):
        self.every_steps = every_steps

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Add the peaks to the step's record."""
        record = pl_module.step_record
        if record["step"] != 1 and record["step"] % self.every_steps:
            return
        record["host_memory_peak_bytes"] = host_peak_bytes()
        device = trainer.strategy.root_device
        if device.type == "cuda":
            record["device_memory_peak_bytes"] = torch.cuda.max_memory_allocated(device)
