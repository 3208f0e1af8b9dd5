"""The verb `train`: train one run, or with -m the jobs of a sweep. Slow imports come after the checks."""

import argparse
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_llm.base.errors import CallbackFailedError, ConfigError, Problem, UnhealthyError
from lightning_llm.base.process import slow_imports
from lightning_llm.base.signals import raised_as_terminated, signals_passed_on
from lightning_llm.base.terminal import lasting_output
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.config.schema.validation import read_config
from lightning_llm.config.sweep_space import read_space, read_sweep_keys
from lightning_llm.parallel.cuda_environment import set_allocator, set_missing, wanted
from lightning_llm.plan.resolve import Plan
from lightning_llm.run.checked_plan import checked_resolution, read_arguments
from lightning_llm.run.launch.environment import interactive_note, rank_environment, world_problems
from lightning_llm.run.launch.local_ranks import crowd_note, is_started_again, start_ranks
from lightning_llm.run.launch.lock import lock_run
from lightning_llm.run.launch.ray_cluster import ray_problems
from lightning_llm.run.resume.resume_plan import refuse_unnamed_resume
from lightning_llm.run.resume.start import decide_start
from lightning_llm.sweep.ending import close, close_again
from lightning_llm.sweep.jobs import checked_jobs, left_to_do, opened
from lightning_llm.sweep.jobs import start as start_jobs
from lightning_llm.tracking.sweep_definition import define
from lightning_llm.train.checkpoint.verification import content_damage

IN_SLURM = {"SLURM_JOB_ID", "SUBMITIT_EXECUTOR"}
"""Environment variables of a job's processes: of Slurm, and of submitit with launcher.cluster=local."""


def train(arguments: argparse.Namespace) -> int:
    """Train one run, or with -m a sweep; return the exit code.

    Raises:
        ConfigError: with all problems of the config or of this machine, before anything starts.
    """
    with _lasting():
        if arguments.multirun:
            if rank_environment() is not None:
                text = "starts its jobs and their ranks itself. Run it once, without torchrun or srun."
                raise ConfigError(Problem("-m", text))
            return sweep(arguments)
        set_allocator()
        plan = checked_resolution(read_arguments(arguments), to_train=True, by_launcher=True).plan()
        set_missing(wanted(plan))
        unnamed = arguments.config is None and plan.config.resume == "auto"
        if unnamed and (rank_environment() is None or is_started_again()):
            refuse_unnamed_resume(plan.config, arguments.overrides)
        return _start(plan) if rank_environment() is None else _run_rank(plan)


def sweep(arguments: argparse.Namespace) -> int:
    """Run the jobs of a sweep in the folders `run.root/EXPERIMENT/SWEEP/N`, and return the exit code.

    They are a product of values, or chosen look by look (`sweep.until`) or by a search (`sweep.search`). Finished and
    diverged jobs are skipped, failed or stopped jobs are resumed, and jobs of other processes are left alone.

    Returns:
        0; 1 if a job failed (a diverged job is a result, not a failure); 128 + the number of a signal that stopped the
        sweep, which is passed on to the running jobs, so that they save and stop.

    Raises:
        ConfigError: with the problems of all jobs, before anything starts.
    """
    keys = read_sweep_keys(arguments.overrides, arguments.config_dir)
    if keys.search is not None:
        return _search(arguments, keys)
    composed = checked_jobs(arguments)
    if keys.until is not None:
        from lightning_llm.sweep.decide import run_until_decided

        return run_until_decided(composed, keys)
    whole = define(*composed)
    todo = left_to_do(whole.jobs)
    if not todo:
        print(f"sweep  nothing left to do, in {whole.folder}")
        close_again(whole)
        return 0
    keys_left = {job.key for job in todo}
    whole = opened(lambda: define(*composed))
    with signals_passed_on() as relay:
        outcomes = start_jobs([job for job in whole.jobs if job.key in keys_left], relay)  # now with their parent
    return close(whole, outcomes, relay.received)


def _search(arguments: argparse.Namespace, keys: SweepConfig) -> int:
    """Run a search instead of the product of values; return the exit code.

    Raises:
        ConfigError: with all problems, before anything starts.
    """
    if arguments.config:
        raise ConfigError(
            Problem("--config", "is one resolved run, but a search (-m) is composed. Use overrides instead.")
        )
    from lightning_llm.sweep.jobs import SearchRequest

    asked = SearchRequest(arguments, keys)
    if keys.search == "halving":
        from lightning_llm.sweep.halving import halve

        return halve(asked)
    from lightning_llm.sweep.optuna_search import search_values

    return search_values(asked, read_space(arguments.overrides, arguments.config_dir))


