"""A PyTorch profiler trace of some steps, viewable in a browser."""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.profiler import ProfilerActivity, profile, schedule

log = logging.getLogger(__name__)

PROFILE_FOLDER = "profile"
TABLE_ROWS = 40


class Profile(pl.Callback):
    """Traces `steps` steps from `first_step` on (of the whole run, resumes included) into the run's folder.

    `profile/rank=R.steps=A-B.json.gz` is a Chrome trace for https://ui.perfetto.dev, `....txt` the operators that took
    longest. Rank 0 traces, or every rank with `all_ranks`. The step before is traced and discarded, because it includes
    the profiler's start. Records of all these steps have `timing_warmup`, because they do not measure normal speed.
    """

    def __init__(
        self,
        first_step: int = 20,
        steps: int = 3,
        all_ranks: bool = False,
        record_shapes: bool = False,
        with_stack: bool = False,
        profile_memory: bool = False,
    ):
        self.first_step = max(2, first_step)
        self.steps = steps
        self.all_ranks = all_ranks
        self.options: dict[str, Any] = {"record_shapes": record_shapes, "with_stack": with_stack}
        self.options["profile_memory"] = profile_memory
        self.written: list[Path] = []
        self._profiler: profile | None = None
        self._traced = 0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Start the profiler, one step early."""
        if pl_module.completed_steps + 2 != self.first_step or not (self.all_ranks or trainer.is_global_zero):
            return
        activities = [ProfilerActivity.CPU]
        if trainer.strategy.root_device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        window = schedule(wait=0, warmup=1, active=self.steps, repeat=1)
        self._profiler = profile(activities=activities, schedule=window, **self.options)
        self._profiler.start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """End a step of the trace; write the trace after the last step."""
        if self._profiler is None:
            return
        pl_module.step_record["timing_warmup"] = True
        self._traced = pl_module.step_record["step"]
        if self._traced == self.first_step + self.steps - 1:
            self._finish(trainer, pl_module)
        else:
            self._profiler.step()

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Write an incomplete trace if the run ends early."""
        self._finish(trainer, pl_module)
        if not self.written and trainer.is_global_zero:
            log.warning("nothing was profiled: callbacks.profile.first_step=%d was not reached", self.first_step)

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Write the incomplete trace."""
        self._finish(trainer, pl_module)

    def _finish(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        if self._traced < self.first_step:
            return
        folder = Path(pl_module.config.run.dir, PROFILE_FOLDER)
        name = f"rank={trainer.global_rank}.steps={self.first_step}-{self._traced}"
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))
            table = profiler.key_averages().table(sort_by=by, row_limit=TABLE_ROWS)
            (folder / f"{name}.txt").write_text(table, encoding="utf-8")
        except OSError as error:
            log.warning("the trace was not written: %s", error)
            return
        self.written = [folder / f"{name}.json.gz", folder / f"{name}.txt"]
