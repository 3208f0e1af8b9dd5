"""One rank of a run, from a checked config to an exit code: open, prepare, agree, fit.

- open (`opening.open_rank`): this rank's device, callbacks and layout; all ranks get the same plan.
- prepare (`inputs.open_inputs`): data, and weights of other runs.
- agree (`agreement.agree`): facts, machines and the run's folder, the same on all ranks.
- fit (`build`, `watch`): module and Trainer, until the last step, a signal or a failure.

With spikes.policy=rollback the last three are repeated from an earlier checkpoint.
"""

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lightning_llm.base.errors import CallbackFailedError, StorageError, UnhealthyError
from lightning_llm.base.hardware import describe_device
from lightning_llm.base.host_memory import give_back
from lightning_llm.base.signals import GOES_ON, STOPPING, alarm_after, exit_code, not_ignored
from lightning_llm.config.redact import redacted
from lightning_llm.config.schema import Config
from lightning_llm.config.workspace import how_to_resume
from lightning_llm.parallel.cuda_environment import environment_line
from lightning_llm.parallel.process_group import leave_process_group
from lightning_llm.plan.report import notes, origin_lines, plan_line
from lightning_llm.plan.resolve import Plan, compile_note
from lightning_llm.run.agreement import agree
from lightning_llm.run.build import attention_of, build_module, build_trainer
from lightning_llm.run.inputs import Inputs, open_inputs
from lightning_llm.run.launch.environment import die_with_launcher, is_first_rank, print_once, rank_environment
from lightning_llm.run.launch.lock import RunLock
from lightning_llm.run.launch.slurm import requeue
from lightning_llm.run.opening import (
    Rank,
    build_callbacks,
    joined_ranks,
    kernel_line,
    open_rank,
    quiet_lightning,
    refuse_unhealthy,
)
from lightning_llm.run.resume.resume_plan import branch_lines, resume_lines
from lightning_llm.run.resume.start import Start
from lightning_llm.run.resume.with_ranks import decide_with_ranks, go_back, rollback_line
from lightning_llm.run.watch import failures_marked, watched_ranks
from lightning_llm.tracking.loggers import LightningRunLogger
from lightning_llm.tracking.mlflow.tracker import MLflowTracker, tracking_uri
from lightning_llm.tracking.mlflow.ui import ui_lines
from lightning_llm.tracking.rank_liveness import RankSilentError
from lightning_llm.tracking.run_state import FolderGoneError, is_among_jobs, mlflow_facts
from lightning_llm.train.checkpoint.checkpointing import Checkpointing, StoppedBySignal
from lightning_llm.train.checkpoint.manifest import step_folders, step_of
from lightning_llm.train.datamodule import CorpusDataModule
from lightning_llm.train.run_folder import RunLogger
from lightning_llm.train.spikes.policy import SpikeRollback, StepNotMadeError


def run(plan: Plan, start: Start | None = None) -> int:
    """Train from `start`, by default decided with all ranks; return 0, `exit_code` of the signal that stopped it, or 1.

    1: a step was not finite, spikes.policy ended the run, a callback failed, the run's folder could not be written, a
    rank hangs, or trainer.health found a problem.

    Raises:
        UnhealthyError: if a launcher started this rank; one of the ranks that raise it has reported it.
        CallbackFailedError: on ranks other than the first, for the launcher.
        Exception: any other failure. Its traceback is the message, and the summary's status is "failed".
    """
    folder = plan.config.run.dir
    locks: list[RunLock] = []
    with _process_restored(locks), _signals_stop_training() as ignored:
        try:
            die_with_launcher()
            quiet_lightning()
            rank = open_rank(plan)
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)
            config = rank.plan.config
            folder = config.run.dir
            if config.trainer.health:
                print_once(refuse_unhealthy(joined_ranks(config), rank.device))
            start = start or decide_with_ranks(config, locks)
            if start.finished:
                print_once(start.nothing_left(config))
            else:
                with alarm_after(plan.config.trainer.max_time):
                    train_with_rollbacks(rank, start)
        except UnhealthyError as error:
            if error.reports:
                print(f"error: {error}. Training was not started.", file=sys.stderr, flush=True)
            if rank_environment() is not None:
                raise  # tells the launcher that the error is already reported
            return 1
        except (StoppedBySignal, StepNotMadeError, StorageError, CallbackFailedError, RankSilentError) as error:
            if isinstance(error, CallbackFailedError) and not is_first_rank():
                raise
            return report_end(error, folder)
    leave_process_group()
    if not start.finished:
        print_locations(config)
    return 0


def train_with_rollbacks(rank: Rank, start: Start) -> None:
    """Train from `start`, and again from an earlier checkpoint after each rollback (spikes.policy=rollback)."""
    while (spike := _rollback_asked(rank, start)) is not None:
        gc.collect()  # frees the old model, which is in reference cycles; two do not fit in memory
        if rank.device.type == "cuda":
            torch.cuda.empty_cache()
        plan, start, made = go_back(rank.plan, start, spike)
        print_once(rollback_line(plan, start, spike, made.skipped), sys.stderr)
        rank = replace(rank, plan=plan, callbacks=build_callbacks(plan.config))


def _rollback_asked(rank: Rank, start: Start) -> SpikeRollback | None:
    """Train from `start`; return the spike that asks for a rollback, without its traceback, which holds memory."""
    try:
        train_from(rank, start)
    except SpikeRollback as spike:
        return spike.with_traceback(None)
    return None


