"""Start the processes that measure golden curves: this process, ranks started here, or ranks of torchrun or srun.

Imports no torch until it measures.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lightning_llm.base.imports import slow_imports
from lightning_llm.config.workspace import config_dir_arguments
from lightning_llm.config.yaml_file import in_memory
from lightning_llm.golden.curve import Measured
from lightning_llm.plan.resolve import Plan
from lightning_llm.run.launch.environment import is_first_rank, rank_environment
from lightning_llm.run.launch.torch_agent import STOP_SECONDS, as_rank, launch_reported


def measured_runs(plan: Plan, steps: int, nudges: Sequence[int | None]) -> list[Measured]:
    """Return the numbers of the first `steps` steps of one run for each entry of `nudges` (see `measure.measure`).

    Several runs are made in separate processes, one after the other, like a later check: choices that a process makes
    by timing, such as a kernel, are part of the noise. Ranks started by torchrun or srun make all runs themselves.

    Raises:
        ConfigError: `train` would reject the plan.
        RanksFailedError: a rank that was started here failed (already reported).
        StepNotMadeError: a step cannot be made in this process (see `measure.measure`).
    """
    if rank_environment() is not None:
        return as_rank(lambda: [_here(plan, steps, nudge) for nudge in nudges])
    if len(nudges) == 1 and plan.config.trainer.devices == 1:
        return [_here(plan, steps, nudges[0])]
    made = []
    for number, nudge in enumerate(nudges, start=1):
        if len(nudges) > 1:
            print(f"run    {number} of {len(nudges)}", file=sys.stderr, flush=True)
        made.append(_in_own_ranks(plan, steps, nudge))
    return made


def leave_for_launcher(plan: Plan, steps: int, nudge: int | None, result: Path) -> None:
    """Measure as one of the ranks that `measured_runs` started; rank 0 writes the numbers as JSON to `result`."""
    measured = as_rank(lambda: _here(plan, steps, nudge))
    if is_first_rank():
        result.write_text(json.dumps(measured.as_data()), encoding="utf-8")


def _here(plan: Plan, steps: int, nudge: int | None) -> Measured:
    with slow_imports():
        from lightning_llm.golden.measure import measure
        from lightning_llm.parallel.process_group import leave_process_group

    try:
        return measure(plan, steps, nudge)
    finally:
        if rank_environment() is None:
            leave_process_group()  # of one rank, under a ZeRO stage


def _in_own_ranks(plan: Plan, steps: int, nudge: int | None) -> Measured:
    count = plan.config.trainer.devices
    with tempfile.TemporaryDirectory(prefix="lightning-llm-golden-") as folder, in_memory(plan.config) as file:
        result = Path(folder, "result.json")
        words = ["golden", "record", "--config", str(file), *config_dir_arguments()]
        words += ["--steps", str(steps), "--result", str(result)]
        words += [] if nudge is None else ["--nudged-by", str(nudge)]
        launch_reported(count, words, threads=_threads(plan), shutdown_seconds=STOP_SECONDS)
        return Measured.from_data(json.loads(result.read_text(encoding="utf-8")))


def _threads(plan: Plan) -> int | None:
    """Return the threads of a rank: those that one rank in this process has, which round as those of a check do."""
    if plan.config.trainer.threads or plan.config.trainer.devices > 1:
        return plan.config.trainer.threads
    import torch

    return torch.get_num_threads()
