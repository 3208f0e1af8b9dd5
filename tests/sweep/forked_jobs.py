"""Jobs of a sweep that train in processes forked from one that has imported all, in place of new interpreters."""

import os
import sys
from functools import partialmethod
from multiprocessing.reduction import DupFd
from typing import Any

from lightning_llm.__main__ import main
from lightning_llm.base.process import python_module
from lightning_llm.tracking.mlflow import tracker
from lightning_llm.tracking.mlflow.tracker import MLflowTracker
from lightning_llm.train import run_folder
from tests.forked_writer import forked_writers
from tests.parallel.rank_group import forkserver, server_address, use_server

START = python_module("lightning_llm")


class ForkedJob:
    """The part of `subprocess.Popen` that `sweep.launchers` uses, for a command `lightning-llm WORDS`."""

    def __init__(self, command: list[str], process_group: int, env: dict[str, str], stdout: Any, stderr: Any):
        assert command[: len(START)] == START
        assert process_group == 0
        streams = [DupFd(number if file is None else file.fileno()) for number, file in ((1, stdout), (2, stderr))]
        arguments = command[len(START) :], env, streams, server_address()
        self.process = forkserver.Process(target=_run, args=arguments)
        self.process.start()

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait(self) -> int:
        self.process.join()
        return int(self.process.exitcode)


def _run(words: list[str], environment: dict[str, str], streams: list[Any], address: str) -> None:
    os.setpgid(0, 0)
    for number, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream.detach(), number)
    sys.stdout.reconfigure(line_buffering=True)  # a reader waits for lines
    use_server(address)
    tracker.subprocess = forked_writers
    os.environ.clear()
    os.environ.update(environment)
    run_folder.draw_losses = lambda *_: None  # 0.2 CPU seconds of each run, and looked at elsewhere
    patient: Any = partialmethod(MLflowTracker.__init__, close_seconds=120.0)  # its writer is nice to other tests
    MLflowTracker.__init__ = patient
    sys.exit(main(words))
