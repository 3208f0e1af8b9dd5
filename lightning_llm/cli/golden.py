"""The verb `golden`: record a recipe's first steps in a file, or compare a rerun of them with it.

The steps run in this process, in ranks started here, or in ranks of torchrun or srun. Imports no torch until then.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem, RanksFailedError, gathered
from lightning_llm.base.process import slow_imports
from lightning_llm.config.workspace import config_dir_arguments
from lightning_llm.config.yaml_file import in_memory
from lightning_llm.golden import FALSE_ALARMS
from lightning_llm.golden.comparison import (
    band_facts,
    check_lines,
    compare,
    input_changes,
    recipe_changes,
    recipe_problems,
    recorded_lines,
)
from lightning_llm.golden.curve import FEWEST_REPEATS, Band, Curve, Measured, Noise
from lightning_llm.golden.file import Golden, default_file, place_problems, read_golden, recipe_keys, write_golden
from lightning_llm.parallel.cuda_environment import set_allocator, set_missing, wanted
from lightning_llm.plan.resolve import Plan
from lightning_llm.run.checked_plan import checked_resolution, read_arguments
from lightning_llm.run.launch.environment import is_first_rank, rank_environment
from lightning_llm.run.launch.torch_agent import STOP_SECONDS, as_rank, launch_reported
from lightning_llm.train.spikes import StepNotMadeError


def golden(arguments: argparse.Namespace) -> int:
    """Record or check a golden file; return the exit code.

    0: success. 1: a check found a difference, or the run failed. Others: exit code of failed ranks.

    Raises:
        ConfigError: the arguments, the config or the golden file are invalid.
    """
    try:
        return _record(arguments) if arguments.action == "record" else _check(arguments)
    except RanksFailedError as error:
        return error.code
    except StepNotMadeError as error:
        if is_first_rank():
            print(f"error: {error}", file=sys.stderr)
        return 1


def _record(arguments: argparse.Namespace) -> int:
    problems = _record_problems(arguments)
    with gathered(problems):
        plan = _plan(arguments)
        file = arguments.file or default_file(plan.config)
        problems += [] if arguments.result else place_problems(file, replace=arguments.force)
    if problems:
        raise ConfigError(problems)
    if arguments.result is not None:
        leave_for_launcher(plan, arguments.steps, arguments.nudged_by, arguments.result)
        return 0
    nudges: list[int | None] = [None, *(number if arguments.nudge else None for number in range(arguments.repeats))]
    runs = measured_runs(plan, arguments.steps, nudges)
    curves = [Curve.of(each.figures) for each in runs]
    noise = Noise.of(curves, arguments.nudge) if arguments.repeats else None
    made = Golden.of(plan, runs[0].origin, curves[0], noise)
    if not is_first_rank():
        return 0
    write_golden(made, file)
    band = Band(noise, FALSE_ALARMS) if noise else None
    if arguments.json:
        facts = band_facts(band) if band and band.noise.mean else None
        print(json.dumps({"file": str(file), **made.as_data(), "band": facts}, indent=1))
    else:
        print("\n".join(recorded_lines(made, file, band)))
    return 0


def _record_problems(arguments: argparse.Namespace) -> list[Problem]:
    problems = []
    if arguments.steps < 1:
        problems.append(Problem("--steps", "must be at least 1.", arguments.steps))
    if arguments.repeats != 0 and arguments.repeats < FEWEST_REPEATS:
        text = f"must be 0 or at least {FEWEST_REPEATS}: a band needs that many."
        problems.append(Problem("--repeats", text, arguments.repeats))
    if arguments.nudge and not arguments.repeats:
        problems.append(Problem("--nudge", "needs repeats. Add --repeats 5."))
    return problems


def _check(arguments: argparse.Namespace) -> int:
    problems: list[Problem] = []
    if not 0 < arguments.false_alarms < 1:
        problems.append(Problem("--false-alarms", "must be above 0 and below 1.", f"{arguments.false_alarms:g}"))
    with gathered(problems):
        plan = _plan(arguments)
        file = arguments.file or default_file(plan.config)
        recorded = read_golden(file)
        if arguments.steps is not None:
            problems += _steps_problems(arguments.steps, recorded.curve.steps, file)
            recorded = recorded.first(arguments.steps)
        if not arguments.allow_differences:
            problems += recipe_problems(recipe_changes(recorded, recipe_keys(plan.config)), str(file))
        if arguments.band and (recorded.noise is None or recorded.noise.mean is None):
            text = f"needs a recorded band, and {file} has none. Record it again with --repeats 5 --nudge --force."
            problems.append(Problem("--band", text))
    if problems:
        raise ConfigError(problems)
    (run,) = measured_runs(plan, recorded.curve.steps, [None])
    now = Golden.of(plan, run.origin, Curve.of(run.figures))
    if not is_first_rank():
        return 0
    if not arguments.allow_differences and (problems := recipe_problems(input_changes(recorded, now), str(file))):
        raise ConfigError(problems)
    band = Band(recorded.noise, arguments.false_alarms) if recorded.noise else None
    check = compare(recorded, now, band, prefer_band=arguments.band)
    if arguments.json:
        print(json.dumps({"file": str(file), **check.as_data()}, indent=1, allow_nan=False))
    else:
        print("\n".join(check_lines(check, file)))
    return 1 if check.outcome == "different" else 0


def _steps_problems(steps: int, recorded: int, file: Path) -> list[Problem]:
    if 1 <= steps <= recorded:
        return []
    return [Problem("--steps", f"must be 1 to {recorded}, the steps in {file}.", steps)]


def _plan(arguments: argparse.Namespace) -> Plan:
    """Return the checked plan; sets CUDA's environment variables before CUDA is used, as `train` does.

    Raises:
        ConfigError: `train` would reject the config (disk space for checkpoints is not checked), or the run would not
            begin at step 0.
    """
    set_allocator()
    plan = checked_resolution(read_arguments(arguments), to_train=True, saves=False).plan()
    config = plan.config
    text = "not allowed: golden curves begin at step 0 with the recipe's own weights. Remove it."
    problems = [
        Problem(key, text, value)
        for key, value in (("resume", config.resume), ("branch_from", config.branch_from))
        if value is not None
    ]
    if rank_environment() is None and config.world not in (None, config.trainer.devices):
        text = f"must equal trainer.devices={config.trainer.devices}, the ranks started here. Set trainer.devices."
        problems.append(Problem("world", text, config.world))
    if problems:
        raise ConfigError(problems)
    set_missing(wanted(plan))
    return plan


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
        overrides = ["golden", "record", "--config", str(file), *config_dir_arguments()]
        overrides += ["--steps", str(steps), "--result", str(result)]
        overrides += [] if nudge is None else ["--nudged-by", str(nudge)]
        launch_reported(count, overrides, threads=_threads(plan), shutdown_seconds=STOP_SECONDS)
        return Measured.from_data(json.loads(result.read_text(encoding="utf-8")))


def _threads(plan: Plan) -> int | None:
    """Return the threads of a rank: those that one rank in this process has, which round as those of a check do."""
    if plan.config.trainer.threads or plan.config.trainer.devices > 1:
        return plan.config.trainer.threads
    import torch

    return torch.get_num_threads()
