"""Pipelines: what the matrix of equal layouts does not vary."""

import pytest
from traced_run import Trace, difference, traced_run

from lightning_llm.compose import compose_config


@pytest.fixture(scope="module")
def words(small_run, tmp_path_factory):
    def run(*more: str) -> list[str]:
        return small_run(
            tmp_path_factory.mktemp("run"), "precision.casts=eager", "data.micro_batch_size=1",
            "data.global_batch_size=4", "model.num_layers=4", "checkpoint.every_steps=null", "trainer.max_steps=6",
            "optim.gradient_clip_norm=0.5", *more,
        )  # fmt: skip

    return run


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b"])
def test_schedules(schedule, ranks, words):
    virtual = f"parallel.virtual_stages={2 if schedule == 'interleaved_1f1b' else 1}"
    ours = ranks(2).call(traced_run, compose_config(words("parallel=pp", "trainer.devices=2", f"parallel.schedule={schedule}", virtual)))
    alone = ranks(1).call(traced_run, compose_config(words()))
    assert difference(ours, alone) is None
