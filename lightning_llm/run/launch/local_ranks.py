"""Ranks of a run on this machine: start, restart after a loss, and report of the first failure.

A rank is lost when it is killed or hangs, or a device or a machine fails. Errors that would recur (an invalid config, a
loss that is not finite, a full disk, a failing callback) do not count as lost ranks. Imports no torch.
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
from lightning_llm.base.process import slow_imports
from lightning_llm.base.signals import STOPPED_CODES, exit_code, not_ignored
from lightning_llm.config.schema import Config
from lightning_llm.config.workspace import config_dir_arguments, how_to_resume
from lightning_llm.config.yaml_file import in_memory
from lightning_llm.run.launch.lock import lock_run
from lightning_llm.run.launch.torch_agent import (
    failure_line,
    first_failure,
    found_unhealthy,
    launch_ranks,
    message_of,
    report_refused,
)
from lightning_llm.tracking.files import RESTARTS, mark_failed, read_records, summary_of, write_json
from lightning_llm.tracking.rank_liveness import clear_beats, is_silent_text, signal_ranks, silent_ranks, silent_text

RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""Number of restarts by torchrun, and of requeues by Slurm."""
SAVE_SECONDS = 120
"""Time for ranks to save after a signal before they are killed."""


class ExitStatus(NamedTuple):
    """How the ranks of a run ended."""

    code: int
    """Exit code of the command."""
    lost: str | None = None
    """Description of the lost rank; None if none was lost, so that a restart would not help."""


def crowd_note(config: Config, cores: int) -> str | None:
    """Return a note if there are more ranks than CPU cores, which is allowed; else None.

    Ranks on CUDA check the number of devices themselves.
    """
    if config.trainer.accelerator == "cuda" or config.trainer.devices <= cores:
        return None
    return f"note   {config.trainer.devices} ranks share {cores} CPU cores: slower, with identical results"


def start_ranks(config: Config, quiet: bool = False) -> int:
    """Run `trainer.devices` ranks on this machine and restart them if lost (`Restarts`); return the run's exit code.

    `quiet`: discard the ranks' stdout.
    """
    restarts = Restarts(config)
    while restarts.again(ended := _run_ranks(config, quiet)):
        config = with_auto_resume(config)
    return ended.code


def _run_ranks(config: Config, quiet: bool) -> ExitStatus:
    """Run the ranks once, with torch.distributed.run's agent (see `launch_ranks`)."""
    with slow_imports():
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    folder, trainer = Path(config.run.dir), config.trainer
    lock_run(folder).release()  # raises if another process trains there: its heartbeats must stay
    clear_beats(folder)  # ranks may fail before they do this, and old heartbeats would look like silent ranks
    try:
        with in_memory(config) as file:  # the ranks write it to the run's folder as config.yaml
            words = "train", "--config", str(file), *config_dir_arguments()
            with passed_on(folder):
                launch_ranks(
                    trainer.devices, words, threads=trainer.threads, shutdown_seconds=SAVE_SECONDS, quiet=quiet
                )
    except SignalException as stop:
        return ended_by_signal(stop.sigval, folder)
    except ChildFailedError as error:
        return ended_by_failure(error, folder, config.parallel.timeout_seconds)
    return ExitStatus(0)


def ended_by_signal(number: int, folder: Path) -> ExitStatus:
    """Return how a run ended after signal `number` was sent to its ranks; report it if they did not save in time."""
    if (detail := summary_of(folder)) and detail["status"] == "running":
        text = f"error: the ranks did not save within {SAVE_SECONDS} s after the signal and were killed"
        print(text, file=sys.stderr)
        mark_failed(folder, f"killed {SAVE_SECONDS} s after a signal, before its state was saved")
        print(how_to_resume(folder), file=sys.stderr)
        return ExitStatus(1)
    return ExitStatus(exit_code(number))


@contextmanager
def passed_on(folder: Path) -> Iterator[None]:
    """Context that forwards SIGUSR1, which torch's agent does not handle, to the ranks of the run in `folder`.

    If the run is not yet training, the signal stops it.
    """
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


