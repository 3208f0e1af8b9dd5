"""Ranks that Ray places: on a Ray of this machine, and on two of its nodes, as if they were machines. 10 seconds."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.config.config_hash import config_hash
from lightning_llm.run.launch import ray_ranks
from lightning_llm.run.launch.local_ranks import ExitStatus
from lightning_llm.run.launch.ray_cluster import OF_THIS_MACHINE, OWN, bundle, connected, is_own, machines, ray_problems
from lightning_llm.run.launch.ray_node import RayNode, Task
from lightning_llm.run.launch.ray_ranks import PlacedRanks
from lightning_llm.tracking.files import summary_of
from tests.run_metrics import curve, read_metrics, steps_saved

ROOT = Path(__file__).parents[3]

STEPS = ["trainer.max_steps=6", "checkpoint.every_steps=2", "data.micro_batch_size=1"]
AGENT = """
import json, os, signal, sys, time
from pathlib import Path
task, report = json.load(sys.stdin), Path(sys.argv[1])
folder = Path(os.environ["LIGHTNING_LLM_TEST"])
start = len(list(folder.glob("start-*")))
(folder / f"start-{start}").write_text(str(os.getpid()))
print("start", start, task["cpus"], os.environ.get("OMP_NUM_THREADS"), "HOME_OF_NOTHING" in os.environ, flush=True)
print("complains", file=sys.stderr, flush=True)
if start == 0:
    more = {"py_callstack": "Traceback", "timestamp": "9"}
    error = {"message": {"message": "RuntimeError: planted", "extraInfo": more}}
    failure = {"local_rank": 0, "pid": 1, "exitcode": 1, "timestamp": 9, "error": error}
    report.write_text(json.dumps({"failures": {0: failure}}))
    sys.exit(1)
if start == 1:
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, lambda *_: (report.write_text(json.dumps({"signal": signal.SIGTERM})), sys.exit(1)))
(folder / "waits").touch()
time.sleep(60)
"""
"""In place of torch's agent: fails, is killed, and at its third start waits to be stopped."""


