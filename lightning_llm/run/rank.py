"""One rank of a run, from a checked config to an exit code: open, prepare, agree, fit.

- open (`opening.open_rank`): this rank's device, callbacks and layout; all ranks get the same plan.
- prepare (`inputs.open_inputs`): data, and weights of other runs.
- agree (`agreement.agree`): facts, machines and the run's folder, the same on all ranks.
- fit (`fit.fit`): module and Trainer, until the last step, a signal or a failure.

After the first phase rank 0 decides where the run starts (`decide_with_ranks`). With spikes.policy=rollback that and
the last three phases are repeated from an earlier checkpoint (`go_back`).
"""

import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from lightning_llm.base.errors import (
    AgreedError,
    CallbackFailedError,
    ConfigError,
    Problem,
    StorageError,
    UnhealthyError,
)
from lightning_llm.base.hardware import describe_device
from lightning_llm.base.host_memory import give_back
from lightning_llm.base.signals import GOES_ON, STOPPING, alarm_after, exit_code, not_ignored
from lightning_llm.config.redact import redacted
from lightning_llm.config.schema import Config
from lightning_llm.config.workspace import how_to_resume
from lightning_llm.data.mixing.addressing import Range
from lightning_llm.parallel.cuda_environment import environment_line
from lightning_llm.parallel.process_group import gather_objects, leave_process_group, object_of_first
from lightning_llm.plan.report import notes, origin_lines, plan_line
from lightning_llm.plan.resolve import Plan, compile_note
from lightning_llm.run.agreement import agree
from lightning_llm.run.fit import fit
from lightning_llm.run.inputs import open_inputs
from lightning_llm.run.launch.environment import die_with_launcher, is_first_rank, print_once, rank_environment
from lightning_llm.run.launch.local_ranks import with_auto_resume
from lightning_llm.run.launch.lock import RunLock, lock_run
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
from lightning_llm.run.resume.rollback import Rollback, skipped_samples, write_rollbacks
from lightning_llm.run.resume.start import Start, decide_start
from lightning_llm.tracking.mlflow.tracker import tracking_uri
from lightning_llm.tracking.mlflow.ui import ui_lines
from lightning_llm.tracking.rank_liveness import RankSilentError
from lightning_llm.tracking.run_state import FolderGoneError, is_among_jobs, mlflow_facts
from lightning_llm.train.checkpoint.checkpointing import StoppedBySignal
from lightning_llm.train.checkpoint.manifest import Checkpoint, Damage, step_folders, step_of
from lightning_llm.train.checkpoint.verification import Verify, content_damage
from lightning_llm.train.spikes import SpikeRollback, StepNotMadeError


def run(plan: Plan, start: Start | None = None) -> int:
    """Run this rank of `plan` and return the process's exit code. Collective.

    `start`: where training starts; None: rank 0 decides, by the content of the run's folder.

    0: all steps are made. `exit_code(signal)`: a signal stopped the run. 1: a step was not finite, spikes.policy ended
    the run, a callback failed, the run's folder could not be written, a rank hangs, or trainer.health found a problem.

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


def decide_with_ranks(config: Config, locks: list[RunLock] | None = None) -> Start:
    """Return how the run starts, as rank 0 decides. Each rank verifies its share of a checkpoint's files. Collective.

    `locks`: list to which rank 0 appends the lock of the run's folder, which it acquires first; None: the folder is
    already locked.

    Raises:
        ConfigError: on every rank, with the problems found by rank 0.
    """
    if not dist.is_initialized():
        return _decide_locked(config, content_damage, locks)
    decision: Start | ConfigError
    if is_first_rank():
        try:
            decision = _decide_locked(config, _verify_on_all_ranks, locks)
        except ConfigError as error:
            decision = error
        object_of_first(decision)
    else:
        nothing: Any = None  # replaced by rank 0's value
        while isinstance(asked := object_of_first(nothing), Checkpoint):
            _verify_share(asked)
        decision = asked
    if isinstance(decision, ConfigError):
        raise AgreedError(decision.problems)
    return decision


def _decide_locked(config: Config, verify: Verify, locks: list[RunLock] | None) -> Start:
    if locks is not None:
        locks.append(lock_run(Path(config.run.dir)))
    return decide_start(config, verify)


def _verify_on_all_ranks(checkpoint: Checkpoint) -> list[Damage]:
    """Return the damage found by all ranks. Called by rank 0 while the others wait in `decide_with_ranks`.

    Raises:
        ConfigError: the checkpoint's folder is not visible on a rank.
    """
    object_of_first(checkpoint)
    found = _verify_share(checkpoint)
    if blind := [str(rank) for rank, damage in enumerate(found) if damage is None]:
        text = f"{checkpoint.folder} is not visible on rank(s) {', '.join(blind)}. Use storage shared by all nodes."
        raise ConfigError(Problem("resume", text))
    return [each for damage in found for each in damage or ()]


def _verify_share(checkpoint: Checkpoint) -> list[list[Damage] | None]:
    """Return the damage in each rank's share of the files, None from ranks that do not see them. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return gather_objects(content_damage(checkpoint, rank, world) if checkpoint.folder.is_dir() else None)


def go_back(plan: Plan, start: Start, spike: SpikeRollback) -> tuple[Plan, Start, Rollback]:
    """Save a rollback because of `spike`; return (plan, start, the rollback) with which the run continues. Collective.

    `start`: where the session that met the spike had started. The saved file alone determines where the run continues,
    so a run that is killed now resumes in the same way.

    Raises:
        ConfigError: on every rank, if it cannot be written, or no checkpoint is intact.
    """
    config = with_auto_resume(plan.config)
    made = Rollback.from_record(spike.record, config, skipped_samples(config, start.rollbacks))
    problem = None
    if is_first_rank():
        try:
            write_rollbacks(Path(config.run.dir), [*start.rollbacks, made])
        except OSError as error:
            problem = Problem("run.dir", f"{config.run.dir} cannot be written ({error.strerror}). Fix this and resume.")
    problem = object_of_first(problem)
    if problem is not None:
        raise AgreedError(problem) if dist.is_initialized() else ConfigError(problem)
    return replace(plan, config=config), decide_with_ranks(config), made


def rollback_line(plan: Plan, start: Start, spike: SpikeRollback, skipped: Range) -> str:
    """Return the line to print about a rollback because of `spike` to `start`; `skipped`: range of samples left out."""
    spikes = plan.config.spikes
    first, last = skipped
    return (
        f"back   {spike}: rolled back to step {start.step}, skipping the samples {first} to {last} "
        f"(rollback {len(start.rollbacks)} of at most {spikes.max_rollbacks}, spikes.max_rollbacks)"
    )


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
