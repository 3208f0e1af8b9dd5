"""Ranks that are lost are started again, by one command, to the bits of a run that lost none. 20 seconds."""

import argparse
import json
import os
import re
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.config.config_hash import config_hash
from lightning_llm.run.checked_plan import checked_plan
from lightning_llm.run.launch.local_ranks import ExitStatus, Restarts
from lightning_llm.tracking.files import summary_of
from tests.run_metrics import curve

ROOT = Path(__file__).parents[3]

STEPS = ["trainer.max_steps=6", "checkpoint.every_steps=2", "trainer.validate_every_steps=3", "data.micro_batch_size=1"]


@pytest.fixture
def lost(small_run, tmp_path, forked_ranks, monkeypatch):
    """Return a function that trains with ranks that die, and returns exit code and folder."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def train(rank: int, step: int, times: int, *more: str, how: str = "kill") -> tuple[int, Path]:
        keys = f"rank: {rank}, step: {step}, {how}: true, marks: {tmp_path}, times: {times}"
        fault = f"{{_target_: tests.run.launch.faults.Fail, {keys}}}"
        return main(["train", *small_run(tmp_path, *STEPS, f"+callbacks.fault={fault}", *more)]), tmp_path / "run"

    return train


@pytest.fixture
def undisturbed(small_run, tmp_path):
    assert main(["train", *small_run(tmp_path / "undisturbed", *STEPS)]) == 0
    return tmp_path / "undisturbed" / "run"


def test_a_killed_rank_is_named_and_the_group_goes_on_to_the_same_bits(lost, undisturbed, capfd):
    code, run = lost(1, 3, 1, "parallel=zero3", "trainer.devices=2", "trainer.max_restarts=2")
    said = capfd.readouterr()
    assert code == 0, said.err
    assert curve(run) == curve(undisturbed)
    assert "error: rank 1 failed first (SIGKILL)" in said.err
    assert "note   restart 1 of at most 2, from the newest intact checkpoint" in said.err
    assert "resume from step 2: " in said.out
    summary = summary_of(run)
    (restart,) = summary["restarts"]
    assert restart["lost"].startswith("rank 1 failed first (SIGKILL)")
    assert restart["reached_step"] in (2, 3)  # rank 0 may lose its peer before it has written the step's record
    assert (summary["status"], summary["starts"]) == ("finished", 2)


def test_a_single_rank_is_started_again_too(lost, undisturbed):
    code, run = lost(0, 5, 1, "trainer.max_restarts=1")
    assert code == 0
    assert curve(run) == curve(undisturbed)


def test_a_run_that_fails_at_the_same_step_again_is_not_restarted(lost, capfd):
    code, run = lost(1, 3, 9, "parallel=ddp", "trainer.devices=2", "trainer.max_restarts=5")
    assert code == 1
    assert re.search(r"no restart: the previous restart did not get beyond step [23]", capfd.readouterr().err)
    summary = summary_of(run)
    assert summary["status"] == "failed"
    assert len(summary["restarts"]) in (1, 2)


@pytest.mark.full
def test_a_rank_that_hangs_is_ended_and_the_group_goes_on(lost, undisturbed, capfd):
    more = ["parallel=zero3", "trainer.devices=2", "trainer.max_restarts=1", "parallel.timeout_seconds=15"]
    code, run = lost(1, 3, 1, *more, how="stop")
    said = capfd.readouterr().err
    assert code == 0, said
    assert "has given no sign of life for" in said
    assert curve(run) == curve(undisturbed)


def test_errors_that_would_recur_are_not_retried(tmp_path, small_run, forked_ranks, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    fault = "+callbacks.fault={_target_: tests.run.launch.faults.Fail, rank: 1, step: 3}"
    words = ["parallel=ddp", "trainer.devices=2", "trainer.max_restarts=3", fault]
    assert main(["train", *small_run(tmp_path, *STEPS, *words)]) == 1
    assert "again" not in capfd.readouterr().err.replace("to start it again", "")
    assert "restarts" not in summary_of(tmp_path / "run")


def test_how_often(small_run, tmp_path, capsys):
    config = compose_config(small_run(tmp_path, "trainer.max_restarts=2"))
    (run := tmp_path / "run").mkdir()
    restarts = Restarts(config)
    assert not restarts.again(ExitStatus(1, "rank 0 was lost")), "it had not begun"
    (run / "config.yaml").touch()
    tries = []
    for step in (4, 8, 12):
        (run / "metrics.jsonl").write_text(json.dumps({"step": step, "loss": 1.0}) + "\n")
        tries.append(restarts.again(ExitStatus(1, f"lost after {step}")))
    assert tries == [True, True, False]
    assert [each["reached_step"] for each in summary_of(run)["restarts"]] == [4, 8]
    assert "trainer.max_restarts=2 is used up" in capsys.readouterr().err
    assert not Restarts(config).again(ExitStatus(2))


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_ranks_restarted_by_torchrun_resume(small_run, tmp_path, monkeypatch, name):
    arguments = argparse.Namespace(overrides=small_run(tmp_path), config=None, config_dir=None)
    for count, resume in (("0", None), ("1", "auto")):
        monkeypatch.setenv(name, count)
        assert checked_plan(arguments, to_train=True).config.resume == resume
    assert checked_plan(arguments, to_train=False).config.resume is None


def test_resume_auto_rejects_a_default_name_with_a_timestamp(small_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    words = [word for word in small_run(tmp_path) if not word.startswith("run.dir=")]
    assert main(["train", *words]) == 2
    assert "contains a timestamp" in capsys.readouterr().err
    assert not os.listdir(tmp_path)


def test_max_restarts_is_bounded_and_not_in_the_config_hash(small_run, tmp_path):
    words = small_run(tmp_path)
    hashes = {config_hash(compose_config([*words, f"trainer.max_restarts={count}"])) for count in (0, 3)}
    assert len(hashes) == 1
    with pytest.raises(ConfigError, match=r"trainer\.max_restarts"):
        compose_config([*words, "trainer.max_restarts=-1"])
