"""Requests to Slurm and their results: submitit's executors, and a simulated Slurm. 20 seconds."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_llm.base.errors import ConfigError
from lightning_llm.base.signals import Relay
from lightning_llm.config.compose import compose_config
from lightning_llm.sweep.launchers import array_parameters, run_on_slurm, slurm_problems
from lightning_llm.sweep.progress import Progress
from lightning_llm.tracking.run_state import detail_of, state_of
from tests.sweep.short_jobs import MEETING_CHILD, start_short_jobs, sweep_of, times


@pytest.mark.usefixtures("short_children")
def test_submitit_runs_jobs_as_it_would_on_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    jobs = sweep_of(tmp_path, "seed=0,2", "launcher=slurm", "launcher.cluster=local").jobs
    progress = Progress(len(jobs))
    run_on_slurm(jobs, Relay(), progress)
    assert {each.job.config.seed: each.code for each in progress.outcomes} == {0: 0, 2: 1}
    logs = (jobs[0].folder.parent / "slurm").glob("*_0_log.out")
    assert any("spoke auto" in log.read_text() for log in logs)


SBATCH = """#!{python}
# Slurm's sbatch: keeps the script and runs its array's tasks, as many at once as it requests, once FOLDER/go exists.
import os, pathlib, re, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
folder, script = pathlib.Path("{folder}"), sys.argv[1]
text = pathlib.Path(script).read_text()
number = 70 + len(list(folder.glob("script*")))
(folder / f"script{{number}}").write_text(text)
print("Submitted batch job", number, flush=True)
if os.fork():
    sys.exit()
os.setsid()
for stream in (0, 1, 2):
    os.dup2(os.open(os.devnull, os.O_RDWR), stream)
array = re.search("--array=0-([0-9]+)%([0-9]+)", text)
until = time.monotonic() + 60
while not (folder / "go").exists():
    if (folder / "cancelled").exists() or time.monotonic() > until:
        sys.exit()
    time.sleep(0.05)
def run(task):
    names = dict(JOB_ID=1000 + task, ARRAY_JOB_ID=number, ARRAY_TASK_ID=task, NTASKS=1, PROCID=0, LOCALID=0, NODEID=0,
                 JOB_NUM_NODES=1)
    subprocess.call(["bash", script], env=os.environ | {{f"SLURM_{{key}}": str(value) for key, value in names.items()}})
with ThreadPoolExecutor(int(array[2])) as pool:
    list(pool.map(run, range(int(array[1]) + 1)))
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do [[ $1 == --unbuffered ]] && shift || shift 2; done
exec "$@"
"""
SACCT = """#!/bin/bash
echo 'JobID|State|NodeList'
for script in {folder}/script*; do echo "${{script#{folder}/script}}_[0-9]|PENDING|"; done
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a simulated Slurm: sbatch, srun, sacct, scancel. It starts nothing before the file `go` exists."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "sacct": SACCT, "scancel": "#!/bin/bash\n"}.items():
        script = text if name == "srun" else text.format(python=sys.executable, folder=folder)
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


class KilledError(BaseException):
    """The process that waits for Slurm's jobs is gone, without a chance to cancel any."""


