"""The verb `train`: compose, check, start. Nothing heavy is imported before the checks are through."""

import argparse
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from lightning_llm.config.commands import how_to_go_on
from lightning_llm.config.compose import typed_value
from lightning_llm.config.config_dir import config_dir_arguments
from lightning_llm.config.file import in_memory
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.strict import read_config
from lightning_llm.errors import AgreedError, CallbackFailedError, ConfigError, Problem, Terminated
from lightning_llm.plan.resolve import Plan
from lightning_llm.record.files import mark_failed, summary_of
from lightning_llm.record.rank_liveness import clear_beats, say_silent, silent_ranks
from lightning_llm.run.checked_plan import checked_plan, checked_resolution
from lightning_llm.run.environment import rank_environment
from lightning_llm.run.start import decide_start, lock_run, resumable_runs
from lightning_llm.sweep.run import sweep
from lightning_llm.terminal.lasting_output import lasting_output
from lightning_llm.terminal.text import escaped
from lightning_llm.train.checkpoint.manifest import content_damage

MADE_OF_TIME = re.compile(r"-\d{8}-\d{6}$")
"""The end of a run.name that conf/config.yaml makes."""

SAVE_SECONDS = 120
"""How long ranks may take to save after a signal, before they are killed."""

AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""What torch's agent sets handlers for (torch.distributed.elastic.multiprocessing.api.PContext.start)."""


def train(arguments: argparse.Namespace) -> int:
    """Train one run, or with -m one for each combination; return the exit code."""
    with _lasting():
        if arguments.multirun:
            if rank_environment() is not None:
                text = "starts its jobs, and their ranks, by itself. Call it once, without torchrun or srun."
                raise ConfigError(Problem("-m", text))
            return sweep(arguments)
        plan = checked_plan(arguments, to_train=True)
        if rank_environment() is not None:
            return _run_rank(plan)
        if plan.config.resume == "auto" and arguments.config is None:
            refuse_unnamed_resume(plan.config, arguments.overrides)
        return _start(plan)


def train_config(config: Config, *, quiet: bool = False) -> int:
    """Train one run in this process, or in ranks of its own, for a caller that goes on; return the exit code.

    `quiet`: ranks that are started write nothing to the standard output.

    Raises:
        ConfigError: with all that is wrong with the config, or with this process as a place to train from.
    """
    problems = _process_problems()
    try:
        # A copy with other values (pydantic's model_copy) was never looked at.
        reading = read_config(config.model_dump(warnings=False))
        plan = checked_resolution(reading, to_train=True).plan()
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    if problems:
        raise ConfigError(problems)
    with _lasting():
        if config.resume == "auto" and not Path(config.run.dir).exists():
            refuse_unnamed_resume(config, [])
        return _start(plan, quiet)


def _process_problems() -> list[Problem]:
    """Return why no run can be started from this process, which does other things, too."""
    problems = []
    if threading.current_thread() is not threading.main_thread():
        name = threading.current_thread().name
        text = f"is {name}, and a run takes signals, to save and stop. Call it from the main thread."
        problems.append(Problem("thread", text))
    if (ranks := rank_environment()) is not None:
        text = (
            f"is rank {ranks.rank} of {ranks.world}, started by torchrun or srun, and a run from Python starts its "
            "ranks by itself (trainer.devices). Call it in one process, or start lightning-llm train --config FILE."
        )
        problems.append(Problem("process", text))
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        text = (
            f"has a process group of {distributed.get_world_size()} already, and a run makes its own. Leave it "
            "(torch.distributed.destroy_process_group()), or train in another process."
        )
        problems.append(Problem("torch.distributed", text))
    return problems


@contextmanager
def _lasting() -> Iterator[None]:
    """Hold what a run of hours needs of its process: output that may lose its reader, threads that wait, signals."""
    # CPU threads that spin while they wait for each other starve each other where others want the cores: 50 times
    # slower here, two threads on two cores under a load of 16. Alone, spinning is twice as fast as sleeping.
    if os.getloadavg()[0] > (os.cpu_count() or 1):
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with lasting_output(), _terminated_in_words():
        yield


