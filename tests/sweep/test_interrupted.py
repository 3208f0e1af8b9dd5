"""`compare` over an interrupted sweep prints a line per cause, and commands that continue it as typed."""

import json
import math
import os
import platform
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from lightning_llm.__main__ import main
from tests.sweep.made_jobs import Killed, killed_after, make_jobs

pytestmark = pytest.mark.usefixtures("undrawn")
NAMES = ("bf16", "fp8_current")


def loss(config: dict[str, Any], step: int) -> float:
    seed, recipe = config["seed"], NAMES.index(config["precision"]["name"])
    return 3 + math.exp(-step / 40) + 0.1 * seed + 1e-4 * recipe * (1 + seed)


def words(folder: Path, lengths: str, *more: str) -> list[str]:
    return [
        "-m", "model=llama_tiny", "data=python", f"trainer.max_steps={lengths}", f"precision={','.join(NAMES)}",
        "seed=0,1", "trainer.validate_every_steps=10", "schedule.warmup_steps=2", "callbacks=none", "logger=none",
        f"run.root={folder}", "run.name=mine", *more,
    ]  # fmt: skip


def stopped_in_last_of(jobs: int, kind: Any) -> Any:
    """Return `loss`, and have SIGINT come as the last of so many jobs makes its last step, after which it ends."""

    def stops(config: dict[str, Any], step: int) -> float:
        if len(kind.started) == jobs and step == config["trainer"]["max_steps"]:
            os.kill(os.getpid(), signal.SIGINT)
        return loss(config, step)

    return stops


def test_a_signal_at_the_end_of_the_last_job_leaves_nothing_to_resume(tmp_path, monkeypatch, capsys):
    kind = make_jobs(monkeypatch, loss)
    kind.loss = staticmethod(stopped_in_last_of(4, kind))
    assert main(["train", *words(tmp_path, "30")]) == 128 + signal.SIGINT
    told = capsys.readouterr()
    assert "4 of 4 jobs finished" in told.out
    assert told.err == "stopped after the last job: all 4 are finished\n"


def test_a_signal_to_the_last_job_of_a_look_leaves_the_next_look(tmp_path, monkeypatch, capsys):
    kind = make_jobs(monkeypatch, loss)
    kind.loss = staticmethod(stopped_in_last_of(4, kind))
    looks = ("sweep.until=decided", "sweep.looks=[2,3]", "sweep.margin=1e-5")
    asked = [word for word in words(tmp_path, "30", *looks) if word != "seed=0,1"]
    assert main(["train", *asked]) == 128 + signal.SIGINT
    told = capsys.readouterr()
    assert told.out.count("look   ") == 1
    (line,) = told.err.splitlines()
    assert line.startswith("stopped between jobs; another look remains; to resume: ")
    assert main(pasted(line, "to resume: ", "")) == 0
    assert len(kind.started) == 6


def interrupted(monkeypatch: pytest.MonkeyPatch, folder: Path, lengths: str, ended: int, *more: str) -> Path:
    """Return the folder of a sweep that was killed after `ended` of its jobs."""
    killed_after(make_jobs(monkeypatch, loss), ended)
    with pytest.raises(Killed):
        main(["train", *words(folder, lengths, *more)])
    make_jobs(monkeypatch, loss)
    return folder / "default" / "mine"


def told(capsys: pytest.CaptureFixture[str], sweep: Path, *flags: str, expect: int = 2) -> list[str]:
    """Return the problems that `compare` names, a line each."""
    capsys.readouterr()
    assert main(["compare", str(sweep), *flags]) == expect
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("  - ")]


def pasted(line: str, behind: str, before: str) -> list[str]:
    program, *command = shlex.split(
        line.partition(behind)[2].rpartition(before)[0] if before else line.split(behind)[1]
    )
    assert program.endswith("lightning-llm")
    return command


def test_unfinished_lengths_are_resumed_instead_of_added(tmp_path, monkeypatch, capsys):
    sweep = interrupted(monkeypatch, tmp_path, "30,60,120", 8)
    jobs, *margins = told(capsys, sweep, "--margin", "2%")
    assert "4 of its 12 jobs are not finished (jobs 8, 9, 10, 11, numbered from 0): not started. Left out; " in jobs
    assert len(margins) == 2  # of runs over 30 steps, and over 60
    for line in margins:
        assert "Usable runs exist at 30, 60 steps. At 120 steps (seeds 0, 1) its runs are not finished" in line
        assert "Add" not in line
    command = pasted(jobs, "Left out; ", " starts them.")
    assert pasted(margins[0], "Resume them: ", "") == command
    assert main(command) == 0
    assert told(capsys, sweep, "--margin", "2%", expect=0) == []