def between_looks(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do `act` where `run_on_slurm` waits before it looks at its jobs again."""
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: (act(), time.sleep(0.1)))
    monkeypatch.setattr("lightning_llm.sweep.launchers.time", clock)


def test_jobs_are_one_array_however_often_the_sweep_is_started(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_short_jobs(monkeypatch, MEETING_CHILD)
    words = ["seed=0,2,3", "launcher=slurm", "launcher.at_once=2"]
    jobs = sweep_of(tmp_path, *words).jobs

    def die() -> None:
        raise KilledError

    between_looks(monkeypatch, die)
    with pytest.raises(KilledError):
        run_on_slurm(jobs, Relay(), Progress(3))
    between_looks(monkeypatch, (slurm / "go").touch)
    progress, beside = Progress(3), Progress(3)
    second = threading.Thread(target=run_on_slurm, args=(jobs, Relay(), progress))
    second.start()
    while second.is_alive() and not (slurm / "go").exists():
        time.sleep(0.01)
    run_on_slurm(jobs, Relay(), beside)  # a second start while one waits for all jobs
    second.join()
    assert {each.job.config.seed: each.code for each in progress.outcomes} == {0: 0, 2: 1, 3: 0}
    assert beside.outcomes == []
    (script,) = slurm.glob("script*")
    assert "#SBATCH --array=0-2%2\n" in script.read_text()
    began = [times(job)[0] for job in jobs]
    assert max(sum(times(job)[0] <= moment < times(job)[1] for job in jobs) for moment in began) == 2
    assert not list(jobs[0].folder.parent.glob("**/?.json"))
    assert not list(jobs[0].folder.parent.glob("?.yaml"))


@pytest.mark.usefixtures("short_children")
def test_jobs_with_different_nodes_are_separate_arrays_cancelled_by_a_signal(tmp_path: Path, slurm: Path) -> None:
    jobs = sweep_of(tmp_path, "seed=0,1", "trainer.devices=1,2", "world=2", "launcher=slurm", "launcher.at_once=1").jobs
    (slurm / "scancel").write_text(f"#!/bin/bash\necho $1 >> {slurm}/cancelled\n")
    relay = Relay()
    relay(signal.SIGTERM, None)
    progress = Progress(4)
    run_on_slurm(jobs, relay, progress)
    asked = [script.read_text() for script in sorted(slurm.glob("script*"))]
    assert [re.findall(r"--(array|nodes|ntasks-per-node)=(\S+)", text) for text in asked] == [
        [("array", "0-1%1"), ("nodes", "2"), ("ntasks-per-node", "1")],
        [("array", "0-1%1"), ("nodes", "1"), ("ntasks-per-node", "1")],
    ]
    assert sorted((slurm / "cancelled").read_text().split()) == ["70_0", "70_1", "71_0", "71_1"]
    assert progress.outcomes == []
    (slurm / "sbatch").write_text("#!/bin/bash\necho sbatch: error: invalid partition specified: gpu >&2; exit 1\n")
    with pytest.raises(ConfigError, match=r"launcher: Slurm rejected the jobs: .*invalid partition"):
        run_on_slurm(jobs, Relay(), progress)


def test_a_job_that_slurm_ended_is_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_short_jobs(monkeypatch, OUT_OF_MEMORY)
    job = sweep_of(tmp_path, "seed=0", "launcher=slurm", "launcher.cluster=local").jobs[0]
    progress = Progress(1)
    run_on_slurm([job], Relay(), progress)
    assert [each.code for each in progress.outcomes] == [137]
    assert state_of(job.folder) == "failed"
    assert detail_of(job.folder).startswith("ended without a message: exit code 137")


OUT_OF_MEMORY = """
import json, os, pathlib, signal, sys, yaml
folder = pathlib.Path(yaml.safe_load(open(sys.argv[1]))["run"]["dir"]); folder.mkdir()
(folder / "summary.json").write_text(json.dumps({"status": "running", "process": "node17 4242 1700000000"}))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_parameters_of_slurm_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["launcher=slurm", "launcher.partition=gpu", "launcher.gpus_per_node=8", "trainer.devices=8", "world=16"]
    config = compose_config([f"run.root={tmp_path}", *words])
    asked = array_parameters(config)
    assert (asked["nodes"], asked["tasks_per_node"]) == (2, 8)
    assert (asked["slurm_partition"], asked["gpus_per_node"], asked["slurm_array_parallelism"]) == ("gpu", 8, 8)
    assert array_parameters(config.model_copy(update={"world": None}))["tasks_per_node"] == 1
    import submitit

    executor = submitit.AutoExecutor(folder=tmp_path / "slurm", cluster="debug")
    executor.update_parameters(**asked)  # raises for a parameter that submitit does not know
    monkeypatch.setenv("PATH", os.devnull)
    assert "there is no sbatch here" in str(next(iter(slurm_problems(config.launcher))))
