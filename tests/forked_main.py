"""`lightning-llm WORDS` in a process forked from one that has imported all: 7 CPU seconds less than a new interpreter.

What a new interpreter alone shows (`python -m lightning_llm`, its imports) is shown in
tests/run/launch/test_ranks.py.
"""

import os
import subprocess

from lightning_llm.base.process import python_module
from tests.sweep.forked_jobs import ForkedJob


class ForkedMain:
    """The part of `subprocess.Popen(..., stdout=PIPE, stderr=PIPE, text=True)` that tests use; its exit waits."""

    def __init__(self, words: list[str], **environment: str):
        (out, told), (error, complained) = os.pipe(), os.pipe()
        self.stdout, self._stderr = os.fdopen(out), os.fdopen(error)
        with os.fdopen(told, "w") as stdout, os.fdopen(complained, "w") as stderr:
            command = python_module("lightning_llm", *words)
            self._job = ForkedJob(command, 0, os.environ | environment, stdout, stderr)
        self.returncode: int | None = None

    def __enter__(self) -> "ForkedMain":
        return self

    def __exit__(self, *_: object) -> None:
        self.communicate()

    def send_signal(self, number: int) -> None:
        self._job.send_signal(number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end, at most `timeout` seconds; return the rest of stdout, and stderr: less than a pipe takes.

        Raises:
            subprocess.TimeoutExpired: it has not ended, and was killed.
        """
        if self.returncode is not None:
            return "", ""
        self._job.process.join(timeout)
        if self._job.process.exitcode is None:
            self._job.process.kill()
            raise subprocess.TimeoutExpired("lightning-llm", timeout or 0)
        self.returncode = int(self._job.process.exitcode)
        with self.stdout, self._stderr:
            return self.stdout.read(), self._stderr.read()
