"""Several ranks, started as a user starts them: by one flag, by torchrun on two nodes; stopped, failing, in the way."""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.run.launch import local_ranks
from tests.parallel.rank_group import forkserver
from tests.run_metrics import curve, read_metrics, same_weights, steps_saved

ROOT = Path(__file__).parents[3]
TIMES = ["schedule.total_steps=300", "checkpoint.every_steps=null", "data.micro_batch_size=1"]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def start(words: list[str], program: tuple[str, ...] = (), **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, *program, "-m", "lightning_llm", "train", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment(**more), stdout=pipe, stderr=pipe, text=True)


def as_a_rank(words: list[str], variables: dict[str, str]) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr of one rank that torchrun started by `variables`."""
    os.environ.update(variables)
    with redirect_stdout(io.StringIO()) as told, redirect_stderr(io.StringIO()) as complained:
        code = main(["train", *words])
    return code, told.getvalue(), complained.getvalue()


def train_ranks(ranks: list[tuple[list[str], dict[str, str]]]) -> list[tuple[int, str, str]]:
    """Return the outcome of each of `ranks` (overrides, torchrun's variables), run at once in separate processes."""
    with ProcessPoolExecutor(len(ranks), mp_context=forkserver, max_tasks_per_child=1) as pool:
        started = [pool.submit(as_a_rank, words, variables) for words, variables in ranks]
        return [each.result(timeout=120) for each in started]


def torchrun(rank: int, world: int, port: int) -> dict[str, str]:
    """Return torchrun's variables for a rank on a single machine."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    return {name: str(value) for name, value in (told | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}).items()}


def alone(small_run, folder: Path, steps: int, *more: str) -> Path:
    assert main(["train", *small_run(folder, *TIMES, f"trainer.max_steps={steps}", *more)]) == 0
    return folder / "run"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.full)]
)
def test_two_ranks_by_one_flag_stop_on_a_signal_and_go_on_alone_to_the_same_bits(small_run, tmp_path, number, code):
    run = tmp_path / "two" / "run"
    words = small_run(tmp_path / "two", *TIMES, "trainer.max_steps=300")
    with start([*words, "parallel=zero3", "trainer.devices=2"]) as process:
        metrics, deadline = run / "metrics.jsonl", time.monotonic() + 90
        while not (metrics.is_file() and metrics.read_text().count("\n") >= 4) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        told, complained = process.communicate(timeout=90)
    assert process.returncode == code, complained
    assert told.count("plan ") == told.count("data ") == 1, "more than one rank spoke"
    assert "2 ranks" in told
    assert f"stopped by {number.name}, state saved at step" in complained
    assert "Traceback" not in complained
    stopped_at = read_metrics(run)[-1]["step"]
    assert steps_saved(run) == [stopped_at]
    assert not list((tmp_path / "two").glob(".*starting*"))
    assert main(["train", *words, "resume=auto", f"trainer.max_steps={stopped_at + 2}"]) == 0
    whole = alone(small_run, tmp_path / "one", stopped_at + 2)
    assert curve(run) == curve(whole)
    assert same_weights(run, whole, stopped_at + 2)


def test_four_ranks_share_weights_and_layers(small_run, tmp_path):
    """A layout with several process groups, started by torchrun; its losses are near those of one rank."""
    heads, port = "model.num_kv_heads=2", free_port()
    words = small_run(tmp_path / "four", *TIMES, heads, "trainer.max_steps=2", "parallel=pp_tp")
    codes, told, complained = zip(*train_ranks([(words, torchrun(rank, 4, port)) for rank in range(4)]), strict=True)
    assert codes == (0, 0, 0, 0), complained
    assert ["plan " in each for each in told] == [True, False, False, False]
    ours, whole = (
        [record["loss"] for record in read_metrics(folder) if "loss" in record]
        for folder in (tmp_path / "four" / "run", alone(small_run, tmp_path / "one", 2, heads))
    )
    assert ours == pytest.approx(whole, rel=2e-6)
    assert len(ours) == 2


@pytest.mark.parametrize(
    ("kill", "reason"),
    [(False, "RuntimeError: planted failure"), pytest.param(True, "SIGKILL", marks=pytest.mark.full)],
)
def test_one_rank_that_fails_ends_the_run_and_is_named_first(small_run, tmp_path, forked_ranks, capfd, kill, reason):
    fault = f"+callbacks.fault={{_target_: tests.run.launch.faults.Fail, rank: 1, step: 3, kill: {str(kill).lower()}}}"
    words = small_run(tmp_path, *TIMES, "trainer.max_steps=300", "parallel=pp", "trainer.devices=2", fault)
    assert main(["train", *words]) == 1
    complained = capfd.readouterr().err
    last, hint = complained.strip().splitlines()[-2:]
    assert last.startswith("error: rank 1 failed first")
    assert reason in last
    assert hint.startswith("to start it again: ")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "rank 1 failed first" in summary["detail"]


@pytest.mark.full
@pytest.mark.parametrize("hung", [1, 0])
def test_a_rank_that_hangs_is_named_and_not_the_one_that_waited(small_run, tmp_path, hung):
    fault = f"+callbacks.fault={{_target_: tests.run.launch.faults.Fail, rank: {hung}, step: 3, stop: true}}"
    words = small_run(tmp_path, *TIMES, "trainer.max_steps=300", "parallel=zero3", "trainer.devices=2", fault)
    (tmp_path / "temporary").mkdir()
    with start([*words, "parallel.timeout_seconds=15"], TMPDIR=str(tmp_path / "temporary")) as process:
        _, complained = process.communicate(timeout=240)
    assert process.returncode == 1, complained
    (said,) = [line for line in complained.splitlines() if line.startswith("error: ")]
    assert said.startswith(f"error: rank {hung} (process "), complained
    assert "of this machine, which is stopped) has given no sign of life for" in said
    assert " its last heartbeat is from step " in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], f"error: {summary['detail']}") == ("failed", said)
    assert not list((tmp_path / "temporary").glob("*elastic*")) + list((tmp_path / "temporary").glob("*-ranks-*"))


@pytest.mark.full
@pytest.mark.parametrize("layout", ["zero3", "pp"])
def test_a_stuck_rank_is_reported_with_its_line_and_last_collective(
    layout, small_run, tmp_path, forked_ranks, capfd, monkeypatch
):
    monkeypatch.setattr(local_ranks, "SAVE_SECONDS", 5)  # it does not listen
    fault = "+callbacks.fault={_target_: tests.run.launch.faults.Fail, rank: 1, step: 3, stick: true}"
    words = [f"parallel={layout}", "trainer.devices=2", "parallel.timeout_seconds=40", "trainer.max_steps=300", fault]
    code = main(["train", *small_run(tmp_path, *TIMES, *words)])
    told, complained = capfd.readouterr()
    assert code == 1, complained
    assert "env    TORCH_FR_BUFFER_SIZE=128 (lightning-llm)" in told
    (said,) = [line for line in complained.splitlines() if line.startswith("error: ")]
    assert re.match(
        r"error: rank 1 \(process \d+ of this machine\) has not joined the collective of the other ranks: ", said
    )
    assert re.search(r"in step 4, at faults.py:\d+ on_train_batch_end, last in gloo:\w+ \d+ of group \w+\. ", said)
    assert re.search(r" The other ranks waited in gloo:\w+ \d+ of group \w+ \(parallel.timeout_seconds=40\)$", said)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], f"error: {summary['detail']}") == ("failed", said)
    beat = json.loads((tmp_path / "run" / "ranks" / "1.json").read_text())
    assert beat["stack"][0].startswith("faults.py:")
    dumps = {rank: json.loads((tmp_path / "run" / "ranks" / f"gloo_{rank}").read_text()) for rank in (0, 1)}
    assert not dumps[0]["collectives"][-1]["ended"] or layout == "pp"
    assert dumps[1]["collectives"][-1]["ended"]
    assert any("faults.py" in line for line in dumps[1]["threads"]["MainThread"])


@pytest.mark.full
def test_torchrun_on_two_nodes_is_recognised(small_run, tmp_path):
    words = small_run(tmp_path / "nodes", *TIMES, "trainer.max_steps=4", "parallel=zero2")
    port = free_port()
    agents = [
        start(
            words,
            ("-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1",
             "--master-addr=127.0.0.1", f"--master-port={port}"),
        )
        for node in (0, 1)
    ]  # fmt: skip
    outputs = [agent.communicate(timeout=120) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert sum(told.count("plan ") for told, _ in outputs) == 1
    assert curve(tmp_path / "nodes" / "run") == curve(alone(small_run, tmp_path / "one", 4))


def test_a_missing_peer_and_a_used_port_are_reported(small_run, tmp_path):
    words = [*TIMES, "parallel=ddp", "trainer.max_steps=300", "parallel.timeout_seconds=3"]
    taken = socket.socket()
    taken.bind(("0.0.0.0", 0))
    taken.listen()
    ports = {"missing": free_port(), "taken": taken.getsockname()[1]}
    ended = train_ranks([(small_run(tmp_path / case, *words), torchrun(0, 2, port)) for case, port in ports.items()])
    taken.close()
    (missing, _, no_peer), (in_the_way, _, no_port) = ended
    assert (missing, in_the_way) == (2, 2), ended
    assert "waiting for 1 of 2 ranks at 127.0.0.1" in no_peer
    assert "If the port is in use, set another MASTER_PORT." in no_port
    assert not (tmp_path / "missing" / "run").exists()
