"""The ranks of a training run on this machine: starting them, and what is said of the run when one fails."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_llm.base.errors import CallbackFailedError
from lightning_llm.base.imports import slow_imports
from lightning_llm.base.signals import STOPPED_CODES, exit_code, not_ignored
from lightning_llm.config.commands import how_to_go_on
from lightning_llm.config.schema import Config
from lightning_llm.config.workspace import config_dir_arguments
from lightning_llm.config.yaml_file import in_memory
from lightning_llm.run.launch.lock import lock_run
from lightning_llm.run.launch.restarts import Ended, Restarts, goes_on
from lightning_llm.run.launch.torch_agent import (
    failure_line,
    first_failure,
    found_unhealthy,
    launch_ranks,
    message_of,
    say_refused,
)
from lightning_llm.tracking.files import mark_failed, summary_of
from lightning_llm.tracking.rank_liveness import clear_beats, say_silent, says_silent, signal_ranks, silent_ranks

SAVE_SECONDS = 120
"""How long ranks may take to save after a signal, before they are killed."""


def crowd_note(config: Config, cores: int) -> str | None:
    """Return what to say of more ranks than CPU cores, which is allowed; None where ranks do not share cores.

    Ranks on CUDA find out by themselves whether there are enough devices.
    """
    if config.trainer.accelerator == "cuda" or config.trainer.devices <= cores:
        return None
    return f"note   {config.trainer.devices} ranks on {cores} CPU cores: on CPU they take turns, to the same bits"


def start_ranks(config: Config, quiet: bool = False) -> int:
    """Run `trainer.devices` ranks on this machine, again where they are lost (`restarts`); return the run's exit code.

    `quiet`: nobody sees what they print.
    """
    restarts = Restarts(config)
    while restarts.again(ended := _run_ranks(config, quiet)):
        config = goes_on(config)
    return ended.code


def _run_ranks(config: Config, quiet: bool) -> Ended:
    """Run them once, by torch.distributed.run's agent: see `launch_ranks`."""
    with slow_imports():
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    folder, trainer = Path(config.run.dir), config.trainer
    lock_run(folder).release()  # signs of life there are another process's while it holds this
    clear_beats(folder)  # ranks may fail before they do so, and an earlier start's silence is not theirs
    try:
        with in_memory(config) as file:  # the run's folder holds it as config.yaml
            words = "train", "--config", str(file), *config_dir_arguments()
            with passed_on(folder):
                launch_ranks(
                    trainer.devices, words, threads=trainer.threads, shutdown_seconds=SAVE_SECONDS, quiet=quiet
                )
    except SignalException as stop:
        return ended_by_signal(stop.sigval, folder)
    except ChildFailedError as error:
        return ended_by_failure(error, folder, config.parallel.timeout_seconds)
    return Ended(0)


def ended_by_signal(number: int, folder: Path) -> Ended:
    """Return how a run ended whose ranks were sent a signal, and say so where they did not save in time."""
    if (detail := summary_of(folder)) and detail["status"] == "running":
        print(f"error: ranks did not save within {SAVE_SECONDS} s of the signal and were killed", file=sys.stderr)
        mark_failed(folder, f"killed {SAVE_SECONDS} s after a signal, before its state was saved")
        print(how_to_go_on(folder), file=sys.stderr)
        return Ended(1)
    return Ended(exit_code(number))


@contextmanager
def passed_on(folder: Path) -> Iterator[None]:
    """Pass SIGUSR1, which torch's agent does not know, on to the ranks; end what has not begun to train."""
    from torch.distributed.elastic.multiprocessing import SignalException

    def pass_on(number: int, frame: FrameType | None) -> None:
        if not signal_ranks(folder, number):
            raise SignalException(f"{signal.Signals(number).name} before the first step", signal.Signals(number))

    before = {number: signal.signal(number, pass_on) for number in not_ignored([signal.SIGUSR1])}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def ended_by_failure(error: Any, folder: Path, timeout_seconds: float) -> Ended:
    """Say which rank failed first, and why, on stderr and in the run's summary; return how the run ended."""
    rank, failure = first_failure(error)
    if say_refused(rank, failure):  # what is wrong with the data, say, is found by the rank that reads them first
        return Ended(2)
    if found_unhealthy(error):
        return Ended(1)  # said, and what was in the folder stays as it was
    known = summary_of(folder)
    known_detail = str(known.get("detail", ""))
    # A rank that waited in vain has said for whom.
    silence = known_detail if known.get("status") == "failed" and says_silent(known_detail) else None
    if failure.exitcode in STOPPED_CODES and known.get("status") == "failed":
        return Ended(1, silence)  # the agent ended it, of several that failed in one second, and rank 0 has said why
    if failure.exitcode in STOPPED_CODES:
        return Ended(int(failure.exitcode))  # rank 0 has said why otherwise
    if not isinstance(failure.message, dict) and failure.exitcode > 0 and known.get("status") == "failed":
        return Ended(int(failure.exitcode), silence)  # a rank said why and ended in order: a loss not finite, say
    if all(text.startswith(CallbackFailedError.__name__) for text in (message_of(failure), known_detail)):
        return Ended(1)  # it failed on rank 0 too, which has said so
    detail = failure_line(rank, failure)
    if silent := silent_ranks(folder, timeout_seconds):
        detail = str(summary_of(folder).get("detail", ""))
        if detail.startswith(f"rank {silent[0].rank} ("):
            return Ended(1, detail)  # a rank that waited has said so
        detail = f"{say_silent(silent, timeout_seconds)}; {detail}"  # NCCL's watchdog ends ranks before they can
    print(f"error: {detail}", file=sys.stderr)
    mark_failed(folder, detail)
    if hint := how_to_go_on(folder):
        print(hint, file=sys.stderr)
    return Ended(1, None if message_of(failure).startswith(CallbackFailedError.__name__) else detail)
