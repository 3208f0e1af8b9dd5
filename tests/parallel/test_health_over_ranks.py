"""Quantisation health is that of the whole step, however the step is spread."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_llm.callbacks.quantisation_health import QuantisationHealth
from lightning_llm.config.compose import compose_config
from lightning_llm.precision.linear.statistics import SUMS
from lightning_llm.train.spikes import NonFiniteError
from tests.parallel.traced_run import run_with


class Counting(QuantisationHealth):
    """Keeps how many elements each cast of the step had, over all ranks."""

    def _by_slot(self, sums: Tensor, *ranges: Tensor) -> dict[str, float]:
        self.elements = sums[..., SUMS.index("elements")].tolist()
        return super()._by_slot(sums, *ranges)


def healthy_run(config: Any) -> list[list[float]]:
    health = Counting(every_steps=2)
    run_with(config, health, saves=False)
    return health.elements


@pytest.fixture
def measured(ranks, small_run, tmp_path):
    """Return a run's lines of health, its records' figures by slot, and how many elements were counted in the last."""

    def run(layout: str, world: int, *words: str) -> tuple[list[Any], list[Any], list[list[float]]]:
        config = compose_config(
            small_run(
                tmp_path / layout, f"parallel={layout}", f"trainer.devices={world}", "precision=nvfp4",
                "precision.casts=eager", "trainer.max_steps=2", "schedule.warmup_steps=1",
                "checkpoint.every_steps=null", *words,
            )
        )  # fmt: skip
        elements = ranks(world).call(healthy_run, config)
        folder = Path(config.run.dir)
        health = [json.loads(line) for line in (folder / "health.jsonl").read_text().splitlines()]
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return health, [{k: v for k, v in each.items() if k.startswith("health/")} for each in metrics], elements

    return run


@pytest.mark.parametrize(
    "layout", [*(pytest.param(layout, marks=pytest.mark.full) for layout in ("ddp", "zero2")), "zero3"]
)
def test_two_ranks_measure_the_same_as_one(layout, measured):
    ours, alone = measured(layout, 2), measured("single", 1)
    assert [len(each["rows"]) for each in alone[0]] == [14 * 6, 14 * 6]
    assert ours[2] == alone[2]
    for one, other in zip(ours[0], alone[0], strict=True):
        for row, expected in zip(one["rows"], other["rows"], strict=True):
            assert row[:2] == expected[:2]
            assert [each is None for each in row] == [each is None for each in expected]
            measured = [each for each in expected[2:] if each is not None]
            assert [each for each in row[2:] if each is not None] == pytest.approx(measured, rel=1e-5, abs=1e-12)
        assert one["outliers"]["rows"] == other["outliers"]["rows"]
        assert len(one["outliers"]["rows"]) == 14 * 3
    for one, other in zip(ours[1], alone[1], strict=True):
        assert one == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize("layout", ["tp", pytest.param("cp", marks=pytest.mark.full)])
def test_replicated_parameters_are_counted_once(layout, measured):
    """Of a tensor-parallel group all have a column's x and a row's dy, of a context-parallel one the weights.

    Sums in another order move some elements to another number: 0.3 % of a figure at most in step 1; counted twice, x
    moves by 12 %. The one query that sees one key has a gradient of 0 alone, and of some 1e-10 under cp's mask.
    """
    words = ["model.num_kv_heads=2", "data.sequence_length=64", "precision.compute_dtype=fp32", "trainer.max_steps=1"]
    ((line,), (ours, *_), elements) = measured(layout, 2, *words)
    ((line_alone,), (alone, *_), expected) = measured("single", 1, *words)
    assert elements == expected
    kinds = ("underflow_percent", "saturation_percent", "sqnr_db")
    figures = {name: value for name, value in alone.items() if name.endswith(kinds)}
    if layout == "cp":
        del figures["health/dgrad.dy/underflow_percent"]
    assert len(figures) >= 3 * 6 - 1
    assert {name: ours[name] for name in figures} == pytest.approx(figures, rel=5e-3)
    for row, single in zip(line["outliers"]["rows"], line_alone["outliers"]["rows"], strict=True):
        assert (row[:2], row[4:]) == (single[:2], single[4:])  # module, operand; largest channel, their number
        assert row[2:4] == pytest.approx(single[2:4], rel=5e-3)


def failing_run(config: Any) -> str:
    """Return rank 0's record of a step in which only the other rank had Inf."""
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
    ranks(2).close()  # an error left its axes' groups as they were
    assert "layers.1.attention.o_proj, operand fprop.x, of micro-batch 1" in said
