"""Jobs as processes on this machine: how many at a time, on which devices, and which of them again."""

import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_llm.__main__ import main
from lightning_llm.cli import train as train_verb
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.config.sweep_space import compose_sweep
from lightning_llm.sweep import ending, launchers
from lightning_llm.sweep import jobs as sweep_jobs
from lightning_llm.sweep.launchers import DevicePool, Relay, cuda_devices, run_here
from lightning_llm.sweep.progress import Progress, duration
from lightning_llm.tracking.run_state import state_of
from lightning_llm.tracking.sweep_definition import Job, define
from tests.sweep.made_jobs import Killed, make_jobs
from tests.sweep.short_jobs import CHILD, MEETING_CHILD, start_short_jobs, sweep_of, times


def test_two_at_a_time_are_two_and_never_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_short_jobs(monkeypatch, MEETING_CHILD)
    jobs = sweep_of(tmp_path, "seed=0,1,2,3").jobs
    progress = Progress(len(jobs))
    run_here(jobs, 2, Relay(), progress)
    assert {each.job.number: each.code for each in progress.outcomes} == {0: 0, 1: 0, 2: 1, 3: 0}
    began = [times(job)[0] for job in jobs]
    most = max(sum(times(job)[0] <= moment < times(job)[1] for job in jobs) for moment in began)
    assert most == 2
    assert (jobs[0].folder.parent / "logs" / "0.log").read_text() == "spoke auto\n"
    assert sorted(path.name for path in jobs[0].folder.parent.iterdir()) == [".claims", "0", "1", "2", "3", "logs"]


def test_a_signal_is_reported_at_once_and_its_jobs_are_stopped_and_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    sweep, relay, begun = sweep_of(tmp_path, "logger=none", "seed=0,1,2"), Relay(), threading.Barrier(2)

    def interrupted(job: Job, *_: Any) -> int:
        begun.wait(timeout=60)
        relay(signal.SIGINT, None)
        time.sleep(0.3)
        return 130

    monkeypatch.setattr(launchers, "_run", interrupted)
    progress = Progress(3)
    run_here(sweep.jobs, 2, relay, progress)
    assert ending.close(sweep, progress.outcomes, relay.received) == 130
    told = capsys.readouterr()
    assert told.err.startswith("SIGINT: running jobs stop after their step, which is saved")
    assert "stopped in job 0, 1; 3 of 3 jobs are left; to resume: " in told.err
    assert told.out.count(": stopped after ") == 2
    assert not re.search("exit code|left$", told.out, re.MULTILINE)


