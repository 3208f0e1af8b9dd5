"""Quantisation health is that of the whole step, however the step is spread."""

import json
from pathlib import Path
from typing import Any

import pytest
from traced_run import leave_groups, run_with

from lightning_llm.callbacks.quantisation_health import QuantisationHealth
from lightning_llm.compose import compose_config
from lightning_llm.train.nonfinite import NonFiniteError

BAD_ROW = 3  # of the last global micro-batch, which rank 0 of two does not compute


def healthy_run(config: Any) -> None:
    trainer = run_with(config, QuantisationHealth(every_steps=2))
    leave_groups(trainer.strategy.layout)


@pytest.mark.parametrize("layout", ["ddp", pytest.param("zero2", marks=pytest.mark.full), "zero3"])
def test_two_ranks_measure_what_one_does(layout, ranks, small_run, tmp_path):
    def lines(name: str, layout: str, world: int) -> tuple[list[Any], list[Any]]:
        config = compose_config(
            small_run(
                tmp_path / name, f"parallel={layout}", f"trainer.devices={world}", "precision=nvfp4",
                "precision.casts=eager", "trainer.max_steps=2", "schedule.warmup_steps=1",
                "checkpoint.every_steps=null",
            )
        )  # fmt: skip
        ranks(world).call(healthy_run, config)
        folder = Path(config.run.dir)
        health = [json.loads(line) for line in (folder / "health.jsonl").read_text().splitlines()]
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return health, [{k: v for k, v in each.items() if k.startswith("health/")} for each in metrics]

    ours, alone = lines("ours", layout, 2), lines("alone", "single", 1)
    assert [len(each["rows"]) for each in alone[0]] == [14 * 6, 14 * 6]
    for one, other in zip(ours[0], alone[0], strict=True):
        for row, expected in zip(one["rows"], other["rows"], strict=True):
            assert row[:2] == expected[:2]
            assert [each is None for each in row] == [each is None for each in expected]
            measured = [each for each in expected[2:] if each is not None]
            assert [each for each in row[2:] if each is not None] == pytest.approx(measured, rel=1e-5, abs=1e-12)
    for one, other in zip(ours[1], alone[1], strict=True):
        assert one == pytest.approx(other, rel=1e-9)


def failing_run(config: Any) -> str:
    """Return what rank 0 says of a step in which only the other rank met Inf."""
    import torch

    class Spoil(QuantisationHealth):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
            if trainer.global_rank == 1 and not getattr(self, "planted", False):
                self.planted = True
                layer = pl_module.model.get_submodule("layers.1.attention.o_proj")
                layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * torch.inf,))

    try:
        run_with(config, Spoil())
    except NonFiniteError as error:
        return str(error)
    return "no error"


def test_the_origin_of_inf_on_another_rank_is_named(ranks, small_run, tmp_path):
    config = compose_config(
        small_run(tmp_path, "parallel=ddp", "trainer.devices=2", "precision=mxfp8", "precision.casts=eager")
    )
    said = ranks(2).call(failing_run, config)
    ranks(2).close()  # its axes' groups were left by an error
    assert "layers.1.attention.o_proj, operand fprop.x, of micro-batch 1" in said
