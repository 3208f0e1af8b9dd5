"""What the ranks must agree on: an overflow that one of them saw, amaxes, random bits."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from traced_run import difference, traced_run

from lightning_llm.compose import compose_config

STEP, MICRO_BATCH = 3, 2


class OverflowIn(pl.Callback):
    """Multiplies the loss of one global micro-batch by infinity, wherever it is computed."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        begin, forward = pl_module.quantisation.begin_micro_batch, pl_module.training_step
        current: list[int] = []

        def noted(model: Any, step: int, index: int) -> None:
            current[:] = [step, index]
            begin(model, step, index)

        def overflowing(*batch: Any) -> Any:
            loss = forward(*batch)
            return loss * float("inf") if current == [STEP, MICRO_BATCH] else loss

        pl_module.quantisation.begin_micro_batch, pl_module.training_step = noted, overflowing


def overflowing_run(config: Any) -> dict[str, Any]:
    return traced_run(config, OverflowIn())


@pytest.mark.parametrize(("layout", "world"), [("ddp", 4), ("zero1", 2), ("zero3", 4)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(layout, world, ranks, small_run, tmp_path):
    def run(name: str, layout: str, world: int) -> dict[str, Any]:
        config = compose_config(
            small_run(
                tmp_path / name, f"parallel={layout}", f"trainer.devices={world}", "precision=fp16",
                "precision.casts=eager", "data.micro_batch_size=1", "checkpoint.every_steps=null",
            )
        )  # fmt: skip
        return ranks(world).call(overflowing_run, config)

    ours, alone = run("ours", layout, world), run("alone", "single", 1)
    assert difference(ours, alone) is None
    records = [json.loads(line) for line in Path(tmp_path / "ours/run/metrics.jsonl").read_text().splitlines()]
    skipped = [record["step"] for record in records if record.get("skipped")]
    assert skipped == [STEP + 1]
    scales = [record["loss_scale"] for record in records if "loss_scale" in record]
    assert scales[STEP + 1] == scales[STEP] / 2
