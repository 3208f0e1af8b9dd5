"""Runs out of time save, report it, and continue as jobs that Slurm requeues, to the same bits. 8 CPU seconds."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.base.signals import seconds_of
from lightning_llm.config.compose import compose_config
from lightning_llm.config.config_hash import config_hash
from lightning_llm.tracking.files import summary_of
from tests.run_metrics import curve, steps_saved

ROOT = Path(__file__).parents[3]
STEPS = ["trainer.max_steps=6", "checkpoint.every_steps=100", "data.micro_batch_size=1"]
SCONTROL = '#!/bin/sh\necho "$@" >> {folder}/requeued\n'
SRUN = """#!{python}
import os, signal, subprocess, sys, time
tasks, started = int(os.environ["FAKE_TASKS"]), []
words, options = sys.argv[1:], []
while words[0].startswith("--"):
    options.append(words.pop(0))
step = {{"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": str(tasks), "SLURM_STEP_NODELIST": "localhost"}}
for task in range(tasks):
    of_task = {{"SLURM_NTASKS": str(tasks), "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task), "SLURM_NODEID": "0"}}
    started.append(subprocess.Popen(words, env=os.environ | step | of_task))
signal.signal(signal.SIGUSR1, lambda number, frame: [task.send_signal(number) for task in started])
# srun(1), --kill-on-bad-exit=1: the step ends where a task does with another code than 0; SIGTERM, and after KillWait
# SIGKILL.
told = 0
while any(task.poll() is None for task in started):
    if "--kill-on-bad-exit=1" in options and not told and any(task.poll() for task in started):
        told = time.monotonic()
        [task.terminate() for task in started if task.poll() is None]
    if told and time.monotonic() > told + 30:
        [task.kill() for task in started if task.poll() is None]
    time.sleep(0.02)
sys.exit(max(code if code >= 0 else 128 - code for code in (task.wait() for task in started)))
"""
SBATCH = """#!{python}
import os, re, subprocess, sys
script = sys.argv[1]
asked = dict(re.findall(r"--([\\w-]+)=(\\S+)", "".join(line for line in open(script) if line.startswith("#SBATCH"))))
tasks = int(asked["nodes"]) * int(asked["ntasks-per-node"])
environment = os.environ | {{"SLURM_JOB_ID": "17", "SLURM_NODELIST": "localhost", "FAKE_TASKS": str(tasks)}}
for count in range(5):
    again = {{"SLURM_RESTART_COUNT": str(count)}} if count else {{}}
    code = subprocess.run(["bash", script], env=environment | again).returncode
    print(f"job ended with {{code}}", flush=True)
    if not os.path.exists("{folder}/requeued"):
        sys.exit(code)
    os.rename("{folder}/requeued", f"{folder}/requeued.{{count}}")
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    """A folder with a Slurm of this machine: sbatch, srun, scontrol."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text.format(python=sys.executable, folder=folder))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return folder


def alarmed(number: int, pid: int | str) -> str:
    return f"+callbacks.fault={{_target_: tests.run.launch.faults.Signal, number: {number}, pid: {pid}, step: 3}}"


@pytest.mark.parametrize("number", [signal.SIGALRM, pytest.param(signal.SIGUSR1, marks=pytest.mark.full)])
def test_a_job_whose_time_is_up_is_queued_again_and_goes_on(number, slurm, small_run, tmp_path, monkeypatch, capfd):
    """`trainer.max_time` sends SIGALRM; here it is sent after a known step."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "16")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    words = small_run(tmp_path, *STEPS, alarmed(number, os.getpid()), "trainer.max_time=1:00:00:00")
    assert main(["train", *words]) == 75
    said, run = capfd.readouterr().err, tmp_path / "run"
    name = "trainer.max_time" if number == signal.SIGALRM else "SIGUSR1"
    assert f"{name}: stopping after this step, which is saved" in said
    assert f"stopped by {name}, state saved at step 3" in said
    assert "note   Slurm job 16_2 was requeued" in said
    assert (slurm / "requeued").read_text() == "requeue 16_2\n"
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert (summary_of(run)["status"], steps_saved(run)) == ("stopped", [3])
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert main(["train", *words]) == 0
    assert main(["train", *small_run(tmp_path / "undisturbed", *STEPS)]) == 0
    assert curve(run) == curve(tmp_path / "undisturbed" / "run")


def test_the_timer_runs_and_slurms_refusal_is_told(small_run, tmp_path, slurm, monkeypatch, capsys):
    (slurm / "scontrol").write_text("#!/bin/sh\necho 'scontrol: error: Access denied' >&2; exit 1\n")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    more = ["trainer.max_steps=100000", "schedule.total_steps=100000", "trainer.max_time=00:00:01"]
    assert main(["train", *small_run(tmp_path, *STEPS, *more)]) == 75
    said = capsys.readouterr().err
    assert re.search(r"stopped by trainer.max_time, (state saved at step \d+|nothing was saved yet)", said)
    assert "did not requeue job 17 (scontrol requeue 17: scontrol: error: Access denied)" in said


def test_a_launcher_passes_the_signal_on_to_its_ranks(small_run, tmp_path, forked_ranks, slurm, capfd):
    more = ["parallel=zero3", "trainer.devices=2", alarmed(signal.SIGUSR1, os.getpid())]
    assert main(["train", *small_run(tmp_path, *STEPS, *more)]) == 75
    said = capfd.readouterr().err
    assert "stopped by SIGUSR1, state saved at step" in said
    assert "failed" not in said
    assert summary_of(tmp_path / "run")["status"] == "stopped"
    assert not (slurm / "requeued").exists()


@pytest.mark.full
def test_the_batch_script_of_the_docs_goes_on_to_the_same_bits(small_run, tmp_path, slurm):
    text = (ROOT / "docs" / "howto" / "slurm_script.md").read_text()
    (script,) = re.findall(r"^```bash\n(#!/bin/bash\n#SBATCH.*?)^```", text, re.DOTALL | re.MULTILINE)
    words = small_run(tmp_path, *STEPS, "parallel=hsdp", "parallel.dp_shard=2", "data.global_batch_size=8")
    planted = script.replace("recipe=quickstart parallel=hsdp run.name=slurm", f'{" ".join(words)} "$FAULT"')
    assert planted != script
    (tmp_path / "job.sh").write_text(planted)
    environment = os.environ | {"FAULT": alarmed(signal.SIGUSR1, 0)}
    done = subprocess.run(["sbatch", str(tmp_path / "job.sh")], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (slurm / "requeued.0").read_text() == "requeue 17\n"
    assert re.search(r"resume from step [34]: ", done.stdout)
    undisturbed = [word for word in words if not word.startswith(("parallel", "run."))]
    assert main(["train", *undisturbed, f"run.dir={tmp_path}/undisturbed"]) == 0
    assert curve(tmp_path / "run") == curve(tmp_path / "undisturbed")


@pytest.mark.full
def test_a_killed_rank_ends_the_job_with_the_others_and_the_next_goes_on(small_run, tmp_path, slurm):
    """`--kill-on-bad-exit` of the docs' script: without it the others would wait `parallel.timeout_seconds`."""
    text = (ROOT / "docs" / "howto" / "slurm_script.md").read_text()
    (script,) = re.findall(r"^```bash\n(#!/bin/bash\n#SBATCH.*?)^```", text, re.DOTALL | re.MULTILINE)
    words = small_run(tmp_path, *STEPS[:1], "checkpoint.every_steps=2", "data.micro_batch_size=1", "parallel=hsdp")
    words += ["parallel.dp_shard=2", "data.global_batch_size=8"]
    fault = (
        f"+callbacks.fault={{_target_: tests.run.launch.faults.Fail, rank: 3, step: 3, kill: true, marks: {tmp_path}}}"
    )
    planted = script.replace(
        "recipe=quickstart parallel=hsdp run.name=slurm", f'{" ".join(words)} "$FAULT" resume=auto'
    )
    (tmp_path / "job.sh").write_text(planted)
    for number in (1, 2):
        environment = os.environ | {"FAULT": fault}
        done = subprocess.run(["sbatch", str(tmp_path / "job.sh")], env=environment, capture_output=True, text=True)
        assert (done.returncode == 0) == (number == 2), done.stderr
    assert re.search(r"resume from step 2: ", done.stdout)
    undisturbed = [word for word in words if not word.startswith(("parallel", "run."))]
    assert main(["train", *undisturbed, f"run.dir={tmp_path}/undisturbed"]) == 0
    assert curve(tmp_path / "run") == curve(tmp_path / "undisturbed")


@pytest.mark.parametrize(("text", "seconds"), [("00:00:01", 1), ("12:30:00", 45000), ("2:00:00:05", 172805)])
def test_times_are_lightnings(text, seconds):
    assert seconds_of(text) == seconds
    assert config_hash(compose_config([f"trainer.max_time={text}"])) == config_hash(compose_config([]))


@pytest.mark.parametrize("text", ["90", "00:00:00", "1h", "10:61:00"])
def test_invalid_times_are_rejected(text, capsys):
    assert main(["config", f"trainer.max_time={json.dumps(text)}"]) == 2
    assert "trainer.max_time" in (said := capsys.readouterr().err)
    assert "is not a time: give HH:MM:SS or DD:HH:MM:SS" in said
