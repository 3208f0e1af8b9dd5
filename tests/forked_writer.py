"""The process that writes to MLflow, forked from one that has imported MLflow: 3 CPU seconds less than a new one.

The command itself is run by tests/tracking/mlflow/test_mlflow.py and tests/security/test_secrets.py.
"""

import os
import subprocess
import sys
from multiprocessing.reduction import DupFd
from types import SimpleNamespace
from typing import Any

from tests.parallel.rank_group import forkserver

MODULE = "lightning_llm.tracking.mlflow.writer"


def start_writer(command: list[str], **how: Any) -> Any:
    """Be `subprocess.Popen` for `tracking.mlflow.tracker`; a command that is not the writer's runs as it is."""
    return ForkedWriter(how["cwd"], how["env"]) if command[-1] == MODULE else subprocess.Popen(command, **how)


forked_writers: Any = SimpleNamespace(Popen=start_writer, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
"""The part of `subprocess` that `tracking.mlflow.tracker` uses."""


class ForkedWriter:
    """The part of `subprocess.Popen(..., stdin=PIPE, stdout=PIPE, stderr=STDOUT, bufsize=0)` that the tracker uses."""

    def __init__(self, folder: Any, environment: dict[str, str]):
        inbox, told = os.pipe()
        heard, said = os.pipe()
        self._process = forkserver.Process(target=_write, args=(DupFd(inbox), DupFd(said), str(folder), environment))
        self._process.start()
        os.close(inbox)
        os.close(said)
        self.stdin, self.stdout = os.fdopen(told, "wb", buffering=0), os.fdopen(heard, "rb", buffering=0)

    @property
    def pid(self) -> int:
        return int(self._process.pid or 0)

    def poll(self) -> int | None:
        self._process.join(0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        self._process.join()
        return int(self._process.exitcode or 0)


def _write(inbox: Any, said: Any, folder: str, environment: dict[str, str]) -> None:
    os.setsid()
    for number, stream in ((0, inbox), (1, said)):
        os.dup2(stream.detach(), number)
    os.dup2(1, 2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  (of this process, to its end)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    from lightning_llm.tracking.mlflow import writer

    writer.main()
