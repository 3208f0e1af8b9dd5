"""A run watched from within: signs of life of its ranks, silent ranks by name, callbacks that fail, in one line."""

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
    last_collective,
    say_absent,
    say_silent,
    silent_ranks,
)
from lightning_llm.train.module import LanguageModule
from lightning_llm.train.spikes.policy import SpikeRollback, StepNotMadeError

OTHER_ENDINGS = (ConfigError, StorageError, StepNotMadeError)
"""What says by itself why a run ended, whoever raises it."""


@contextmanager
def watched_ranks(config: Config, module: LanguageModule) -> Iterator[None]:
    """Give a sign of life of this rank meanwhile; what one rank alone does nobody waits for.

    A run that fails leaves the signs in its folder; one that goes back to a checkpoint has not failed.

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
    except SpikeRollback:  # this process goes on
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
    """Look for ranks that this one has waited for in vain, when its run fails; the first of the others speaks.

    Raises:
        RankSilentError: there are some, and they are named on stderr and in the summary; `error` is but what followed.
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
    """Return the ranks that this one has waited for, silent ones or else such as live and do not come, and the error.

    None of the latter where this rank has begun a collective of late: it has failed for another reason.
    """
    kept = collectives()
    waited_in = last_collective(kept[-1:])
    if silent := silent_ranks(folder, timeout):
        return silent, say_silent(silent, timeout, waited_in)
    if waited_in is None or waited_in["age_seconds"] < timeout / 2:
        return [], ""
    absent = [each for each in absent_ranks(folder, timeout) if each.rank != dist.get_rank()]
    return absent, say_absent(absent, timeout, waited_in) if absent else ""


@contextmanager
def failures_marked(config: Config, chosen: Mapping[str, pl.Callback]) -> Iterator[None]:
    """Turn what one of the callbacks `chosen`, by its name in the config, raises meanwhile into one line for people.

    The line goes into the summary. The whole traceback goes to `traceback.txt` in the run's folder, or
    `traceback-RANK.txt` of any rank but the first.

    Raises:
        CallbackFailedError: it raised something, or left the process (SystemExit), whatever the exit code.
        RuntimeError: something else left the process, which is no end of a run either.
    """
    folder, rank = Path(config.run.dir), dist.get_rank() if dist.is_initialized() else 0
    try:
        yield
    except OTHER_ENDINGS:
        raise
    except (Exception, SystemExit) as error:
        interrupted = isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt)
        cause = error.__context__ if interrupted and error.__context__ else error  # Lightning exits upon that
        if (where := _place(cause, chosen)) is None:
            if isinstance(error, SystemExit):
                text = f"something ended the process within training: SystemExit({error.code})"
                raise RuntimeError(text) from error
            raise
        reason = f"{where}: {type(cause).__name__}: {one_line(redacted(str(cause)))}"
        failure = CallbackFailedError(f"{reason} | whole traceback: {_keep(cause, folder, rank)}")
        # Its own on_exception may have failed, before the run folder's; what fails after the last step ends no run.
        # One that fails in setup does so before there is a summary.
        if rank == 0 and summary_of(folder).get("status", "running") in ("running", "failed"):
            mark_failed(folder, f"{type(failure).__name__}: {failure}")
        raise failure from error


def _place(error: BaseException, chosen: Mapping[str, pl.Callback]) -> str | None:
    """Return which of `chosen` was running when `error` was raised, its hook and its line; None where none was."""
    frames = list(traceback.walk_tb(error.__traceback__))
    for index, (frame, line) in enumerate(frames):
        owner = frame.f_locals.get("self")
        name = next((name for name, each in chosen.items() if each is owner), None)
        if name is None:
            continue
        file = frame.f_code.co_filename
        for inner, number in frames[index:]:  # the last line of the same file: what it called elsewhere is no news
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
