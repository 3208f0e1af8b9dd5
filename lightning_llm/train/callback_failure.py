"""A callback of the config that raises, or ends the process: which, in which hook, where and why, in one line."""

import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as pl

from lightning_llm.base.errors import CallbackFailedError, ConfigError, StorageError
from lightning_llm.base.terminal import one_line
from lightning_llm.config.redact import redacted
from lightning_llm.train.spikes.policy import StepNotMadeError

OTHER_ENDINGS = (ConfigError, StorageError, StepNotMadeError)
"""What says by itself why a run ended, whoever raises it."""


@contextmanager
def callback_failures(chosen: Mapping[str, pl.Callback], folder: Path, rank: int = 0) -> Iterator[None]:
    """Turn what one of `chosen`, by its name in the config, raises meanwhile into one line for people.

    The whole traceback goes to `traceback.txt` in `folder`, or `traceback-RANK.txt` of any rank but the first.

    Raises:
        CallbackFailedError: it raised something, or left the process (SystemExit), whatever the exit code.
        RuntimeError: something else left the process, which is no end of a run either.
    """
    try:
        yield
    except OTHER_ENDINGS:
        raise
    except (Exception, SystemExit) as error:
        interrupted = isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt)
        cause = error.__context__ if interrupted and error.__context__ else error  # Lightning exits upon that
        if (where := _place(cause, chosen)) is not None:
            reason = f"{where}: {type(cause).__name__}: {one_line(redacted(str(cause)))}"
            raise CallbackFailedError(f"{reason} | whole traceback: {_keep(cause, folder, rank)}") from error
        if isinstance(error, SystemExit):
            raise RuntimeError(f"something ended the process within training: SystemExit({error.code})") from error
        raise


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