def train_from(rank: Rank, start: Start) -> None:
    """Prepare, agree and fit: open the data and weights, make the run's folder, and train in it from `start`.

    Raises:
        SpikeRollback: the run has to go back to a checkpoint, and no signal has asked it to stop.
        StoppedBySignal: a signal has asked it to stop.
    """
    for line in filter(None, opening_lines(rank, start)):
        print_once(line)
    inputs = open_inputs(rank.plan.config, start, rank.device)
    facts, write_first_files = agree(rank, start, inputs)
    fit(rank, start, inputs, facts, write_first_files)


def opening_lines(rank: Rank, start: Start) -> Iterator[str]:
    """Yield the first lines of a run's output: its plan, its kernels, and where it resumes or branches."""
    plan, config = rank.plan, rank.plan.config
    yield plan_line(plan, describe_device(rank.device))
    yield kernel_line(rank.attention, config.trainer.attention_kernel) or ""
    yield compile_note(config, plan.degrees, plan.capability) or ""
    yield environment_line(rank.device.type) or ""
    if not is_among_jobs():
        yield from notes(plan, to_train=True)
        yield from origin_lines(config) if start.checkpoint is None else ()
    yield from resume_lines(config, start) if start.parent is None else branch_lines(config, start)


def fit(
    rank: Rank, start: Start, inputs: Inputs, facts: dict[str, Any], write_first_files: Callable[[], None] | None
) -> None:
    """Build the module and the Trainer, and train. Raises as `train_from`."""
    plan, config = rank.plan, rank.plan.config
    module = build_module(plan, inputs.corpus, inputs.initial, inputs.distillation)
    module.spikes.rollbacks_made = len(start.rollbacks)
    loggers = run_loggers(config)
    trainer = build_trainer(plan, rank.device, rank.layout, start, loggers, facts, rank.callbacks, write_first_files)
    (checkpointing,) = (each for each in trainer.callbacks if isinstance(each, Checkpointing))
    for number in not_ignored(STOPPING):
        signal.signal(number, checkpointing.stop_outside_steps)
    watched, marked = watched_ranks(config, module), failures_marked(config, rank.callbacks)
    try:
        with attention_of(plan, rank.attention), watched, marked, checkpointing.awaited():
            trainer.fit(module, CorpusDataModule(inputs.corpus, config))
    except SpikeRollback as spike:
        if number := trainer.strategy.stop_signal:  # received in the same step, and known to all ranks
            raise StoppedBySignal(number, checkpointing.saved_step) from spike
        raise
    if ended := module.ended_early:
        print_once(f"ended  by {ended['callback'] or 'a callback'} after step {ended['step']}: {ended['reason']}")


def report_end(error: BaseException, folder: str) -> int:
    """Report why the run in `folder` ended and how to resume it; return its exit code.

    Silent ranks are already reported.
    """
    gone = next((each for each in (error, error.__cause__) if isinstance(each, FolderGoneError)), None)
    if gone is not None:
        further = how_to_resume(gone.now) if gone.now else ""
        print_once("; ".join(filter(None, (f"error: {error}", further))), sys.stderr)
        return 1
    further = how_to_resume(folder)
    if isinstance(error, StoppedBySignal):
        if error.saved_step is None and (saved := step_folders(Path(folder) / "checkpoints")):  # by an earlier session
            error = StoppedBySignal(error.number, step_of(saved[0]))
        print_once("; ".join(filter(None, (str(error), further))), sys.stderr)
        if error.number in GOES_ON and is_first_rank() and (line := requeue()):
            print_once(line, sys.stderr)
        return exit_code(error.number)
    if isinstance(error, StorageError):
        text = f"earlier checkpoints are intact; once the folder can be written again, {further}"
        print_once(f"error: {redacted(str(error))}; {text}", sys.stderr)
    elif not isinstance(error, RankSilentError):
        print_once(f"error: {redacted(str(error))}", sys.stderr)
        print_once(further, sys.stderr)
    return 1


def print_locations(config: Config) -> None:
    """Print the run's folder, and how to view its curves."""
    print_once(f"run    {config.run.dir}")
    if config.logger.name == "mlflow" and not is_among_jobs():
        tracked = mlflow_facts(Path(config.run.dir))
        for line in ui_lines(tracking_uri(config), tracked.get("experiment_id")):
            print_once(line)


def run_loggers(config: Config) -> list[RunLogger]:
    """Return the loggers of the run besides its own folder; only rank 0 has any."""
    if config.logger.name == "none" or not is_first_rank():
        return []
    logger = MLflowTracker if config.logger.name == "mlflow" else LightningRunLogger
    return [logger(config, Path(config.run.dir))]


@contextmanager
def _process_restored(locks: list[RunLock]) -> Iterator[None]:
    """Release `locks` and restore threads and memory at the end, for a Python caller that continues."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        for each in locks:
            each.release()
        torch.set_num_threads(threads)
        give_back()


@contextmanager
def _signals_stop_training() -> Iterator[set[signal.Signals]]:
    """Let signals raise StoppedBySignal until training handles them; yield the signals that this process ignores.

    An ignored SIGINT, as in a script's background job, also ends the wait for other ranks.
    """
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    ignored = set(STOPPING) - set(not_ignored(STOPPING))
    try:
        for number in handlers:
            if number not in ignored or number == signal.SIGINT:
                signal.signal(number, _stop_before_training)
        yield ignored
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _stop_before_training(number: int, frame: FrameType | None) -> None:
    raise StoppedBySignal(number, None)
