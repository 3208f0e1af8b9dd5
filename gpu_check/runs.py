"""Runs of `lightning-llm train` in separate processes, and their results."""

import contextlib
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_check.checks import Call
from gpu_check.journal import Clock, OutOfTimeError

POLL_SECONDS = 0.2
ROOT = Path(__file__).resolve().parents[1]


def words(folder: Path, name: str, sequences: int, length: int, steps: int, *more: str) -> list[str]:
    """Return the overrides of a run that trains on bytes of Python's own files and writes only into `folder`."""
    return [
        "data=python", "data.tokenizer.kind=bytes", f"data.sequence_length={length}",
        f"data.micro_batch_size={sequences}", f"data.global_batch_size={sequences}", f"trainer.max_steps={steps}",
        "trainer.validate_every_steps=null", "data.validation.sequences=32", "checkpoint.every_steps=null",
        "checkpoint.keep_last=1", "logger=none", "callbacks.sample=null", "callbacks.memory.every_steps=1",
        f"run.root={folder}", f"run.dir={folder / name}", f"data.cache_dir={folder / 'cache'}", *more,
    ]  # fmt: skip


class Run:
    """A run of `lightning-llm train` in a process, started by the constructor."""

    def __init__(self, folder: Path, overrides: list[str]):
        self.folder = folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._said = folder.with_suffix(".log")
        command = [sys.executable, "-m", "lightning_llm", "train", *overrides]
        with self._said.open("w") as said:  # not a pipe: a full one would block the run
            self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said, stderr=said)

    def finish(self, clock: Clock, steps: int | None = None) -> None:
        """Wait for the end of the run. With `steps`, kill it after that many steps, before it writes its checkpoint.

        Raises:
            RunError: it failed.
            OutOfTimeError: the time was up, and it was ended.
        """
        while self._process.poll() is None:
            if steps is not None and len(self.records()) >= steps:
                self._end()
                return
            if not clock.left:
                self._end()
                raise OutOfTimeError(f"out of time after {len(self.records())} steps")
            time.sleep(POLL_SECONDS)
        if self._process.returncode:
            said = self._said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            print(*said, sep="\n", file=sys.stderr)  # to the log file next to the rows
            raise RunError(f"exit code {self._process.returncode}: {(said or ['without a word'])[-1]}")

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    def records(self) -> list[dict[str, Any]]:
        """Return the metrics of each step so far, from metrics.jsonl."""
        return [record for record in self._lines() if "loss" in record]

    def timed(self) -> list[dict[str, Any]]:
        """Return the metrics of the steps after the timing warm-up."""
        return [record for record in self.records() if not record.get("timing_warmup")]

    def summary(self) -> dict[str, Any]:
        """Return the content of its summary.json."""
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        return found

    def _lines(self) -> list[dict[str, Any]]:
        found = []
        file = self.folder / "metrics.jsonl"
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
            with contextlib.suppress(json.JSONDecodeError):  # the last line of a run that was ended
                found.append(json.loads(line))
        return found


class RunError(Exception):
    """A run failed."""


class SideBySide:
    """Runs of a check that are all started when the first one is requested, because start-up takes most of their time.

    Only runs with missing rows, and those in `needed`, are started.
    """

    def __init__(self, call: Call, check: str, runs: dict[str, tuple[str, list[str]]], needed: tuple[str, ...] = ()):
        self._call, self._check, self._runs, self._needed = call, check, runs, needed
        self._started: dict[str, Run] = {}

    def finished(self, name: str, steps: int | None = None) -> Run:
        """Return the run of that name after its end; the first call starts all runs.

        Raises:
            RunError, OutOfTimeError: see `Run.finish`.
        """
        if not self._started:
            open_names = self._call.journal.unfinished(self._check)
            for each, (folder, overrides) in self._runs.items():
                if each in open_names or each in self._needed:
                    self._started[each] = Run(self._call.scratch / folder, overrides)
        self._started[name].finish(self._call.clock, steps)
        return self._started[name]


def printed(*verb: str) -> dict[str, Any]:
    """Run a verb of `lightning-llm` with --json in this process and return its output as data.

    Raises:
        RunError: its exit code is not 0.
    """
    from lightning_llm.__main__ import main

    said, problem = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(problem):
        code = main([*verb])
    if code:
        last = (problem.getvalue().strip().splitlines() or ["without a word"])[-1]
        raise RunError(f"{verb[0]} returned {code}: {last}")
    found: dict[str, Any] = json.loads(said.getvalue())
    return found