def train_config(config: Config, *, quiet: bool = False) -> int:
    """Train one run for a Python caller, in this process or in new ranks; return the exit code.

    `quiet`: discard the ranks' stdout.

    Raises:
        ConfigError: the config is invalid, or this process cannot start a run.
    """
    problems = _process_problems()
    set_allocator()
    try:
        # pydantic's model_copy does not validate.
        reading = read_config(config.model_dump(warnings=False))
        plan = checked_resolution(reading, to_train=True, by_launcher=True).plan()
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    if problems:
        raise ConfigError(problems)
    set_missing(wanted(plan))
    with lasting_output(), _lasting():
        if config.resume == "auto" and not Path(config.run.dir).exists():
            refuse_unnamed_resume(config, [])
        return _start(plan, quiet)


def _process_problems() -> list[Problem]:
    """Return the reasons why this process cannot start a run."""
    problems = []
    if threading.current_thread() is not threading.main_thread():
        name = threading.current_thread().name
        text = "a run handles signals, which needs the main thread. Call train() there."
        problems.append(Problem("thread", text, name))
    if (ranks := rank_environment()) is not None:
        text = (
            f"this is rank {ranks.rank} of {ranks.world}, started by torchrun or srun, but train() starts its own "
            "ranks (trainer.devices). Call it in one process, or run `lightning-llm train --config FILE`."
        )
        problems.append(Problem("process", text))
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        text = (
            f"a process group of {distributed.get_world_size()} exists, but a run creates its own. Call "
            "torch.distributed.destroy_process_group(), or train in another process."
        )
        problems.append(Problem("torch.distributed", text))
    return problems


@contextmanager
def _lasting() -> Iterator[None]:
    """Set up the process for a long run: OpenMP's wait policy and signals."""
    # Spinning OpenMP threads starve each other on a busy machine: 50 times slower with two threads on two cores under
    # a load of 16. On an idle machine spinning is twice as fast as sleeping.
    if os.getloadavg()[0] > (os.cpu_count() or 1):
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with raised_as_terminated():
        yield


def _start(plan: Plan, quiet: bool = False) -> int:
    """Train one run, in this process or in new ranks; return the exit code."""
    config = plan.config
    if config.launcher.name == "slurm" and not IN_SLURM & os.environ.keys():
        text = (
            "this process is not in a Slurm job. Write a batch script with `lightning-llm plan ... --script FILE` and "
            "submit it with sbatch, or set launcher=local to train here. With -m the jobs of a sweep are submitted."
        )
        raise ConfigError(Problem("launcher.name", text, "slurm"))
    on_ray = config.launcher.name == "ray"
    if problems := list(ray_problems(config)) if on_ray else world_problems(config):
        raise ConfigError(problems)
    if note := interactive_note():
        print(note, file=sys.stderr, flush=True)
    if not on_ray and config.trainer.devices == 1 and config.trainer.max_restarts == 0:
        return _run_alone(plan)
    start = decide_start(config)  # a quick check; the ranks verify the checkpoint and decide
    if start.finished and decide_start(config, content_damage).finished:
        print(start.nothing_left(config))
        return 0
    if on_ray:
        from lightning_llm.run.launch.ray_ranks import start_ranks_on_ray

        return start_ranks_on_ray(config, quiet)
    if note := crowd_note(config, os.cpu_count() or 1):
        print(note, flush=True)
    return start_ranks(config, quiet)


def _run_alone(plan: Plan) -> int:
    """Run the only rank in this process; decide where it starts before slow imports."""
    lock = lock_run(Path(plan.config.run.dir))
    try:
        start = decide_start(plan.config, content_damage)
        if start.finished:
            print(start.nothing_left(plan.config))
            return 0
        with slow_imports():
            from lightning_llm.parallel.process_group import leave_process_group
            from lightning_llm.run.rank import run

        try:
            return run(plan, start)
        finally:
            leave_process_group()  # a failed run is still in its group of one rank
    finally:
        lock.release()


def _run_rank(plan: Plan) -> int:
    """Run one of several ranks. Exceptions are recorded with their time, so that the launcher can find the first."""
    with slow_imports():
        from torch.distributed.elastic.multiprocessing.errors import record

        from lightning_llm.run.rank import run

    try:
        return int(record(run)(plan) or 0)
    except UnhealthyError as error:  # already reported by one rank
        error.end_stopped()
        return 1
    except CallbackFailedError as error:
        if "TORCHELASTIC_ERROR_FILE" not in os.environ:  # started by srun: no launcher collects errors
            print(f"error: rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        return 1
