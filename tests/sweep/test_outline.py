"""`plan -m` of a sweep, and the remaining time that a sweep prints."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.sweep import progress
from lightning_llm.sweep.progress import Outcome
from tests.sweep.short_jobs import sweep_of

WORDS = ["recipe=quickstart", "precision=bf16,mxfp8", "seed=0,1", "trainer.max_steps=60"]


def test_a_sweeps_plan_counts_what_is_left_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = [*WORDS, f"run.root={tmp_path}"]
    assert main(["plan", "-m", "--json", *words]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert not list(tmp_path.iterdir())
    assert main(["plan", "--json", *WORDS[:1], WORDS[3]]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert [job["tokens"] for job in facts["jobs"]] == 4 * [alone["total_tokens"]]
    assert {job["parameters"] for job in facts["jobs"]} == {alone["parameters"]}
    each = alone["flops_per_token"] * alone["total_tokens"]
    assert facts["left"] == {"jobs": 4, "tokens": 4 * alone["total_tokens"], "flops": pytest.approx(4 * each)}
    assert facts["axes"] == {"precision": ["bf16", "mxfp8"], "seed": ["0", "1"]}

    done = Path(facts["folder"]) / "2"
    done.mkdir(parents=True)
    (done / "summary.json").write_text('{"status": "finished"}')
    (done.parent / "sweep.json").write_text(json.dumps({"jobs": facts_of_jobs(facts)}))
    assert main(["plan", "-m", *words]) == 0
    printed = capsys.readouterr().out
    assert "4 (numbered from 0; local, 1 at once): 3 new, 1 finished" in printed
    assert f"3 jobs, at most {3 * alone['total_tokens']:,} tokens" in printed
    (done / "summary.json").write_text('{"stat')
    assert main(["plan", "-m", *words]) == 0
    assert "3 new, 1 damaged" in capsys.readouterr().out
    assert main(["plan", "-m", "--matrix", *words]) == 2
    assert main(["plan", "-m", *words, "trainer.max_step=3"]) == 2
    assert "Did you mean 'max_steps'" in capsys.readouterr().err


def test_a_sweeps_plan_counts_what_each_recipe_quantizes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["precision=bf16,nvfp4", "model.num_layers=3,4", f"run.root={tmp_path}"]
    assert main(["plan", "-m", *words]) == 0
    rows = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("quantized")]
    source = "its source keeps the first 3.2 % and the last 12.9 %"
    assert rows == [
        f"nvfp4 (0 of 3 blocks kept in bf16; {source}) at 1,721,664 parameters: "
        "21 of 22 linear layers quantized, in 3 of 3 blocks",
        f"nvfp4 (1 of 4 blocks kept in bf16; {source}) at 2,164,416 parameters: "
        "21 of 29 linear layers quantized, in 3 of 4 blocks",
    ]


def test_a_ladder_of_one_recipe_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["plan", "-m", "recipe=sweep/ladder", f"run.root={tmp_path}", "seed=0"]
    assert main([*words, "precision=mxfp8"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("lacks"))
    assert "each of 4 sizes has one run per number of tokens and seed" in line
    assert line.endswith("Use two, for example precision=bf16,mxfp8")
    assert main([*words, "precision=mxfp8,bf16"]) == 0
    assert "lacks" not in capsys.readouterr().out


def facts_of_jobs(facts: dict) -> list[dict]:
    return [{"number": job["number"], "words": job["words"], "key": job["config_hash"]} for job in facts["jobs"]]


def test_the_time_left_counts_the_jobs_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Eight jobs of 100 s, two at once, take 400 s; the second of each two ends 10 s after the first."""
    jobs, clock = sweep_of(tmp_path, "seed=0,1,2,3,4,5,6,7").jobs, [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    told = progress.Progress(8)
    told.starting(jobs[0])
    clock[0] = 10.0
    told.starting(jobs[1])
    said = []
    for number, end in enumerate((100.0, 110.0, 200.0, 210.0)):
        clock[0] = end
        told.ended(Outcome(jobs[number], 0, 100.0))
        said.append(capsys.readouterr().out.partition("about ")[2].split()[0])
        told.starting(jobs[number + 2])
    assert said == ["5m05s", "4m55s", "3m25s", "3m15s"]


def test_a_job_running_elsewhere_is_removed_from_the_progress_count(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    jobs = sweep_of(tmp_path, "seed=0,1,2").jobs
    told = progress.Progress(3)
    told.left_alone(jobs[0])  # seen before it was started
    told.starting(jobs[1])
    told.left_alone(jobs[1])  # its process was refused
    capsys.readouterr()
    told.starting(jobs[2])
    assert capsys.readouterr().out == "job    2 seed=2: starts, 1 of 1 so far\n"


def test_the_remaining_time_of_queued_jobs_is_by_their_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    jobs, clock = sweep_of(tmp_path, "seed=0,1,2,3").jobs, [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    told = progress.Progress(4, queued=True)
    for job in jobs:  # all are submitted at once, and one runs at a time
        told.starting(job)
    assert "job    3 seed=3: queued, 4 of 4 so far" in capsys.readouterr().out
    for number in range(2):
        clock[0] += 100.0
        told.ended(Outcome(jobs[number], 0, clock[0]))
    assert "2 of 4 ended, about 3m20s left" in capsys.readouterr().out


def test_the_remaining_time_of_a_search_is_by_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Three jobs of 100 steps, a step a second, are paused after 20 of them: 60 of 300 s are gone."""
    jobs, clock = sweep_of(tmp_path, "seed=0,1,2").jobs, [0.0]
    made = dict.fromkeys(range(3), 5)  # before this start
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    phase = progress.SearchPhase(
        lambda job: "paused at rung 1," if job.number < 2 else None,
        lambda job: made[job.number],
        lambda: sum(100 - steps for steps in made.values()),
    )
    told = progress.Progress(3, phase=phase)
    said = []
    for number in range(3):
        told.starting(jobs[number])
        clock[0] += 15.0
        made[number] += 15
        told.ended(Outcome(jobs[number], 143, 15.0))
        said.append(capsys.readouterr().out.splitlines()[-1])
    assert "paused at rung 1, after 15s | 1 of 3 ended, at most about 4m30s left of the search" in said[0]
    assert "at most about 4m15s left of the search" in said[1]
    assert "exit code 143 after 15s | 3 of 3 ended, at most about 4m00s left" in said[2]  # not the search's doing


def test_a_closed_output_pipe_is_no_error(tmp_path: Path) -> None:
    """As of `plan -m ... | head`: the pipe is closed before anything is printed."""
    command = [sys.executable, "-m", "lightning_llm", "recipes"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        told = process.stderr.read()
    assert (process.returncode, told) == (141, "")
