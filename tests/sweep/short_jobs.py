"""Jobs of a sweep with processes of half a second instead of training."""

import sys
from pathlib import Path

import pytest

from lightning_llm.base.process import python_module
from lightning_llm.config.sweep_space import compose_sweep
from lightning_llm.sweep import launchers as local
from lightning_llm.tracking.sweep_definition import Job, Sweep, define

CHILD = """
import json, pathlib, sys, time, yaml
config = yaml.safe_load(open(sys.argv[1]))
folder = pathlib.Path(config["run"]["dir"]); folder.mkdir()
(folder / "began").write_text(str(time.monotonic()))
time.sleep(0.5)
(folder / "ended").write_text(str(time.monotonic()))
print("spoke", config["resume"])
status = "failed" if config["seed"] == 2 else "finished"
(folder / "summary.json").write_text(json.dumps({"status": status}))
sys.exit(status == "failed")
"""

MEETING_CHILD = CHILD.replace(
    "time.sleep(0.5)",
    """deadline = time.monotonic() + 60
while len(list(folder.parent.glob("*/began"))) < 2 and time.monotonic() < deadline:
    time.sleep(0.02)
time.sleep(0.5)""",
)
"""One that stays until another has begun, however long a busy machine takes to start it."""


def sweep_of(tmp_path: Path, *words: str, name: str | None = None) -> Sweep:
    return define(compose_sweep([f"run.root={tmp_path}", *words]), name)


def times(job: Job) -> tuple[float, float]:
    return float((job.folder / "began").read_text()), float((job.folder / "ended").read_text())


def start_short_jobs(monkeypatch: pytest.MonkeyPatch, child: str = CHILD) -> None:
    """Let jobs run `child`, by default one that fails for seed 2."""
    real = local.job_command

    def command(job: Job) -> tuple[list[str], Path]:
        words, file = real(job)
        assert words[:5] == python_module("lightning_llm", "train")
        return [sys.executable, "-c", child, str(file)], file

    monkeypatch.setattr(local, "job_command", command)
    monkeypatch.setattr("lightning_llm.sweep.launchers.job_command", command)
