"""Monitoring of a run in its own processes: heartbeats of ranks, silent ranks, and failures of callbacks."""

import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_llm.base.errors import CallbackFailedError, ConfigError, StorageError
from lightning_llm.base.terminal import one_line
from lightning_llm.config.redact import redacted
from lightning_llm.config.schema import Config
from lightning_llm.parallel.process_group import collectives
from lightning_llm.tracking.files import mark_failed, summary_of
from lightning_llm.tracking.rank_liveness import (
    Beat,
    RankHeartbeat,
    RankSilentError,
    absent_ranks,
    absent_text,
    last_collective,
    silent_ranks,
    silent_text,
)
from lightning_llm.train.module import LanguageModule
from lightning_llm.train.spikes.policy import SpikeRollback, StepNotMadeError

OTHER_ENDINGS = (ConfigError, StorageError, StepNotMadeError)
"""Errors that explain by themselves why a run ended."""


@contextmanager
def watched_ranks(config: Config, module: LanguageModule) -> Iterator[None]:
    """Write heartbeats of this rank during the block; does nothing in a run of one rank.

    A failed run leaves the heartbeats in its folder; a rollback to a checkpoint is not a failure.

    Raises:
        RankSilentError: the run failed because other ranks are silent.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    timeout = config.parallel.timeout_seconds
    folder = Path(config.run.dir)
    heartbeat = RankHeartbeat(folder, dist.get_rank(), timeout, lambda: module.completed_steps, collectives)
    heartbeat.start()
    try:
        yield
    except SpikeRollback:  # this process continues
        heartbeat.stop()
        raise
    except Exception as error:
        name_silent_ranks(config, error)
        raise
    except BaseException:  # a signal
        heartbeat.stop()
        raise
    heartbeat.stop()


def name_silent_ranks(config: Config, error: Exception) -> None:
    """After `error`, find ranks that this one has waited for in vain; the first of the other ranks reports them.

    Raises:
        RankSilentError: there are such ranks. They are reported on stderr and in the summary as the cause of `error`.
    """
    missed, text = _missed(Path(config.run.dir), config.parallel.timeout_seconds)
    if not missed:
        return
    if dist.get_rank() == min(set(range(dist.get_world_size())) - {each.rank for each in missed}):
        print(f"error: {text}", file=sys.stderr, flush=True)
        mark_failed(Path(config.run.dir), text)
    for each in missed:
        each.end_if_stopped()
    raise RankSilentError(text) from error


def _missed(folder: Path, timeout: float) -> tuple[list[Beat], str]:
    """Return the ranks that this one has waited for, and the error text.

    These are the silent ranks or, if there are none, live ranks that did not join the collective. The latter only if
    this rank has been in its collective for long; otherwise it has failed for another reason.
    """
    kept = collectives()
    waited_in = last_collective(kept[-1:])
    if silent := silent_ranks(folder, timeout):
        return silent, silent_text(silent, timeout, waited_in)
    if waited_in is None or waited_in["age_seconds"] < timeout / 2:
        return [], ""
    absent = [each for each in absent_ranks(folder, timeout) if each.rank != dist.get_rank()]
    return absent, absent_text(absent, timeout, waited_in) if absent else ""


@contextmanager
def failures_marked(config: Config, chosen: Mapping[str, pl.Callback]) -> Iterator[None]:
    """Turn an exception of one of the callbacks `chosen` (by name in the config) into one line.

    The line goes into the summary. The whole traceback goes to `traceback.txt` in the run's folder, or to
    `traceback-RANK.txt` on other ranks than the first.

    Raises:
        CallbackFailedError: a callback raised an exception or SystemExit, with any exit code.
        RuntimeError: something else raised SystemExit.
    """
    folder, rank = Path(config.run.dir), dist.get_rank() if dist.is_initialized() else 0
    try:
        yield
    except OTHER_ENDINGS:
        raise
    except (Exception, SystemExit) as error:
        interrupted = isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt)
        cause = (
            error.__context__ if interrupted and error.__context__ else error
        )  # Lightning exits after KeyboardInterrupt
        if (where := _place(cause, chosen)) is None:
            if isinstance(error, SystemExit):
                text = f"SystemExit({error.code}) was raised during training"
                raise RuntimeError(text) from error
            raise
        reason = f"{where}: {type(cause).__name__}: {one_line(redacted(str(cause)))}"
        failure = CallbackFailedError(f"{reason} | full traceback: {_keep(cause, folder, rank)}")
        # The callback's on_exception may have failed before that of the run folder. A failure after the last step
        # does not change the status of the run. There is no summary yet if it fails in setup.
        if rank == 0 and summary_of(folder).get("status", "running") in ("running", "failed"):
            mark_failed(folder, f"{type(failure).__name__}: {failure}")
        raise failure from error


def _place(error: BaseException, chosen: Mapping[str, pl.Callback]) -> str | None:
    """Return the callback of `chosen` that raised `error`, with its hook and line; None if it was none of them."""
    frames = list(traceback.walk_tb(error.__traceback__))
    for index, (frame, line) in enumerate(frames):
        owner = frame.f_locals.get("self")
        name = next((name for name, each in chosen.items() if each is owner), None)
        if name is None:
            continue
        file = frame.f_code.co_filename
        for inner, number in frames[index:]:  # report the last line in the callback's own file
            if inner.f_code.co_filename == file:
                line = number
        kind = f"{type(owner).__module__}.{type(owner).__qualname__}"
        return f"callbacks.{name} ({kind}) failed in {frame.f_code.co_name} ({file}:{line})"
    return None


def _keep(error: BaseException, folder: Path, rank: int) -> Path | str:
    file = folder / (f"traceback-{rank}.txt" if rank else "traceback.txt")
    text = redacted("".join(traceback.format_exception(error)))
    try:
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as problem:
        print(text, file=sys.stderr)
        return f"above ({file} could not be written: {problem.strerror})"
    return file
