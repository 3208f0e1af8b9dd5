"""The state of a job according to its folder and its process, and the processes that may run it."""

import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.yaml_file import write_config
from lightning_llm.run.resume.start import Start, decide_start
from lightning_llm.sweep.ending import close, close_again
from lightning_llm.sweep.progress import Outcome, allow_open_files, locked
from lightning_llm.tracking import run_state as heartbeat
from lightning_llm.tracking.files import write_json
from lightning_llm.tracking.provenance import has_ended, process_mark
from lightning_llm.tracking.reading import read_run
from lightning_llm.tracking.run_state import detail_of, settled_state, state_of
from lightning_llm.tracking.sweep_definition import Job, write_sweep
from tests.sweep.short_jobs import sweep_of


def test_reused_process_ids_are_detected() -> None:
    mine = process_mark()
    host, number, started = mine.split()
    assert not has_ended(mine)
    assert has_ended(f"{host} {number} {float(started) - 100:.0f}")
    assert not has_ended(f"elsewhere {number} {started}")  # nobody here can tell
    assert not has_ended("")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        mark = f"{host} {child.pid} {started}"
        child.communicate(b"\n")
    assert has_ended(mark)


def summary(job: Job, status: str, process: str = "") -> None:
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / "summary.json").write_text(json.dumps({"status": status, "process": process, "detail": ""}))


def test_a_run_whose_process_died_is_stopped(tmp_path: Path) -> None:
    job = sweep_of(tmp_path, "seed=0").jobs[0]
    assert state_of(job.folder) == "new"
    summary(job, "running", process_mark())
    assert state_of(job.folder) == "running"
    host, number, _ = process_mark().split()
    summary(job, "running", f"{host} {number} 1")
    assert state_of(job.folder) == "stopped"
    summary(job, "failed")
    assert state_of(job.folder) == "failed"


@pytest.mark.parametrize("damage", [b"", b'{"status": "fin', b"null", b"\xff\xfe", b'{"begun_at_step": "x"}'])
def test_a_damaged_summary_is_a_stopped_run_that_says_so(damage: bytes, tmp_path: Path) -> None:
    job = sweep_of(tmp_path, "seed=0").jobs[0]
    job.folder.mkdir(parents=True)
    file = job.folder / "summary.json"
    file.write_bytes(damage)
    assert state_of(job.folder) == "stopped"
    assert detail_of(job.folder).startswith(f"{file} is damaged: ")
    write_config(job.config, job.folder / "config.yaml")
    for resume in (None, "auto"):
        with pytest.raises(ConfigError, match=rf"run\.dir: {re.escape(str(file))} is damaged.*remove the file"):
            decide_start(job.config.model_copy(update={"resume": resume}))
    file.unlink()
    assert decide_start(job.config.model_copy(update={"resume": "auto"})) == Start()


def silent(folder: Path, seconds: float) -> None:
    """Let nothing have been heard of the run for `seconds`."""
    for file in folder.iterdir():
        os.utime(file, (time.time() - seconds, time.time() - seconds))


def test_a_run_of_another_machine_is_stopped_once_it_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 100.0)
    job = sweep_of(tmp_path, "seed=0").jobs[0]
    again = job.config.model_copy(update={"resume": "auto"})
    summary(job, "running", "node17 4242 1700000000")
    write_config(job.config, job.folder / "config.yaml")
    silent(job.folder, 90)
    assert state_of(job.folder) == "running"
    with pytest.raises(ConfigError, match="process 4242 of the machine node17 is training in"):
        decide_start(job.config)  # needs a folder without a run

    silent(job.folder, 90)
    sign = threading.Timer(0.7, os.utime, [job.folder / "summary.json"])
    sign.start()
    with pytest.raises(ConfigError, match="process 4242 of the machine node17 is training in"):
        decide_start(again)
    sign.join()
    silent(job.folder, 99)  # as where a killed job is started again on another node, at once
    assert decide_start(again) == Start()
    assert "waiting up to 1 s for its heartbeat" in capsys.readouterr().out
    assert state_of(job.folder) == "stopped"
    silent(job.folder, 1e6)
    summary(job, "running", process_mark())  # on this machine the process id decides, not its silence
    silent(job.folder, 1e6)
    assert state_of(job.folder) == "running"


def test_a_heartbeat_in_the_future_is_awaited_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 0.5)
    job = sweep_of(tmp_path, "seed=0").jobs[0]
    summary(job, "running", "node17 4242 1700000000")
    write_config(job.config, job.folder / "config.yaml")
    (job.folder / "metrics.jsonl").touch()
    silent(job.folder, -86400)  # that machine's clock is a day ahead of this one's
    sign = threading.Timer(0.2, os.utime, [job.folder / "summary.json"])  # it is alive: any change is a sign
    sign.start()
    assert settled_state(job.folder) == "running"
    sign.join()
    assert settled_state(job.folder) == "stopped"
    assert "waiting up to 0 s for its heartbeat" in capsys.readouterr().out
    assert state_of(job.folder) == "stopped"


@pytest.mark.parametrize(
    ("policy", "event", "state"),
    [
        ("stop", "divergence", "diverged"),
        ("stop", "non_finite", "diverged"),
        ("skip", "spike", "diverged"),
        ("stop", "spike", "failed"),
        ("stop", "shift", "failed"),
    ],
)
def test_an_end_by_the_spike_policy_is_what_compare_takes_it_for(
    policy: str, event: str, state: str, tmp_path: Path
) -> None:
    (job,) = sweep_of(tmp_path, f"spikes.policy={policy}").jobs
    job.folder.mkdir(parents=True)
    write_config(job.config, job.folder / "config.yaml")
    records = [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 9.0, "event": event, "event_action": "stop"}]
    (job.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    write_json(job.folder / "summary.json", {"status": "failed", "detail": "SpikeStop: step 2 is out of the ordinary"})
    assert state_of(job.folder) == state
    assert read_run(job.folder).diverged == (state == "diverged")


def test_a_locked_job_is_skipped(tmp_path: Path) -> None:
    job = sweep_of(tmp_path, "seed=0").jobs[0]
    with locked(job) as mine, locked(job) as also:
        assert (mine, also) == (True, False)
    with locked(job) as again:
        assert again


def test_more_claims_than_open_files_are_allowed(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    job = sweep_of(tmp_path, "seed=0").jobs[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (96, before[1]))
    try:
        allow_open_files(200)
        with ExitStack() as locks:
            assert all(locks.enter_context(locked(replace(job, number=number))) for number in range(200))
        with pytest.raises(ConfigError, match="open files, and this machine allows"):
            allow_open_files(before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_sweep_ends_with_the_command_that_judges_it_when_jobs_failed_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = sweep_of(tmp_path, "precision=bf16,mxfp8", "seed=0", "logger=none")
    whole.folder.mkdir(parents=True)
    write_sweep(whole)
    summary(whole.jobs[0], "finished")
    summary(whole.jobs[1], "failed")
    outcomes = [Outcome(whole.jobs[0], 0, 1.0), Outcome(whole.jobs[1], 1, 1.0)]
    for stopped_by, code in ((0, 1), (2, 130)):
        assert close(whole, outcomes, stopped_by) == code
        printed, errors = capsys.readouterr()
        assert str(whole.jobs[1].folder) in errors
        assert printed.splitlines()[-1].endswith(f"lightning-llm compare {whole.folder}")
    close_again(whole)
    assert f"lightning-llm compare {whole.folder}" in capsys.readouterr().out
