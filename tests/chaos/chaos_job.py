"""A command of a campaign: `lightning-llm WORDS`, with all processes forked from one that has imported everything.

They are separate processes with their own signals, files and sockets; only the interpreter's start is shared.
With `real` they are started as a user starts them, so that a launcher that is killed is its ranks' parent.
"""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from lightning_llm.tracking.files import summary_of
from lightning_llm.tracking.rank_liveness import beats
from tests.forked_writer import forked_writers
from tests.parallel.rank_group import forkserver, server_address, use_server
from tests.run.launch.forked_rank import ForkedRank

NO_BYTES = (1, 1)
"""A file may have one byte from now on: to a write it is as if the disk were full (EFBIG in place of ENOSPC)."""


class ChaosJob:
    """One start of the command in its own process group; `log` receives its output."""

    def __init__(self, words: list[str], log: Path, environment: dict[str, str], real: bool):
        self.run, self.log, self.seen = Path(_value(words, "run.dir")), log, set[int]()
        self._process: Any
        if real:
            with log.open("ab") as file:
                command = [sys.executable, "-m", "lightning_llm", *words]
                whole = os.environ | environment
                self._process = subprocess.Popen(command, env=whole, stdout=file, stderr=file, start_new_session=True)
        else:
            arguments = words, str(log), environment, server_address()
            self._process = forkserver.Process(target=_serve, args=arguments)
            self._process.start()
        self.pid = int(self._process.pid)
        self.seen.add(self.pid)

    @property
    def code(self) -> int | None:
        """The exit code, None while it runs."""
        if isinstance(self._process, subprocess.Popen):
            return self._process.poll()
        return self._process.exitcode

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, None where it has not ended in time."""
        try:
            if isinstance(self._process, subprocess.Popen):
                return self._process.wait(seconds)
            self._process.join(seconds)
        except subprocess.TimeoutExpired:
            return None
        return self.code

    def ranks(self) -> list[int]:
        """Return the processes that train, as far as they have reported it."""
        said = [each.process for each in beats(self.run)] or [str(summary_of(self.run).get("process", ""))]
        found = [int(each.split()[1]) for each in said if each]
        alive = [number for number in found if psutil.pid_exists(number)] or [self.pid]
        self.seen.update(alive)
        return alive

    def fill_disk(self) -> None:
        """Let no process of the run write any more."""
        for number in {self.pid, *self.ranks()}:
            resource.prlimit(number, resource.RLIMIT_FSIZE, NO_BYTES)

    def left(self) -> list[int]:
        """Return the processes that were seen and live on; they are ended."""
        alive = [number for number in self.seen if _is_alive(number)]
        for number in alive:
            os.kill(number, signal.SIGKILL)
        return alive


def _is_alive(number: int) -> bool:
    try:
        return bool(psutil.Process(number).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _value(words: list[str], key: str) -> str:
    return next(word.partition("=")[2] for word in reversed(words) if word.startswith(f"{key}="))


def _serve(words: list[str], log: str, environment: dict[str, str], address: str) -> None:
    from lightning_llm.__main__ import main
    from lightning_llm.tracking.mlflow import tracker
    from lightning_llm.train import run_folder

    os.setsid()
    use_server(address)
    tracker.subprocess = forked_writers
    with open(log, "ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.update(environment)
    run_folder.draw_losses = lambda *_: None
    popen: Any = lambda handler, command, env: ForkedRank(list(command), 0, env, None, None)  # noqa: E731
    SubprocessHandler._popen = popen
    sys.exit(main(words))
