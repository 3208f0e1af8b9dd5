"""A run that is killed or stopped resumes under another layout and number of ranks with the same bits."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_llm.config.compose import compose_config
from tests.parallel.traced_run import Trace, difference, run_with, traced_run

STEPS = 6


class KilledAfter(pl.Callback):
    """Kills this rank without warning after a step; the other ranks lose their peer."""

    def __init__(self, step: int, rank: int):
        self.step, self.rank = step, rank

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if pl_module.completed_steps == self.step and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_run(config: Any, step: int, rank: int) -> None:
    run_with(config, KilledAfter(step, rank))


@pytest.fixture(scope="module")
def words(small_run):
    def run(folder: Path, layout: str, world: int, precision: str, *more: str) -> list[str]:
        return small_run(
            folder, f"parallel={layout}", f"trainer.devices={world}", f"precision={precision}",
            "precision.casts=eager", "data.micro_batch_size=1", "data.global_batch_size=4",
            "model.hidden_size=64", "model.num_heads=1", "model.ffn_hidden_size=128", "data.sequence_length=64",
            f"trainer.max_steps={STEPS}", "trainer.validate_every_steps=4", "checkpoint.every_steps=2",
            *more,
        )  # fmt: skip

    return run


CHAINS = [  # in `make test` random bits resume in train/test_precision_runs.py
    pytest.param("fp8_delayed", [("zero3", 2), ("hsdp", 4), ("single", 1)], marks=pytest.mark.full),
    pytest.param("mxfp4_sr", [("single", 1), ("zero2", 4), ("ddp", 2)], marks=pytest.mark.full),
    pytest.param("fp16", [("zero1", 4), ("single", 1), ("zero3", 4)], marks=pytest.mark.full),
    ("fp8_delayed", [("fsdp_pp", 4), ("zero3", 2), ("pp", 2)]),
    pytest.param("bf16_true", [("hsdp", 2), ("zero2", 2), ("zero1", 2)], marks=pytest.mark.full),
]


@pytest.mark.parametrize(("precision", "chain"), CHAINS, ids=lambda value: value if isinstance(value, str) else "")
def test_killed_twice_and_resumed_under_other_layouts(precision, chain, ranks, words, tmp_path):
    reference = compose_config(words(tmp_path / "whole", "single", 1, precision))
    whole: Trace = ranks(1).call(traced_run, reference)
    for (layout, world), killed_at in zip(chain, (3, 5, None), strict=True):
        config = compose_config(words(tmp_path / "parts", layout, world, precision, "resume=auto"))
        if killed_at is not None:
            with pytest.raises(RuntimeError, match="its exit code was -9"):
                ranks(world).call(killed_run, config, killed_at, world - 1)
            checkpoints = Path(config.run.dir) / "checkpoints"
            assert max(int(path.name[5:]) for path in checkpoints.glob("step=*")) == killed_at // 2 * 2
        else:
            parts = ranks(world).call(traced_run, config)
    assert json.loads((Path(config.run.dir) / "summary.json").read_text())["resumed_from_step"] == 4
    whole["gradients"] = parts["gradients"] = []  # those of a run's own first steps
    assert difference(whole, parts) is None


@pytest.mark.full
def test_a_branch_that_changes_the_layout_alone_is_its_trunk_s_continuation(ranks, words, tmp_path):
    """From sharded to one rank and back: the same bits as the trunk's own last steps, which it leaves alone."""
    reference = compose_config(words(tmp_path / "trunk", "zero3", 2, "fp8_delayed"))
    whole: Trace = ranks(2).call(traced_run, reference)
    trunk = Path(reference.run.dir)
    before = {path: path.stat().st_mtime_ns for path in trunk.rglob("*")}
    whole["curve"], whole["gradients"] = [entry for entry in whole["curve"] if entry[0] > 4], []
    for layout, world in (("single", 1), ("fsdp_pp", 4)):
        place = [f"run.root={tmp_path}", f"run.dir={tmp_path / layout}"]
        changed = [f"parallel={layout}", f"trainer.devices={world}"]
        config = compose_config([f"branch_from={trunk / 'checkpoints' / 'step=4'}", *place, *changed])
        branch: Trace = ranks(world).call(traced_run, config)
        branch["gradients"] = []
        assert difference(whole, branch) is None
    assert {path: path.stat().st_mtime_ns for path in trunk.rglob("*")} == before