@pytest.mark.usefixtures("short_children")
def test_two_starts_of_one_sweep_share_its_jobs(tmp_path: Path) -> None:
    jobs = sweep_of(tmp_path, "seed=0,1,3").jobs
    both = [Progress(len(jobs)), Progress(len(jobs))]
    threads = [threading.Thread(target=run_here, args=(jobs, 1, Relay(), each)) for each in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = [outcome.job.number for each in both for outcome in each.outcomes]
    assert sorted(done) == [0, 1, 2]  # the folder of a job that ran twice would be there already


def test_two_starts_of_one_sweep_make_one_parent_and_see_each_others_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    composed = compose_sweep([f"run.root={tmp_path}", "seed=0,1"])
    made: list[str] = []

    def slow_parent(job: dict[str, Any]) -> tuple[str, str]:
        time.sleep(0.2)
        if not job["run_id"]:
            made.append(f"parent{len(made)}")
        return job["run_id"] or made[-1], ""

    monkeypatch.setattr(train_verb, "checked_jobs", lambda arguments: (composed, None, None))  # Hydra is of one thread
    monkeypatch.setattr(train_verb, "read_sweep_keys", lambda *_: SweepConfig())
    typed = SimpleNamespace(overrides=[], config_dir=None)
    monkeypatch.setattr(train_verb, "signals_passed_on", lambda: nullcontext(Relay()))
    monkeypatch.setattr(sweep_jobs, "run_here", lambda *_: None)
    monkeypatch.setattr(ending, "catch_up", lambda folders: "")
    for module in (sweep_jobs, ending):
        monkeypatch.setattr(module, "write_parent", slow_parent)
    with ThreadPoolExecutor(2) as pool:
        assert [start.result() for start in [pool.submit(train_verb.sweep, typed) for _ in range(2)]] == [0, 0]
    assert made == ["parent0"]
    whole = define(composed, None)
    assert whole.parent_run_id == "parent0"
    whole.jobs[0].folder.mkdir()
    (whole.jobs[0].folder / "summary.json").write_text('{"status": "failed", "detail": "OSError: full"}')
    monkeypatch.setattr(sweep_jobs, "settled_state", lambda folder: "running")  # as if another start ran them
    assert train_verb.sweep(typed) == 0  # nothing to do here
    monkeypatch.setattr(sweep_jobs, "settled_state", state_of)
    assert train_verb.sweep(typed) == 1
    assert "failed in another start" in capsys.readouterr().err


ENDINGS = """
import json, pathlib, sys, yaml
config = yaml.safe_load(open(sys.argv[1]))
folder = pathlib.Path(config["run"]["dir"]); folder.mkdir(exist_ok=True)
with (folder / "starts").open("a") as file: file.write("x")
detail = {1: "NonFiniteError: the loss of step 3 is nan.", 2: "OSError: No space left on device"}.get(config["seed"])
(folder / "summary.json").write_text(json.dumps({"status": "failed" if detail else "finished", "detail": detail}))
sys.exit(detail is not None)
"""


def test_a_crashed_job_is_run_again_and_a_diverged_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_short_jobs(monkeypatch, ENDINGS)
    handed_in: list[dict[str, Any]] = []
    for module in (sweep_jobs, ending):
        monkeypatch.setattr(module, "write_parent", lambda job: handed_in.append(job) or ("parent", ""))
    words = ["train", "-m", f"run.root={tmp_path}", "logger=mlflow", "run.name=all"]
    assert [main([*words, "seed=0,1,2"]) for _ in range(2)] == [1, 1]
    folder = tmp_path / "default" / "all"
    assert [(folder / str(number) / "starts").read_text() for number in range(3)] == ["x", "x", "xx"]
    assert [job["status"] for job in handed_in] == [None, "FAILED", None, "FAILED"]  # as it begins and as it ends
    assert handed_in[-1]["metrics"] == {"jobs/finished": 1, "jobs/diverged": 1, "jobs/failed": 1, "jobs/total": 3}
    assert main([*words, "seed=0,1,3"]) == 0
    assert handed_in[-1]["status"] == "FINISHED"


def test_a_sweep_uploads_runs_of_a_killed_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its jobs ended without their last words to MLflow, and the sweep itself before its end."""
    kind = make_jobs(monkeypatch, lambda config, step: 3.0)
    kind.summary = {"mlflow": {"synced": False}}
    handed_in: list[list[str]] = []
    told: list[dict[str, Any]] = []
    for module in (sweep_jobs, ending):
        monkeypatch.setattr(module, "write_parent", lambda job: told.append(job) or ("parent", ""))
    monkeypatch.setattr(ending, "catch_up", lambda folders: handed_in.append([each.name for each in folders]) or "")
    small = ["model=llama_tiny", "data=python", "trainer.max_steps=20", "trainer.validate_every_steps=10"]
    words = ["train", "-m", *small, f"run.root={tmp_path}", "logger=mlflow", "run.name=all", "callbacks=none"]
    with monkeypatch.context() as patch:
        patch.setattr(train_verb, "close", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            main([*words, "seed=0,1"])
    assert not handed_in
    for _ in range(2):  # only this is left to do; the end is reported once
        assert main([*words, "seed=0,1"]) == 0
    assert [job["status"] for job in told] == [None, "FINISHED"]
    assert told[-1]["metrics"] == {"jobs/finished": 2, "jobs/diverged": 0, "jobs/failed": 0, "jobs/total": 2}
    assert main([*words, "seed=2"]) == 0
    assert main([*words, "seed=2"]) == 0
    assert handed_in == [["0", "1"]] * 2 + [["0", "1", "2"]] * 2


@pytest.mark.usefixtures("short_children")
def test_jobs_for_other_hardware_are_told_what_they_run_on(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = [f"run.root={tmp_path}", "precision=mxfp8", "logger=none", "hardware=null,b200", "trainer.accelerator=cpu"]
    assert main(["train", "-m", *words]) == 0
    out = capsys.readouterr().out
    assert out.count("note   hardware=b200 is for `plan`: casts run as this machine's device (cpu) allows\n") == 1
    assert "2 of 2 jobs finished" in out


def test_jobs_side_by_side_get_devices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = DevicePool(["0", "1", "2", "3"])
    with pool.lent(1) as first, pool.lent(2) as second, pool.lent(1) as third:
        assert (first, second, third) == (["0"], ["1", "2"], ["3"])
        with pool.lent(4) as everything, pool.lent(5) as more_than_there_are:
            assert (everything, more_than_there_are) == (["0", "1", "2", "3"], [])
    with pool.lent(2):
        with pool.lent(1) as other:
            assert other == ["2"]
        with pool.lent(1) as again:
            assert again == ["2"]  # given back
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1f, 3")
    assert cuda_devices() == ["GPU-1f", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cuda_devices() == []


def test_two_jobs_at_a_time_run_on_two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_short_jobs(monkeypatch, CHILD.replace('config["resume"]', '__import__("os").environ["CUDA_VISIBLE_DEVICES"]'))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    jobs = sweep_of(tmp_path, "seed=0,1", "trainer.accelerator=auto").jobs
    run_here(jobs, 2, Relay(), Progress(2))
    assert {(jobs[0].folder.parent / "logs" / f"{job.number}.log").read_text() for job in jobs} == {
        "spoke 4\n", "spoke 7\n"
    }  # fmt: skip


@pytest.mark.parametrize(("seconds", "text"), [(12.2, "12s"), (185, "3m05s"), (9600, "2h40m")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
