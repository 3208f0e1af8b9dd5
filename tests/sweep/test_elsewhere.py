"""Jobs that the process of a killed start still trains: neither run twice nor counted as failed, and awaited."""

import json
import platform
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from filelock import FileLock

from lightning_llm.__main__ import main
from lightning_llm.config.sweep_space import compose_sweep
from lightning_llm.run.launch.lock import lock_run
from lightning_llm.sweep import progress as elsewhere
from lightning_llm.sweep import running_jobs as watch
from lightning_llm.tracking.sweep_definition import Job, define
from lightning_llm.tracking.sweep_file import LOCKS
from tests.sweep.made_jobs import MadeJob, make_jobs


def words(folder: Path, *more: str) -> list[str]:
    return [
        "-m", "model=llama_tiny", "data=python", "precision=bf16,fp8_current", "seed=0,1", "trainer.max_steps=20",
        "trainer.validate_every_steps=10", "schedule.warmup_steps=2", "callbacks=none", "logger=none",
        f"run.root={folder}", "run.name=killed", *more,
    ]  # fmt: skip


def loss(config: dict[str, Any], step: int) -> float:
    return 4 - step / 20 + 0.1 * config["seed"] + (0.5 if config["precision"]["name"] != "bf16" else 0.0)


@pytest.fixture(autouse=True)
def often_looked_at(undrawn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SECONDS", 0.05)
    monkeypatch.setattr(elsewhere, "AWAITED_EVERY_SECONDS", 0.05)


@pytest.fixture
def orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., type[MadeJob]]:
    """Make the process of job 0, as a killed start leaves it: it holds the run's lock, and ends when it is awaited."""

    def left_behind(*more: str) -> type[MadeJob]:
        kind = make_jobs(monkeypatch, loss)
        job = first_job(tmp_path, *more)
        lock = lock_run(job.folder)

        def sleep(seconds: float) -> None:
            if not lock.is_locked:
                return
            file = tmp_path / "orphan.yaml"
            file.write_text(yaml.safe_dump(job.config.model_dump(mode="json")))
            kind(["--config", str(file)]).wait()
            kind.started.pop()
            lock.release()

        monkeypatch.setattr(elsewhere, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
        return kind

    return left_behind


def first_job(folder: Path, *more: str) -> Job:
    words_of_sweep = [word for word in words(folder, *more)[1:] if not word.startswith("sweep.")]
    return define(compose_sweep(words_of_sweep), "killed").jobs[0]


def where(configs: list[dict[str, Any]]) -> list[str]:
    return sorted(Path(config["run"]["dir"]).name for config in configs)


def test_a_sweep_skips_a_running_job_and_reports_it(tmp_path, orphan, capsys):
    kind = orphan()
    assert main(["train", *words(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert where(kind.started) == ["1", "2", "3"]
    assert "job    0 precision=bf16 seed=0: running, skipped" in told
    assert "3 of 4 jobs finished, 1 running elsewhere" in told


def test_a_stale_summary_does_not_make_a_job_failed(tmp_path, orphan, capsys):
    orphan()
    assert main(["train", *words(tmp_path)]) == 0
    folder = tmp_path / "default" / "killed" / "0"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({"status": "failed", "detail": "of an earlier attempt"}))
    shutil.rmtree(folder.parent / "3")  # something is left to do
    capsys.readouterr()
    assert main(["train", *words(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "3 of 4 jobs finished, 1 running elsewhere" in told.out
    assert "failed in another start" not in told.err


def left_behind(folder: Path, script: str) -> subprocess.Popen:
    """Have a process, by the folder's summary, train the job there: `script` of bash, which ends with its summary."""
    process = subprocess.Popen(["bash", "-c", script], cwd=folder)
    started = psutil.Process(process.pid).create_time()
    (folder / "stopped.json").write_text(json.dumps({"status": "stopped"}))
    (folder / "own.json").write_text((folder / "summary.json").read_text())
    summary = {"status": "running", "process": f"{platform.node()} {process.pid} {started:.0f}"}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "begin").touch()
    return process


BEGINS = "until [ -e begin ]; do sleep 0.02; done; "
SAVES = "trap 'sleep 0.5; cp stopped.json summary.json; exit 143' TERM; " + BEGINS + "while :; do sleep 0.02; done"


def test_a_halving_stops_what_it_ends_and_another_start_trains(tmp_path, monkeypatch, capsys):
    """Both jobs of a recipe are ended at the rung: one is a process of this machine, the other of a distant one."""
    make_jobs(monkeypatch, loss)
    asked = words(tmp_path, "sweep.search=halving", "sweep.rungs=[0.5]")
    assert main(["train", *asked]) == 0
    near, far = (tmp_path / "default" / "killed" / number for number in ("2", "3"))
    process = left_behind(near, SAVES)
    (far / "summary.json").write_text(json.dumps({"status": "running", "process": "distant 7 0"}))
    assert main(["train", *asked]) == 0
    assert process.poll() == 128 + signal.SIGTERM  # the process was awaited, not only signaled
    told = capsys.readouterr()
    assert "ended  job 2, which another start runs or left behind: asked to stop" in told.out
    assert "waits for job 2, which another start runs or left behind: it saves and stops" in told.out
    assert f"job 3 is ended, but process 7 of the machine distant trains it in {far}" in told.err
    assert "2 of 4 jobs finished, 2 stopped by the search, 1 running elsewhere" in told.out


@pytest.mark.parametrize(
    "more",
    [
        ("sweep.until=decided", "sweep.looks=[2]", "sweep.max_seeds=2"),
        ("sweep.search=halving", "sweep.rungs=[0.5]"),
    ],
)
def test_a_process_left_by_a_killed_start_is_awaited(more, tmp_path, monkeypatch, capsys):
    kind = make_jobs(monkeypatch, loss)
    assert main(["train", *words(tmp_path, *more)]) == 0
    folder, started = tmp_path / "default" / "killed" / "0", len(kind.started)
    metrics = folder / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text("".join(whole.splitlines(keepends=True)[:5]))  # before the rung
    (folder / "whole").write_text(whole)

    def sleep(seconds: float) -> None:
        (folder / "awaited").touch()
        time.sleep(seconds)

    monkeypatch.setattr(elsewhere, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    ends = "until [ -e awaited ]; do sleep 0.02; done; cp whole metrics.jsonl; cp own.json summary.json"
    process = left_behind(folder, BEGINS + ends)
    assert main(["train", *words(tmp_path, *more)]) == 0
    assert process.wait(60) == 0
    told = capsys.readouterr().out.partition("jobs finished")[2]
    assert "waits for job 0, which another start runs or left behind" in told
    assert len(kind.started) == started
    assert ("look   " if "decided" in more[0] else "rung 1 of 1") in told.partition("waits for job 0")[2]


def test_a_faster_process_in_the_folder_is_no_failure(tmp_path, monkeypatch, capsys):
    kind = make_jobs(monkeypatch, loss)
    job, held = first_job(tmp_path), []
    ends = kind.wait

    def wait(self: MadeJob) -> int:
        if Path(self.config["run"]["dir"]) != job.folder:
            return ends(self)
        if not held:
            held.append(FileLock(job.folder.parent / LOCKS / "0.run", thread_local=False))
            held[0].acquire()  # as the other process does
        return 2

    monkeypatch.setattr(kind, "wait", wait)
    assert main(["train", *words(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "0 precision=bf16 seed=0: runs in a process that another start left behind, skipped" in told.out
    assert "3 of 4 jobs finished, 1 running elsewhere" in told.out
    assert "exit code" not in told.out + told.err
    held[0].release()
    assert main(["train", *words(tmp_path)]) == 1  # refused, and nobody trains there: a failure


@pytest.mark.parametrize(
    "more",
    [
        ("sweep.until=decided", "sweep.looks=[2]", "sweep.max_seeds=2"),
        ("sweep.search=halving", "sweep.rungs=[0.5]"),
        ("sweep.search=optuna", "sweep.trials=1", "sweep.sampler=random"),
    ],
)
def test_a_search_waits_for_jobs_it_needs(more, tmp_path, orphan, capsys):
    if "sweep.search=optuna" in more:
        pytest.importorskip("optuna")
    kind = orphan()
    assert main(["train", *words(tmp_path, *more)]) == 0
    told = capsys.readouterr().out
    assert "waits for job 0, which another start runs or left behind" in told
    assert where(kind.started) == ["1", "2", "3"]
    assert where(kind.ended).count("0") == 1
    if "sweep.until=decided" in more:
        assert "look   " in told
        assert "4 of 4 jobs finished" in told
    about = json.loads((tmp_path / "default" / "killed" / "sweep.json").read_text())
    assert len(about["jobs"]) == 4


def test_a_wait_names_a_job_of_two_trials_once(tmp_path, monkeypatch, capsys):
    job = first_job(tmp_path)
    lock = lock_run(job.folder)
    monkeypatch.setattr(
        elsewhere, "time", SimpleNamespace(sleep=lambda seconds: lock.release(), monotonic=time.monotonic)
    )
    assert elsewhere.await_elsewhere([job, job], elsewhere.Relay(), "for a test")
    assert "waits for job 0, which" in capsys.readouterr().out


def test_a_wait_ends_with_a_signal(tmp_path, monkeypatch):
    job = first_job(tmp_path)
    lock = lock_run(job.folder)
    relay = elsewhere.Relay()
    monkeypatch.setattr(elsewhere, "time", SimpleNamespace(sleep=lambda seconds: relay(15, None)))
    assert not elsewhere.await_elsewhere([job], relay, "for a test")
    lock.release()
    assert not elsewhere.await_elsewhere([job], elsewhere.Relay(), "for a test")


def test_a_wait_says_after_a_while_which_process_to_end(tmp_path, monkeypatch, capsys):
    job, told = first_job(tmp_path), []
    process = subprocess.Popen(["bash", "-c", "trap '' TERM; for i in {1..300}; do sleep 0.1; done"])
    mark = f"{platform.node()} {process.pid} {psutil.Process(process.pid).create_time():.0f}"
    job.folder.mkdir(parents=True)
    (job.folder / "summary.json").write_text(json.dumps({"status": "running", "process": mark}))

    def sleep(seconds: float) -> None:
        told.append(capsys.readouterr().err)
        if len(told) == 6:
            subprocess.run(shlex.split("".join(told).partition("end it: ")[2]), check=True)
            process.wait()

    monkeypatch.setattr(elsewhere, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    monkeypatch.setattr(elsewhere, "NAMED_AFTER_SECONDS", 2.5 * elsewhere.AWAITED_EVERY_SECONDS)
    assert elsewhere.await_elsewhere([job, job], elsewhere.Relay(), "for a test")
    assert process.returncode == -signal.SIGKILL
    assert [each.count(f"job 0 is still trained by process {process.pid} of this machine") for each in told] == [
        0, 0, 0, 1, 0, 0,
    ]  # fmt: skip


def test_a_wait_for_another_machine_names_it(tmp_path, monkeypatch, capsys):
    job, relay = first_job(tmp_path), elsewhere.Relay()
    job.folder.mkdir(parents=True)
    (job.folder / "summary.json").write_text(json.dumps({"status": "running", "process": "distant 7 0"}))
    monkeypatch.setattr(elsewhere, "time", SimpleNamespace(sleep=lambda seconds: relay(15, None)))
    monkeypatch.setattr(elsewhere, "NAMED_AFTER_SECONDS", 0.0)
    assert not elsewhere.await_elsewhere([job], relay, "for a test")
    told = capsys.readouterr().err
    assert f"process 7 of the machine distant, in {job.folder}" in told
    assert told.endswith("end it there\n")


def test_the_printed_command_starts_a_job_that_never_began(tmp_path, monkeypatch, capsys):
    kind = make_jobs(monkeypatch, loss)

    class KilledError(BaseException):
        """The end of the sweep's process."""

    def dies(config: dict[str, Any]) -> bool:
        if len(kind.ended) == 3:
            raise KilledError
        return False

    kind.dies = staticmethod(dies)
    with pytest.raises(KilledError):
        main(["train", *words(tmp_path)])
    folder = tmp_path / "default" / "killed"
    shutil.rmtree(folder / "3")  # the fourth had not come so far
    assert main(["compare", str(folder)]) == 2
    told = capsys.readouterr().err
    (line,) = (line for line in told.splitlines() if "not started" in line)
    program, *command = shlex.split(line.partition("Left out; ")[2].removesuffix(" starts it."))
    assert program.endswith("lightning-llm")
    begun = make_jobs(monkeypatch, loss)
    assert main(command) == 0
    assert where(begun.started) == ["3"]
    assert main(["compare", str(folder)]) == 0