@pytest.fixture
def of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OF_THIS_MACHINE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.full
@pytest.mark.usefixtures("of_this_machine")
def test_ranks_on_ray_are_forwarded_restarted_and_stopped(
    small_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIGHTNING_LLM_TEST", str(tmp_path))
    monkeypatch.setattr(ray_ranks, "COMMAND", [sys.executable, "-c", AGENT])
    words = small_run(tmp_path, "launcher=ray", "trainer.max_restarts=5", "world=1")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    steps = iter([3, 5, 7])
    monkeypatch.setattr("lightning_llm.run.launch.local_ranks.last_step", lambda folder: next(steps))

    def stop() -> None:
        while not (tmp_path / "waits").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    config = compose_config(words)
    with connected(config.launcher) as ray:
        addresses = {each.laddr.ip for each in sockets_of(psutil.Process()) if each.status == "LISTEN"}
        assert {each.removeprefix("::ffff:") for each in addresses} == {"127.0.0.1"}
        monkeypatch.setenv("HOME_OF_NOTHING", "is not passed on")
        assert ray_ranks.start_ranks_on_ray(config) == 143
        until = time.monotonic() + 30
        while (free := ray.available_resources().get("CPU")) != (whole := ray.cluster_resources()["CPU"]):
            assert time.monotonic() < until, f"{free} of {whole} CPU are free: requested resources were not returned"
            time.sleep(0.1)
    said = capfd.readouterr()
    assert [line for line in said.out.splitlines() if line.startswith("start")] == [
        f"start {number} 1 None {number < 0}" for number in range(3)
    ]
    assert said.err.count("complains") == 3
    assert "error: rank 0 failed first (exit code 1): RuntimeError: planted" in said.err
    assert "error: torch's agent on a machine of Ray exited with -9" in said.err
    restarts = summary_of(run)["restarts"]
    assert [each["reached_step"] for each in restarts] == [3, 5]
    assert not [pid for pid in range(3) if psutil.pid_exists(int((tmp_path / f"start-{pid}").read_text()))]


def sockets_of(process: psutil.Process) -> list[Any]:
    found = []
    for each in process.children(recursive=True):
        if "ray" in each.name() or "gcs" in each.name() or any("ray" in word for word in each.cmdline()[1:3]):
            found += each.net_connections()
    assert found
    return found


def test_resources_requested_from_ray() -> None:
    words = ["launcher=ray", "trainer.devices=8", "world=16"]
    config = compose_config(words)
    assert (machines(config), machines(compose_config(["launcher=ray"]))) == (2, 1)
    assert bundle(config, gpus_there=True) == {"CPU": 8.0, "GPU": 8.0}
    assert bundle(config, gpus_there=False) == {"CPU": 8.0}
    assert bundle(compose_config([*words, "trainer.accelerator=cpu"]), gpus_there=True) == {"CPU": 8.0}
    more = compose_config([*words, "launcher.gpus_per_node=4", "launcher.cpus_per_task=32", "launcher.memory_gb=2"])
    assert bundle(more, gpus_there=True) == {"CPU": 32.0, "GPU": 4.0, "memory": 2.0**31}
    assert config_hash(compose_config(["launcher=ray"])) == config_hash(compose_config([]))
    wrong = compose_config(["launcher=ray", "launcher.address=ray://h:10001", "trainer.devices=8", "world=12"])
    assert [each.key for each in ray_problems(wrong)] == ["launcher.address", "world"]


def test_only_a_ray_that_was_started_here_has_no_machines_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", OWN):
        monkeypatch.delenv(name, raising=False)
    launcher = compose_config(["launcher=ray"]).launcher
    assert is_own(launcher)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # as ray job submit does
    assert not is_own(launcher)
    monkeypatch.setenv(OWN, "10.0.0.1:6379")  # as a sweep does
    assert is_own(launcher)
    assert not is_own(compose_config(["launcher=ray", "launcher.address=auto"]).launcher)


@pytest.mark.parametrize("stopped", [True, False])
def test_machines_may_save_once_one_has_been_stopped(stopped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second machine ends 60 seconds after the first, by a clock of the test's own."""
    first = {"code": 1, **({"signal": 15} if stopped else {"failures": {}})}
    events = iter([(0, "end", first), (1, "out", ""), (1, "end", first)])
    clock = SimpleNamespace(monotonic=iter([0.0, 0.0, 60.0, 60.0, 60.0]).__next__)
    monkeypatch.setattr(ray_ranks, "time", clock)
    start, killed = PlacedRanks(None, [None, None]), []
    monkeypatch.setattr(start, "_tasks", lambda *_: iter(()))
    monkeypatch.setattr(start, "_to_all", killed.append)
    monkeypatch.setattr(start, "_events", SimpleNamespace(get=lambda timeout: next(events)))
    start.run(compose_config([]), 1, quiet=True)
    assert killed == ([] if stopped else ["kill"])


def test_a_config_rejected_on_a_machine_is_reported_and_not_retried(capfd: pytest.CaptureFixture[str]) -> None:
    task = Task("seed: none\n", [], 1, None, quiet=True)
    found = list(RayNode().run(task.as_json(), {}))
    assert found[-1] == ("end", {"code": 2})
    said = "".join(text for kind, text in found if kind == "err")
    assert "Traceback" not in said
    assert "a value must be given" in said
    start = PlacedRanks(None, [None])
    start.reports[0] = found[-1][1]
    assert ray_ranks._how_it_ended(start, compose_config([])) == ExitStatus(2)


def test_what_a_user_gets_wrong(
    small_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_three = "parallel=ddp", "data.global_batch_size=6"
    assert main(["train", *small_run(tmp_path, "launcher=ray", "world=3", "trainer.devices=2", *of_three)]) == 2
    assert "world=3: must be a multiple of trainer.devices=2" in capsys.readouterr().err
    monkeypatch.setattr("lightning_llm.run.launch.ray_cluster.find_spec", lambda name: None)
    words = small_run(tmp_path, "launcher=ray")
    for more in ([], ["-m", "seed=0,1"]):
        assert main(["train", *words, *more]) == 2
        assert "pip install 'lightning-llm[ray]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.fixture
def two_nodes(of_this_machine: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes of Ray's on this machine, with a CPU each."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


def fault(tmp_path: Path, rank: int, step: int, how: str = "kill") -> str:
    keys = f"rank: {rank}, step: {step}, {how}: true, marks: {tmp_path}"
    return f"+callbacks.fault={{_target_: tests.run.launch.faults.Fail, {keys}}}"


def over_two(cluster: Any, *more: str) -> list[str]:
    return [*STEPS, "launcher=ray", f"launcher.address={cluster.address}", "world=2", "parallel=zero3", *more]


@pytest.mark.full
def test_a_rank_killed_on_another_machine_is_named_and_the_run_comes_to_the_same_bits(
    small_run: Any, tmp_path: Path, two_nodes: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    more = fault(tmp_path, 1, 3), "trainer.max_restarts=2"
    code = main(["train", *small_run(tmp_path, *over_two(two_nodes, *more))])
    said = capfd.readouterr()
    assert code == 0, said.err
    assert "error: rank 1 failed first (SIGKILL)" in said.err
    assert "note   restart 1 of at most 2" in said.err
    assert "resume from step 2: " in said.out
    assert main(["train", *small_run(tmp_path / "alone", *STEPS)]) == 0
    assert curve(tmp_path / "run") == curve(tmp_path / "alone" / "run")
    (restart,) = summary_of(tmp_path / "run")["restarts"]
    assert restart["lost"].startswith("rank 1 failed first (SIGKILL)")


@pytest.mark.full
def test_a_lost_machine_is_named_and_another_takes_its_place(
    small_run: Any, tmp_path: Path, two_nodes: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    import ray

    run = tmp_path / "run"

    def pull() -> None:
        metrics, until = run / "metrics.jsonl", time.monotonic() + 240
        while not (metrics.is_file() and metrics.read_text().count("\n") >= 4) and time.monotonic() < until:
            time.sleep(0.05)
        (group,) = ray.util.placement_group_table().values()
        used = set(group["bundles_to_node_id"].values())
        lost = next(each for each in two_nodes.worker_nodes if each.node_id in used)
        two_nodes.remove_node(lost, allow_graceful=False)

    two_nodes.add_node(num_cpus=1)  # one is left over
    thread = threading.Thread(target=pull)
    thread.start()
    steps = ["trainer.max_steps=120", "schedule.total_steps=120", "checkpoint.every_steps=10"]
    code = main(["train", *small_run(tmp_path, *over_two(two_nodes, *steps, "trainer.max_restarts=1"))])
    thread.join()
    said = capfd.readouterr()
    assert code == 0, said.err
    assert re.search(r"error: machine [01] of 2 \(127.0.0.1, ranks from [01]\) was lost: ", said.err)
    assert main(["train", *small_run(tmp_path / "alone", *STEPS, *steps)]) == 0
    assert curve(run) == curve(tmp_path / "alone" / "run")


@pytest.mark.full
def test_a_run_that_is_stopped_saves_and_goes_on_and_one_whose_command_is_killed_too(
    small_run: Any, tmp_path: Path, two_nodes: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    long = ["trainer.max_steps=100000", "schedule.total_steps=300", "checkpoint.every_steps=null"]
    words = small_run(tmp_path, *over_two(two_nodes, *long))
    run, made = tmp_path / "run", 0
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        command = [sys.executable, "-m", "lightning_llm", "train", *words, "resume=auto"]
        named = {**os.environ, "LIGHTNING_LLM_TEST": str(tmp_path)}
        with subprocess.Popen(command, cwd=Path(__file__).parents[3], env=named) as process:
            until = time.monotonic() + 300
            while len(read_metrics(run) if (run / "metrics.jsonl").is_file() else []) < made + 4:
                assert time.monotonic() < until
                time.sleep(0.1)
            process.send_signal(number)
            assert process.wait(timeout=240) == code
        until = time.monotonic() + 60
        while summary_of(run)["status"] != "stopped" and time.monotonic() < until:
            time.sleep(0.1)
        made = read_metrics(run)[-1]["step"]
        assert steps_saved(run)[-1] == made
        while started_for(tmp_path) and time.monotonic() < until:
            time.sleep(0.1)
        assert not started_for(tmp_path)
    last = small_run(tmp_path, *over_two(two_nodes, *long, f"trainer.max_steps={made + 2}"), "resume=auto")
    assert main(["train", *last]) == 0
    alone = small_run(tmp_path / "alone", *STEPS, *long, f"trainer.max_steps={made + 2}")
    assert main(["train", *alone]) == 0
    assert curve(run) == curve(tmp_path / "alone" / "run")
    assert f"resume from step {made}: " in capfd.readouterr().out


def started_for(folder: Path) -> list[psutil.Process]:
    """Processes that have the variable of this test: Ray's actors hand it to the agents, and they to their ranks."""
    return [each for each in psutil.process_iter() if each.pid != os.getpid() and _variable(each) == str(folder)]


def _variable(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("LIGHTNING_LLM_TEST")
    except psutil.Error:
        return None


@pytest.mark.full
@pytest.mark.usefixtures("of_this_machine")
def test_a_sweep_shares_one_ray_and_repeats_nothing(
    small_run: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = [word for word in small_run(tmp_path) if not word.startswith("run.dir")]
    words = ["-m", *words, "seed=0,1", "launcher=ray", "launcher.at_once=2", "run.name=swept", "run.experiment=own"]
    assert main(["train", *words]) == 0
    assert "sweep  2 of 2 jobs finished" in capfd.readouterr().out
    assert "RAY_ADDRESS" not in os.environ
    assert main(["train", *words]) == 0
    assert "nothing left to do" in capfd.readouterr().out
    sweep = tmp_path / "own" / "swept"
    for seed in (0, 1):
        log = (sweep / "logs" / f"{seed}.log").read_text()
        assert "step" in log or "run " in log
        assert main(["train", *small_run(tmp_path / f"alone{seed}", f"seed={seed}")]) == 0
        assert curve(sweep / str(seed)) == curve(tmp_path / f"alone{seed}" / "run")
        assert json.loads((sweep / str(seed) / "summary.json").read_text())["status"] == "finished"


@pytest.mark.full
@pytest.mark.usefixtures("of_this_machine")
def test_a_missing_or_full_ray_cluster_is_reported(
    small_run: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = small_run(tmp_path, "launcher=ray")
    assert main(["train", *words, "launcher.address=127.0.0.1:9"]) == 2
    said = capfd.readouterr().err
    assert "launcher.address=127.0.0.1:9: Ray cannot be reached there: " in said
    assert "Connection refused" in said  # before Ray tries for a quarter of an hour
    assert main(["train", *words, "launcher.cpus_per_task=512"]) == 2
    assert (
        "launcher.cpus_per_task: the ranks need 1 machine with 512 CPU each, but Ray has 1: " in capfd.readouterr().err
    )
    assert not (tmp_path / "run").exists()
