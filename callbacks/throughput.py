"""Training speed: tokens per second, the parts of a step's time, and the share of the device's peak (MFU)."""

import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.profilers import PassThroughProfiler

from lightning_llm.base.hardware import device_name, gemm_format, peak_flops_per_second


class FetchClock(PassThroughProfiler):
    """Sums the seconds that Lightning's training loop spends waiting for the next batch.

    The loop notifies its profiler when it starts and stops fetching; there is no callback hook between these points.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self._since = 0.0

    @classmethod
    def from_trainer(cls, trainer: pl.Trainer) -> "FetchClock | None":
        """Return the trainer's clock, installing it if necessary; None if the trainer has a real profiler."""
        if type(trainer.profiler) is PassThroughProfiler:
            trainer.profiler = cls()
        return trainer.profiler if isinstance(trainer.profiler, cls) else None

    def start(self, action_name: str) -> None:
        """Record the time if a training batch is being fetched."""
        if action_name == "[_TrainingEpochLoop].train_dataloader_next":
            self._since = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """Add the time since the fetch began."""
        if action_name == "[_TrainingEpochLoop].train_dataloader_next":
            self.seconds += time.perf_counter() - self._since


class Throughput(pl.Callback):
    """Adds to each step's record, over all ranks unless noted:

    - `step_seconds`: wall time from the end of the previous step to the end of this one, without validations
    - `data_seconds`: of that, waiting for the batch; `compute_seconds`: forward, backward and update (rank 0). The rest
      is Lightning's loop, callbacks and checkpoints
    - `tokens_per_second`; `tflops_per_second` by `pl_module.flops_per_token`, 1e12 FLOP/s
    - `mfu`: that over the dense peak of all ranks' devices (PaLM, appendix B, https://arxiv.org/abs/2204.02311), if the
      peak is known for the device and the compute format. GEMMs that run natively in FP8 or FP4 also count against that
      peak, so the figure may exceed 1; a plan uses the mixture's peak (docs/explanation/memory_and_time.md)
    - `timing_warmup`: true in the first `warmup_steps` after a start, which do not measure normal speed
    """

    def __init__(self, warmup_steps: int = 10):
        self.warmup_steps = warmup_steps
        self._peak: float | None = None
        self._clock: FetchClock | None = None
        self._steps = 0
        self._fetched = 0.0
        self._previous_end = self._start = self._validation_start = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Install the fetch clock, unless the trainer has a real profiler: then `data_seconds` is omitted."""
        self._clock = FetchClock.from_trainer(trainer)
        device = trainer.strategy.root_device
        peak = peak_flops_per_second(device_name(device), gemm_format(pl_module.config.precision.compute_dtype, device))
        self._peak = None if peak is None else peak * trainer.world_size

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Start the clock of the first step."""
        self._steps = 0
        self._fetched = self._clock.seconds if self._clock else 0.0
        self._previous_end = time.perf_counter()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Record the time when the batch has arrived and computation begins."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Add the step's figures to its record. The loss has been read, so the device has finished the step."""
        end = time.perf_counter()
        step_seconds = end - self._previous_end
        tokens_per_second = pl_module.step_tokens / step_seconds
        flops_per_second = tokens_per_second * pl_module.flops_per_token
        record: dict[str, Any] = {"step_seconds": step_seconds, "compute_seconds": end - self._start}
        if self._clock:
            record["data_seconds"] = self._clock.seconds - self._fetched
            self._fetched = self._clock.seconds
        record |= {"tokens_per_second": tokens_per_second, "tflops_per_second": flops_per_second / 1e12}
        if self._peak is not None:
            record["mfu"] = flops_per_second / self._peak
        if self._steps < self.warmup_steps:
            record["timing_warmup"] = True
        self._steps += 1
        pl_module.step_record.update(record)
        self._previous_end = end

    def exclude(self, seconds: float) -> None:
        """Exclude `seconds` since the last step, which another callback took, from the next step's time."""
        self._previous_end += seconds

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Stop the step's clock while a validation runs."""
        self._validation_start = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Exclude the validation from the step's time."""
        self._previous_end += time.perf_counter() - self._validation_start
