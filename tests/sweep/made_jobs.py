"""Jobs that "train" in this process, to losses that a test chooses, in place of runs: `local`'s Popen."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lightning_llm.sweep import launchers as local

Loss = Callable[[dict[str, Any], int], float]
PATIENCE_SECONDS = 20.0
"""Seconds that a job waits at a pause to be stopped before it continues to its end."""


class Killed(BaseException):
    """The end of the sweep's process, which nothing may catch, as `kill -9`."""


class MadeJob:
    """A simulated `lightning-llm train --config FILE` that writes the files of a run, one validation at a time.

    `pauses`: function from a config to the step at which the job waits for a signal, None for no step; at the last
    step nothing is left to stop. `summary`: further entries of its summary.
    """

    made: list["MadeJob"]
    started: list[dict[str, Any]]
    ended: list[dict[str, Any]]
    loss: Loss
    pauses: Callable[[dict[str, Any]], int | None]
    dies: Callable[[dict[str, Any]], bool]
    summary: dict[str, Any] = {}

    def __init__(self, command: list[str], **more: Any):
        self.config = yaml.safe_load(Path(command[command.index("--config") + 1]).read_text())
        type(self).started.append(self.config)
        self.signalled = threading.Event()
        type(self).made.append(self)

    def send_signal(self, number: int) -> None:
        self.signalled.set()

    def wait(self) -> int:
        config, folder = self.config, Path(self.config["run"]["dir"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        if type(self).dies(config):
            return 1
        file = folder / "metrics.jsonl"
        done = len([line for line in file.read_text().splitlines() if "val_loss" in line]) if file.exists() else 0
        every, last = config["trainer"]["validate_every_steps"], config["trainer"]["max_steps"]
        for step in range((done + 1) * every, last + 1, every):
            tokens = step * config["data"]["global_batch_size"] * config["data"]["sequence_length"]
            lines = [{"step": at, "tokens": tokens, "loss": 3.0} for at in range(step - every + 1, step + 1)]
            lines.append({"step": step, "tokens": tokens, "val_loss": type(self).loss(config, step)})
            with file.open("a") as stream:
                stream.write("".join(json.dumps(line) + "\n" for line in lines))
            if type(self).pauses(config) == step and self.signalled.wait(PATIENCE_SECONDS) and step < last:
                return self._end("stopped", 143)
        return self._end("finished", 0)

    def _end(self, status: str, code: int) -> int:
        summary = {"status": status, "versions": {}, "validation_hash": "v", "data_hash": "d", **self.summary}
        (Path(self.config["run"]["dir"]) / "summary.json").write_text(json.dumps(summary))
        type(self).ended.append(self.config)
        return code


def make_jobs(
    monkeypatch: pytest.MonkeyPatch,
    loss: Loss,
    pauses: Callable[[dict[str, Any]], int | None] = lambda config: None,
    dies: Callable[[dict[str, Any]], bool] = lambda config: False,
) -> type[MadeJob]:
    """Let sweeps run such jobs; return their class, which keeps the configs of those that `started` and `ended`."""
    members: dict[str, Any] = {
        "made": [],
        "started": [],
        "ended": [],
        "loss": staticmethod(loss),
        "pauses": staticmethod(pauses),
        "dies": staticmethod(dies),
    }
    kind: type[MadeJob] = type("Made", (MadeJob,), members)
    monkeypatch.setattr(local, "subprocess", SimpleNamespace(Popen=kind))
    return kind


def killed_after(kind: type[MadeJob], jobs: int) -> type[MadeJob]:
    """Have the process that starts jobs of `kind` die as one begins after `jobs` have ended; return `kind`."""

    def dies(_: dict[str, Any]) -> bool:
        if len(kind.ended) >= jobs:
            raise Killed
        return False

    kind.dies = staticmethod(dies)
    return kind