def test_only_lengths_without_jobs_are_proposed(tmp_path, monkeypatch, capsys):
    sweep = interrupted(monkeypatch, tmp_path, "60,120", 4)
    line = told(capsys, sweep, "--margin", "2%")[-1]
    assert "Usable runs exist at 60 steps. At 120 steps (seeds 0, 1) its runs are not finished" in line
    assert "Add 30 to the sweep (trainer.max_steps), at seeds 0, 1, or run by run: " in line


@pytest.mark.full
def test_declared_looks_by_a_margin_in_tokens_say_the_same(tmp_path, monkeypatch, capsys):
    looks = ("sweep.until=decided", "sweep.margin=2%", "sweep.looks=[2]", "sweep.max_seeds=2")
    sweep = interrupted(monkeypatch, tmp_path, "30,60,120", 8, *looks)
    (jobs, *margins) = told(capsys, sweep)
    assert "4 of its 12 jobs are not finished" in jobs
    assert all("At 120 steps (seed" in line and "Add" not in line for line in margins)
    assert main(pasted(jobs, "Left out; ", " starts them.")) == 0
    assert "look   " in capsys.readouterr().out


def test_unfinished_jobs_are_a_line_per_cause(tmp_path, monkeypatch, capsys):
    sweep = interrupted(monkeypatch, tmp_path, "20,40,80", 12 - 2)
    dead = f"{platform.node()} 999999999 0"
    for number, summary in {
        2: {"status": "failed", "detail": "OSError: no space left\nmore"},
        3: {"status": "failed", "detail": "OSError: no room"},
        4: {"status": "stopped"},
        6: {"status": "running", "process": dead},
        7: {"status": "running", "process": dead},
    }.items():
        (sweep / str(number) / "summary.json").write_text(json.dumps(summary))
    lines = told(capsys, sweep)
    here = f"  - {sweep}: "
    assert [line.partition(". Left out")[0] for line in lines[:4]] == [
        f"{here}2 of its 12 jobs are not finished (jobs 2, 3, numbered from 0): failed after step 20 "
        "(OSError: no room; and others)",
        f"  - {sweep}/4: is not finished: stopped after step 40",
        f"{here}2 of its 12 jobs are not finished (jobs 6, 7, numbered from 0): killed, its process is gone "
        "after step 40",
        f"{here}2 of its 12 jobs are not finished (jobs 10, 11, numbered from 0): not started",
    ]
    goes_on = [line for line in lines[:4] if "resumes" in line]
    assert len(goes_on) == 3
    assert main(pasted(lines[0], "Left out; ", " resumes them.")) == 0
    assert told(capsys, sweep, expect=0) == []


def test_many_jobs_are_named_by_the_first_and_a_recipe_without_any_run_once(tmp_path, monkeypatch, capsys):
    make_jobs(monkeypatch, loss)
    assert main(["train", *words(tmp_path, "20")]) == 0
    sweep = tmp_path / "default" / "mine"
    about = json.loads((sweep / "sweep.json").read_text())
    more = [
        {"number": 4 + n, "words": ["precision=mxfp8", f"seed={n % 2}"], "key": f"k{n}", "kind": "k", "seed": n % 2}
        for n in range(11)
    ]
    (sweep / "sweep.json").write_text(json.dumps({**about, "jobs": [*about["jobs"], *more]}))
    first, last = told(capsys, sweep)
    jobs = "jobs 4, 5, 6, 7, 8, 9, 10, 11 and 3 more, numbered from 0"
    assert f"11 of its 15 jobs are not finished ({jobs}): not started" in first
    assert last == "  - mxfp8: has no verdict: none of its runs is finished (seeds 0, 1)."
    (sweep / "2" / "metrics.jsonl").unlink()
    (line,) = (line for line in told(capsys, sweep) if "unreadable" in line)
    assert "seed=0,1 run.name=mine" in line
    assert line.endswith(" reruns it once the folder is removed.")
    shutil.rmtree(sweep / "2")
    assert main(pasted(line, "Left out; ", " reruns it")) == 0
