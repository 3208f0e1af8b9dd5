"""torchrun restarts lost ranks, on fewer machines if needed, as Kubernetes' PyTorchJob sets it. All `full`."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from lightning_llm.__main__ import main
from lightning_llm.run.launch.local_ranks import last_step
from lightning_llm.tracking.files import summary_of
from tests.run_metrics import curve, read_metrics

ROOT = Path(__file__).parents[3]
TORCHRUN = str(Path(sys.executable).parent / "torchrun")
STEPS = ["trainer.max_steps=8", "checkpoint.every_steps=2", "data.micro_batch_size=1", "parallel=zero3"]
pytestmark = pytest.mark.full


@pytest.fixture
def undisturbed(small_run, tmp_path):
    words = [word for word in STEPS if not word.startswith("parallel")]
    assert main(["train", *small_run(tmp_path / "undisturbed", *words)]) == 0
    return curve(tmp_path / "undisturbed" / "run")


def job() -> dict:
    """Return the PyTorchJob of docs/howto/long_runs.md."""
    text = (ROOT / "docs" / "howto" / "long_runs.md").read_text()
    (block,) = re.findall(r"^```yaml\n(apiVersion: kubeflow.*?)^```", text, re.DOTALL | re.MULTILINE)
    return yaml.safe_load(block)


def test_a_pytorchjob_goes_on_after_a_rank_was_killed(small_run, tmp_path, undisturbed, monkeypatch):
    """Its variables are the training operator's for torchrun; one machine in place of two."""
    spec = job()["spec"]
    policy, (container,) = (
        spec["elasticPolicy"],
        spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"],
    )
    command = container["command"]
    assert command[:3] == ["torchrun", "-m", "lightning_llm"]
    fault = (
        f"+callbacks.fault={{_target_: tests.run.launch.faults.Fail, rank: 1, step: 5, kill: true, marks: {tmp_path}}}"
    )
    environment = os.environ | {
        "PET_NNODES": "1", "PET_NPROC_PER_NODE": str(spec["nprocPerNode"]), "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ENDPOINT": "localhost:0", "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    words = [TORCHRUN, *command[1:4], *small_run(tmp_path, *STEPS, fault)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "resume from step 4" in done.stdout
    assert curve(tmp_path / "run") == undisturbed


def test_a_lost_machine_leaves_a_group_of_fewer_ranks(small_run, tmp_path, undisturbed):
    """Two agents simulate two machines; one is killed with its rank, and the other continues alone to the same bits."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    rendezvous = [
        "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=lost",
        f"--rdzv-endpoint=localhost:{29000 + os.getpid() % 1000}",
    ]  # fmt: skip
    words = [
        TORCHRUN, *rendezvous, "-m", "lightning_llm", "train",
        *small_run(tmp_path, *STEPS, "trainer.max_steps=4000", "schedule.total_steps=8", "parallel.timeout_seconds=20"),
    ]  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        agents = [subprocess.Popen(words, env=environment, stdout=log, stderr=log) for _ in range(2)]
        try:
            metrics = tmp_path / "run" / "metrics.jsonl"
            until(lambda: metrics.is_file() and len(read_metrics(tmp_path / "run")) >= 5, agents)
            second = next(each for each in agents if not listens(each))
            for process in (*psutil.Process(second.pid).children(recursive=True), psutil.Process(second.pid)):
                process.send_signal(signal.SIGKILL)
            others = [each for each in agents if each is not second]
            until(lambda: summary_of(tmp_path / "run").get("starts") == 2 and last_step(tmp_path / "run") > 8, others)
            (first,) = others
            first.send_signal(signal.SIGTERM)
            first.wait(120)
        finally:
            for agent in agents:
                agent.kill()
    said = (tmp_path / "log").read_text()
    assert "zero3 on 2 ranks" in said
    assert "| zero3 |" in said, said
    made = [entry for entry in curve(tmp_path / "run") if entry[0] <= 8]
    assert made == undisturbed[: len(made)]  # which ends with a validation
    assert len(made) >= 8


def listens(agent: subprocess.Popen) -> bool:
    """Return whether it is the agent that holds the meeting place, without which no group comes together again."""
    port = int(next(word for word in agent.args if "--rdzv-endpoint" in word).rpartition(":")[2])
    found = psutil.Process(agent.pid).net_connections("tcp")
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in found)


def until(condition, agents, seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        assert any(each.poll() is None for each in agents)
        time.sleep(0.1)
