"""Ranks agree on an overflow that one of them saw, on amaxes and on random bits."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_llm.config.compose import compose_config
from lightning_llm.plan.describe import layout_facts
from lightning_llm.plan.resolve import plan_of
from tests.parallel.traced_run import difference, traced_run

STEP, MICRO_BATCH = 3, 2


class OverflowIn(pl.Callback):
    """Multiplies the gradient of one global micro-batch's loss by infinity, wherever it is computed."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        begin, loss_sum = pl_module.quantization.begin_micro_batch, pl_module.parallel.loss_sum
        current: list[int] = []

        def noted(model: Any, step: int, index: int, at_once: Any) -> None:
            current[:] = [step, index]
            begin(model, step, index, at_once)

        def overflowing(*logits_and_labels: Any) -> Any:
            loss = loss_sum(*logits_and_labels)
            if current == [STEP, MICRO_BATCH]:
                loss.register_hook(lambda gradient: gradient * float("inf"))
            return loss

        pl_module.quantization.begin_micro_batch, pl_module.parallel.loss_sum = noted, overflowing


class FirstAmaxes(pl.Callback):
    """Keeps the amaxes of the first step, oldest first, of a layer with an input that was never cast."""

    def __init__(self) -> None:
        self.amaxes: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        history = pl_module.quantization.state(pl_module.model)["layers.0.attention.q_proj.amax_history"][:, 0]
        self.amaxes = self.amaxes or history[history > 0].tolist()


def first_amaxes(config: Any) -> list[float]:
    seen = FirstAmaxes()
    traced_run(config, seen, saves=False)
    return seen.amaxes


def test_a_round_of_micro_batches_is_one_update_of_delayed_scales(ranks, small_run, tmp_path):
    """Each update takes the largest amax of all ranks. `plan` notes that another number of ranks gives another run."""

    def config(layout: str, world: int) -> Any:
        words = [
            "precision=fp8_delayed_micro_batch",
            "precision.casts=eager",
            "data.micro_batch_size=1",
            "data.sequence_length=2",
        ]
        words += [
            f"parallel={layout}",
            f"trainer.devices={world}",
            "trainer.max_steps=1",
            "checkpoint.every_steps=null",
        ]
        return compose_config(small_run(tmp_path / f"{layout}{world}", *words, "trainer.validate_every_steps=null"))

    alone = ranks(1).call(first_amaxes, config("single", 1))
    rounds = {"ddp": ((0, 2), (1, 3)), "zero3": ((0, 1), (2, 3))}
    wanted = {layout: [max(alone[a], alone[b]) for a, b in pairs] for layout, pairs in rounds.items()}
    assert len({*map(tuple, (alone, *wanted.values()))}) == 3
    for layout, amaxes in wanted.items():
        assert ranks(2).call(first_amaxes, config(layout, 2)) == amaxes
        assert "update: micro_batch" in layout_facts(plan_of(config(layout, 2)))["bitwise_problem"]
    assert layout_facts(plan_of(config("single", 1)))["bitwise"]


def overflowing_run(config: Any) -> dict[str, Any]:
    return traced_run(config, OverflowIn(), saves=False)


@pytest.mark.parametrize(
    ("layout", "world"),
    [pytest.param("ddp", 4, marks=pytest.mark.full), pytest.param("zero1", 2, marks=pytest.mark.full), ("zero3", 4)],
)
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
