"""The ranks of a run on this machine: started, started again where lost, and the reason reported when one fails.

A rank is lost when it is killed or hangs, or a device or a machine fails. What would come back on the next try (a wrong
config, a loss that is not finite, a full disk, a callback that fails) is no loss of ranks. Imports no torch.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from lightning_llm.base.errors import CallbackFailedError
from lightning_llm.base.imports import slow_imports
from lightning_llm.base.signals import STOPPED_CODES, exit_code, not_ignored
from lightning_llm.config.commands import how_to_go_on
from lightning_llm.config.schema import Config
from lightning_llm.config.workspace import config_dir_arguments
from lightning_llm.config.yaml_file import in_memory
from lightning_llm.run.launch.lock import lock_run
from lightning_llm.run.launch.torch_agent import (
    failure_line,
    first_failure,
    found_unhealthy,
    launch_ranks,
    message_of,
    say_refused,
)
from lightning_llm.tracking.files import RESTARTS, mark_failed, read_records, summary_of, write_json
from lightning_llm.tracking.rank_liveness import clear_beats, say_silent, says_silent, signal_ranks, silent_ranks

RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""How often torchrun has started its ranks again, and how often Slurm has queued its job again."""
SAVE_SECONDS = 120
"""How long ranks may take to save after a signal, before they are killed."""


class Ended(NamedTuple):
    """How a run's ranks ended: the exit code, and who was lost and how; None where nobody was."""

    code: int
    lost: str | None = None


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


class Restarts:
    """The restarts of one run: at most `trainer.max_restarts`, and none where the last one came no step further."""

    def __init__(self, config: Config):
        self.folder, self.most = Path(config.run.dir), config.trainer.max_restarts
        self.made = 0
        self._reached: int | None = None

    def again(self, ended: Ended) -> bool:
        """Return whether ranks that `ended` so are started again; say so, or why not, and note it in the summary."""
        if ended.lost is None or self.most == 0:
            return False
        if not (self.folder / "config.yaml").is_file():
            return False  # it had not begun, and would fail as it did
        reached = last_step(self.folder)
        if self.made == self.most:
            return _said(f"not started again: trainer.max_restarts={self.most} starts are used up")
        if self._reached is not None and reached <= self._reached:
            return _said(f"not started again: the last start came no further than step {self._reached} either")
        self.made, self._reached = self.made + 1, reached
        summary = summary_of(self.folder)
        event = {"lost": ended.lost, "reached_step": reached, "time": round(time.time(), 3)}
        write_json(self.folder / "summary.json", {**summary, RESTARTS: [*summary.get(RESTARTS, []), event]})
        _said(f"note   start {self.made} of at most {self.most} again, from the newest checkpoint that verifies")
        return True


def _said(text: str) -> bool:
    print(text, file=sys.stderr, flush=True)
    return False


def last_step(folder: Path) -> int:
    """Return the last step that the run's records tell of, 0 where they tell of none."""
    try:
        return max((int(record["step"]) for record in read_records(folder / "metrics.jsonl")), default=0)
    except (OSError, ValueError):
        return 0


def is_started_again() -> bool:
    """Return whether whoever started this process did so after an earlier start of it was lost."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in RESTART_COUNTS)


def goes_on(config: Config) -> Config:
    """Return `config` of a run that is started again: it goes on from its own folder's newest checkpoint."""
    return config if config.resume == "auto" else config.model_copy(update={"resume": "auto"})