def ended_by_failure(error: Any, folder: Path, timeout_seconds: float) -> ExitStatus:
    """Report the first failed rank and its reason on stderr and in the run's summary; return how the run ended."""
    rank, failure = first_failure(error)
    if report_refused(rank, failure):  # an invalid input may be found by any rank first
        return ExitStatus(2)
    if found_unhealthy(error):
        return ExitStatus(1)  # already reported; the folder is unchanged
    known = summary_of(folder)
    known_detail = str(known.get("detail", ""))
    # A rank that waited in vain has already reported the silent rank.
    silence = known_detail if known.get("status") == "failed" and is_silent_text(known_detail) else None
    if failure.exitcode in STOPPED_CODES and known.get("status") == "failed":
        return ExitStatus(1, silence)  # ended by the agent after another rank failed; rank 0 has reported the reason
    if failure.exitcode in STOPPED_CODES:
        return ExitStatus(int(failure.exitcode))  # rank 0 has reported the reason
    if not isinstance(failure.message, dict) and failure.exitcode > 0 and known.get("status") == "failed":
        return ExitStatus(int(failure.exitcode), silence)  # a rank has reported the reason, e.g. a loss not finite
    if all(text.startswith(CallbackFailedError.__name__) for text in (message_of(failure), known_detail)):
        return ExitStatus(1)  # it also failed on rank 0, which has reported it
    detail = failure_line(rank, failure)
    if silent := silent_ranks(folder, timeout_seconds):
        detail = str(summary_of(folder).get("detail", ""))
        if detail.startswith(f"rank {silent[0].rank} ("):
            return ExitStatus(1, detail)  # already reported by a rank that waited
        detail = f"{silent_text(silent, timeout_seconds)}; {detail}"  # NCCL's watchdog ended the ranks before that
    print(f"error: {detail}", file=sys.stderr)
    mark_failed(folder, detail)
    if hint := how_to_resume(folder):
        print(hint, file=sys.stderr)
    return ExitStatus(1, None if message_of(failure).startswith(CallbackFailedError.__name__) else detail)


class Restarts:
    """Restarts of one run: at most `trainer.max_restarts`, and none after a restart that made no progress."""

    def __init__(self, config: Config):
        self.folder, self.most = Path(config.run.dir), config.trainer.max_restarts
        self.made = 0
        self._reached: int | None = None

    def again(self, ended: ExitStatus) -> bool:
        """Decide whether to restart ranks that `ended`; report the decision and record a restart in the summary."""
        if ended.lost is None or self.most == 0:
            return False
        if not (self.folder / "config.yaml").is_file():
            return False  # it failed before it began, and would fail again
        reached = last_step(self.folder)
        if self.made == self.most:
            return _no_restart(f"no restart: trainer.max_restarts={self.most} is used up")
        if self._reached is not None and reached <= self._reached:
            return _no_restart(f"no restart: the previous restart did not get beyond step {self._reached}")
        self.made, self._reached = self.made + 1, reached
        summary = summary_of(self.folder)
        event = {"lost": ended.lost, "reached_step": reached, "time": round(time.time(), 3)}
        write_json(self.folder / "summary.json", {**summary, RESTARTS: [*summary.get(RESTARTS, []), event]})
        text = f"note   restart {self.made} of at most {self.most}, from the newest intact checkpoint"
        print(text, file=sys.stderr, flush=True)
        return True


def _no_restart(text: str) -> bool:
    print(text, file=sys.stderr, flush=True)
    return False


def last_step(folder: Path) -> int:
    """Return the last step in the run's metrics, 0 if there is none."""
    try:
        return max((int(record["step"]) for record in read_records(folder / "metrics.jsonl")), default=0)
    except (OSError, ValueError):
        return 0


def is_started_again() -> bool:
    """Return whether torchrun or Slurm has restarted this process."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in RESTART_COUNTS)


def with_auto_resume(config: Config) -> Config:
    """Return `config` with resume=auto, so that a restarted run continues from its newest checkpoint."""
    return config if config.resume == "auto" else config.model_copy(update={"resume": "auto"})
