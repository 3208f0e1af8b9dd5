"""The verb `health` as users start it, and `trainer.health` before a run."""

import json
import platform
import socket
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.config.config_hash import config_hash, differences_on_resume
from lightning_llm.health.devices import SquareProduct
from tests.forked_main import ForkedMain
from tests.run_metrics import curve

ROOT = Path(__file__).parents[3]

HERE = platform.node()
CPU = "trainer.accelerator=cpu"


def test_two_ranks_are_started_measured_and_held_against_thresholds(tmp_path, capfd, forked_ranks):
    (tmp_path / "least.yaml").write_text("gemm.fp32.tflops: 1e6\nmemory.free_bytes: 1\n")
    options = "--short", "--json", "--slower-than=50", "--fail-below", str(tmp_path / "least.yaml")
    assert main(["health", CPU, "trainer.devices=2", f"run.root={tmp_path}", *options]) == 1
    said = capfd.readouterr()
    data = json.loads(said.out)
    assert [(each["rank"], each["host"]) for each in data["ranks"]] == [(0, HERE), (1, HERE)]
    assert (data["wrong"], data["slow"], data["p2p"], data["disks"]) == ([], [], None, {})
    assert [each.partition(" is ")[0] for each in data["below"]] == ["gemm.fp32.tflops"] * 2
    assert said.err.splitlines() == [f"below      {each}" for each in data["below"]]
    assert [each.name for each in tmp_path.iterdir()] == ["least.yaml"]


def test_all_user_errors_are_reported_at_once(tmp_path, capsys):
    (tmp_path / "least.yaml").write_text("gemm.fp32.tflop: 1\n")
    words = [
        "health",
        CPU,
        "trainer.devicess=2",
        "world=4",
        "--slower-than=0",
        f"--fail-below={tmp_path / 'least.yaml'}",
    ]
    assert main([*words, f"--output={tmp_path / 'least.yaml'}"]) == 2
    said = capsys.readouterr().err
    assert "error: 4 problems" in said
    for each in (
        "'gemm.fp32.tflop'. Did you mean 'gemm.fp32.tflops'?",
        "--slower-than=0: must",
        "--output=",
        "'devices'?",
    ):
        assert each in said
    (tmp_path / "least.yaml").write_text("gemm.fp32.tflops: 50%\ngemm.fp8.tflops: 1\n")
    assert main(["health", CPU, f"--fail-below={tmp_path / 'least.yaml'}"]) == 2
    said = capsys.readouterr().err
    assert "gemm.fp32.tflops: is 50% of the peak, which is unknown for " in said
    assert "gemm.fp8.tflops: " in said
    (tmp_path / "least.yaml").write_text("p2p.gb_per_second: 1\n")
    assert main(["health", CPU, "world=4", "--short", f"--fail-below={tmp_path / 'least.yaml'}"]) == 2
    said = capsys.readouterr().err
    assert "world=4: must equal trainer.devices=1" in said
    assert "p2p.gb_per_second is not measured with --short" in said


def test_trainer_health_is_in_no_hash_and_free_on_resume():
    without, checked = (compose_config(["model=llama_tiny", f"trainer.health={on}"]) for on in ("false", "true"))
    assert config_hash(without) == config_hash(checked)
    assert {key for key in differences_on_resume(without, checked) if not key.startswith("run.")} == set()


def test_a_run_does_not_start_if_the_health_check_finds_wrong_results(small_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(SquareProduct, "wrong_elements", lambda product: 3 * (product.number_format == "bf16"))
    assert main(["train", *small_run(tmp_path, "trainer.health=true")]) == 1
    expected = f"error: trainer.health: bf16 GEMM: 3 elements on rank 0 ({HERE}) are wrong. Training was not started.\n"
    assert capsys.readouterr().err == expected
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_ranks_that_are_checked_train_to_the_same_bits(small_run, tmp_path, capfd, forked_ranks):
    words = "trainer.max_steps=3", "trainer.validate_every_steps=null", "parallel=ddp", "trainer.devices=2"
    for name, more in (("without", []), ("checked", ["trainer.health=true"])):
        assert main(["train", *small_run(tmp_path / name, *words, "data.micro_batch_size=1", *more)]) == 0
    assert curve(tmp_path / "without" / "run") == curve(tmp_path / "checked" / "run")
    assert capfd.readouterr().out.count("health 2 ranks: results correct, no slow rank (") == 1


@pytest.mark.full
def test_unhealthy_ranks_are_reported_once_and_no_run_starts(small_run, tmp_path, capfd, forked_ranks, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    fault = "+callbacks.fault={_target_: tests.run.launch.slow_rank.SlowRank, rank: 1, pause_seconds: 0.05}"
    words = "parallel=ddp", "trainer.devices=2", "data.micro_batch_size=1", "trainer.health=true"
    assert main(["train", *small_run(tmp_path, *words, fault, "trainer.max_restarts=2")]) == 1
    said = capfd.readouterr().err
    assert said.count("error: ") == 1
    assert said.startswith(f"error: trainer.health: rank 1 ({HERE}) takes ")
    assert said.rstrip().endswith("Training was not started.")
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_ranks_started_by_torchrun_check_each_other(launcher, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    both = {
        "torchrun": {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        "slurm": {
            "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_NODELIST": "here",
            "SLURM_JOB_ID": "7", "SLURM_STEP_TASKS_PER_NODE": "2",
        },
    }[launcher]  # fmt: skip
    own = {"torchrun": ("RANK", "LOCAL_RANK"), "slurm": ("SLURM_PROCID", "SLURM_LOCALID")}[launcher]
    words = ["health", CPU, f"run.root={tmp_path}", "--slower-than=50"]
    ranks = [ForkedMain(words, **common, **both, **dict.fromkeys(own, str(rank))) for rank in range(2)]
    found = [each.communicate(120) for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0], found
    assert f"1 {HERE}" in found[0][0]
    assert found[0][0].endswith("healthy    values are right, and no rank is slow\n")
    assert found[1] == ("", "")
    assert {each.name for each in (tmp_path / "health").iterdir()} == {"cluster", "links.yaml"}