@contextmanager
def _terminated_in_words() -> Iterator[None]:
    """Have SIGTERM raise `Terminated`, until a run or a sweep takes it for itself."""

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start(plan: Plan, quiet: bool = False) -> int:
    """Train one run, in this process or in ranks that are started for it."""
    config = plan.config
    if config.world not in (None, config.trainer.devices):
        text = (
            f"is {config.world}, and {config.trainer.devices} ranks would be started here. Leave it out, set "
            "trainer.devices, or start the ranks of several machines by torchrun or srun (world is for plan)."
        )
        raise ConfigError(Problem("world", text))
    if config.trainer.devices == 1:
        return _run_alone(plan)
    start = decide_start(config)  # a first look: the ranks verify what they go on from, and decide
    if start.finished and decide_start(config, content_damage).finished:
        print(start.nothing_left(config))
        return 0
    if note := crowd_note(config, os.cpu_count() or 1):
        print(note, flush=True)
    return start_ranks(config, quiet)


def refuse_unnamed_resume(config: Config, overrides: list[str]) -> None:
    """Return quietly unless the run's name is made of the time, under which there can be nothing to go on with.

    Raises:
        ConfigError: it is; with the newest run of the experiment that would go on.
    """
    if any(typed_value(overrides, key) for key in ("run.name", "run.dir")) or not MADE_OF_TIME.search(config.run.name):
        return
    text = f"is auto, and run.name is made of the time ({config.run.name}): no earlier run can be found by it. "
    found = resumable_runs(config)
    if found:
        text += f"Set run.dir={shlex.quote(str(found[0]))}, which is the newest run that this config goes on with"
        text += f" (of {len(found)})." if len(found) > 1 else "."
    else:
        text += f"Set run.name or run.dir. No unfinished run in {Path(config.run.dir).parent} has this config."
    raise ConfigError(Problem("resume", text))


def _run_alone(plan: Plan) -> int:
    """Run the only rank in this process, its start decided before anything heavy is imported."""
    lock = lock_run(Path(plan.config.run.dir))
    try:
        start = decide_start(plan.config, content_damage)
        if start.finished:
            print(start.nothing_left(plan.config))
            return 0
        from lightning_llm.parallel.process_group import leave_process_group  # torch and Lightning: seconds
        from lightning_llm.run.rank import run

        try:
            return run(plan, start)
        finally:
            leave_process_group()  # of one rank, which a failed run is still in
    finally:
        lock.release()


def _run_rank(plan: Plan) -> int:
    """Run one of several ranks. What it raises is kept for the launcher, with the time, so that the first is known."""
    from torch.distributed.elastic.multiprocessing.errors import record

    from lightning_llm.run.rank import run

    try:
        return int(record(run)(plan) or 0)
    except CallbackFailedError as error:
        if "TORCHELASTIC_ERROR_FILE" not in os.environ:  # srun has started the ranks, and nobody gathers what they say
            print(f"error: rank {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        return 1


def crowd_note(config: Config, cores: int) -> str | None:
    """Return what to say of more ranks than CPU cores, which is allowed; None where ranks do not share cores.

    Ranks on CUDA find out by themselves whether there are enough devices.
    """
    if config.trainer.accelerator == "cuda" or config.trainer.devices <= cores:
        return None
    return f"note   {config.trainer.devices} ranks on {cores} CPU cores: on CPU they take turns, to the same bits"


def start_ranks(config: Config, quiet: bool = False) -> int:
    """Run `trainer.devices` ranks on this machine by torch.distributed.run's agent; return the run's exit code.

    The agent watches the ranks: when one fails it ends the others, and passes SIGINT and SIGTERM on to all. `quiet`:
    nobody sees what they print.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they report is printed here, in a line
    folder = Path(config.run.dir)
    lock_run(folder).release()  # signs of life there are another process's while it holds this
    clear_beats(folder)  # ranks may fail before they do so, and an earlier start's silence is not theirs
    logs = tempfile.mkdtemp(prefix="lightning-llm-ranks-")  # ranks leave there what they raised
    settings = LaunchConfig(
        logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=Std.OUT if quiet else Std.NONE),
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=config.trainer.devices,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        max_restarts=0,
        shutdown_timeout=SAVE_SECONDS,
    )
    try:
        with _for_ranks(config), in_memory(config) as file:  # the run's folder holds it as config.yaml
            elastic_launch(settings, sys.executable)(
                "-m", "lightning_llm", "train", "--config", str(file), *config_dir_arguments()
            )
    except SignalException as stop:
        if (detail := summary_of(folder)) and detail["status"] == "running":
            print(f"error: ranks did not save within {SAVE_SECONDS} s of the signal and were killed", file=sys.stderr)
            mark_failed(folder, f"killed {SAVE_SECONDS} s after a signal, before its state was saved")
            print(how_to_go_on(folder), file=sys.stderr)
            return 1
        return 128 + int(stop.sigval)
    except ChildFailedError as error:
        return _first_failure(error, folder, config.parallel.timeout_seconds)
    finally:
        shutil.rmtree(logs, ignore_errors=True)
    return 0


@contextmanager
def _for_ranks(config: Config) -> Iterator[None]:
    """Share the cores out among the ranks; take back what they and the agent change of this process, which may go on.

    The agent makes every signal below a SignalException, and leaves it so.
    """
    handlers = {number: signal.getsignal(number) for number in AGENT_SIGNALS}
    threads = config.trainer.threads or max(1, (os.cpu_count() or 1) // config.trainer.devices)
    ours = "OMP_NUM_THREADS" not in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    try:
        yield
    finally:
        if ours:
            del os.environ["OMP_NUM_THREADS"]
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _first_failure(error: Any, folder: Path, timeout_seconds: float) -> int:
    """Say which rank failed first, and why, on stderr and in the run's summary; return the run's exit code."""
    rank, failure = error.get_first_failure()
    if failure.exitcode == 2 and rank != 0 and isinstance(failure.message, dict):
        # What is wrong with the data, say, is found by the rank that reads them first; rank 0 may not get to it.
        kind, _, text = failure.message["message"].partition(": ")
        if kind != AgreedError.__name__:
            print(f"error: rank {rank}: {text}", file=sys.stderr)
    if failure.exitcode in (130, 143) and summary_of(folder).get("status") == "failed":
        return 1  # the agent ended it, of several that failed in the same second, and rank 0 has said why
    if failure.exitcode in (2, 130, 143):
        return int(failure.exitcode)  # rank 0 has said why otherwise
    if not isinstance(failure.message, dict) and failure.exitcode > 0:
        known = summary_of(folder)
        if known.get("status") == "failed":  # a rank said why and ended in order: a loss that is not finite, say
            return int(failure.exitcode)
    message = failure.message["message"] if isinstance(failure.message, dict) else str(failure.message)
    if all(text.startswith(CallbackFailedError.__name__) for text in (message, summary_of(folder).get("detail", ""))):
        return 1  # it failed on rank 0 too, which has said so
    why = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    detail = f"rank {rank} failed first ({why}): {escaped(message.strip().splitlines()[0])}"
    if silent := silent_ranks(folder, timeout_seconds):
        detail = str(summary_of(folder).get("detail", ""))
        if detail.startswith(f"rank {silent[0].rank} ("):
            return 1  # a rank that waited has said so
        detail = f"{say_silent(silent, timeout_seconds)}; {detail}"  # NCCL's watchdog ends ranks before they can
    print(f"error: {detail}", file=sys.stderr)
    mark_failed(folder, detail)
    if hint := how_to_go_on(folder):
        print(hint, file=sys.stderr)
    return 1
