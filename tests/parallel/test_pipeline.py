"""Pipelines: order and bubble of the schedules, an overflow on one stage, the loss on the last stage, a sample."""

import json
import math
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from lightning_llm.callbacks.quantisation_health import QuantisationHealth
from lightning_llm.config.compose import compose_config
from lightning_llm.parallel import pp as pipeline_module
from lightning_llm.parallel.pp import Pipeline
from lightning_llm.parallel.pp_stage import TrainStage
from lightning_llm.plan.stages import bubble_fraction, receives_waiting
from lightning_llm.train.spikes import NonFiniteError
from tests.parallel.traced_run import difference, run_with, traced_run

SHORT = ["trainer.max_steps=2", "schedule.warmup_steps=1"]
Order = list[tuple[str, int, int]]
"""Actions of one rank in order: ("F" or "B", stage, micro-batch)."""


def idle_fraction(orders: Sequence[Order]) -> float:
    """Return the idle part of a step where a stage's forward pass takes one unit and its backward pass two.

    A forward pass waits for that of the stage before it, a backward pass for that of the stage after it.
    """
    last_stage = max(stage for order in orders for _, stage, _ in order)
    done: dict[tuple[str, int, int], float] = {}
    now, position = [0.0] * len(orders), [0] * len(orders)
    while any(at < len(order) for at, order in zip(position, orders, strict=True)):
        moved = False
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                kind, stage, micro_batch = action = order[position[rank]]
                if kind == "F":
                    needs = [("F", stage - 1, micro_batch)] if stage > 0 else []
                else:
                    needs = [("F", stage, micro_batch)]
                    needs += [("B", stage + 1, micro_batch)] if stage < last_stage else []
                if any(each not in done for each in needs):
                    break
                start = max([now[rank], *(done[each] for each in needs)])
                now[rank] = done[action] = start + (1 if kind == "F" else 2)
                position[rank] += 1
                moved = True
        assert moved, f"the schedule waits for itself: {orders}"
    busy = sum(1 if kind == "F" else 2 for kind, _, _ in orders[0])
    return 1 - busy / max(now)


class Noting:
    """Mock of a stage: records the actions of a schedule, sends and computes nothing."""

    def __init__(self, index: int, pp: int, virtual_stages: int):
        self.stage_index, self.num_stages = index, pp * virtual_stages
        self.group_size, self.group_rank = pp, index % pp
        self.p2p_per_edge, self.stage_index_to_group_rank = False, {each: each % pp for each in range(self.num_stages)}
        self.is_first, self.is_last = index == 0, False  # so that no loss is asked for
        self.device, self.submod = torch.device("cpu"), torch.nn.Identity()
        self.order: Order = []

    def forward_one_chunk(self, chunk: int, *_: Any, **__: Any) -> None:
        self.order.append(("F", self.stage_index, chunk))

    def backward_one_chunk(self, chunk: int, *_: Any, **__: Any) -> None:
        self.order.append(("B", self.stage_index, chunk))

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: []


def of_torch(schedule: str, pp: int, micro_batches: int, virtual_stages: int) -> list[Order]:
    """Return every rank's passes under torch's schedule: the declared order if interleaved, else the order run."""
    if schedule == "interleaved_1f1b":
        stages: Any = [Noting(index, pp, virtual_stages) for index in range(0, pp * virtual_stages, pp)]
        laid_out = ScheduleInterleaved1F1B(stages, micro_batches).pipeline_order
        compute = [
            [each for each in laid_out[rank] if each and each.microbatch_index is not None] for rank in range(pp)
        ]
        return [
            [(each.computation_type.value, each.stage_index, each.microbatch_index) for each in rank]
            for rank in compute
        ]
    ranks: Any = [Noting(index, pp, 1) for index in range(pp)]
    for stage in ranks:
        kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
        kind(stage, micro_batches, loss_fn=torch.sum, scale_grads=False).step(return_outputs=False)
    return [stage.order for stage in ranks]


SHAPES = [
    ("gpipe", 4, 8, 1), ("1f1b", 4, 8, 1), ("1f1b", 8, 16, 1), ("gpipe", 3, 5, 1), ("1f1b", 2, 3, 1),
    ("interleaved_1f1b", 2, 4, 2), ("interleaved_1f1b", 4, 8, 2), ("interleaved_1f1b", 4, 8, 3),
    ("interleaved_1f1b", 8, 16, 4),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "pp", "micro_batches", "virtual_stages"), SHAPES)
def test_the_bubble_is_that_of_the_order_torch_lays_out(schedule, pp, micro_batches, virtual_stages):
    """Narayanan et al. 2021, section 2.2, as a part of the whole step: (p - 1) / (v m + p - 1)."""
    idle = idle_fraction(of_torch(schedule, pp, micro_batches, virtual_stages))
    assert idle == pytest.approx((pp - 1) / (virtual_stages * micro_batches + pp - 1), rel=1e-12)
    assert bubble_fraction(pp, micro_batches, virtual_stages) == pytest.approx(idle, rel=1e-12)


class Stages(pl.Callback):
    """Knows a rank's stages."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.stages = pl_module.parallel.pipeline.stages

    def buffers(self) -> int:
        """Return their number of receive buffers with memory."""
        tables = [table for each in self.stages for table in (each.args_recv_info, each.grad_recv_info)]
        given = [each.buffer for table in tables for infos in table.values() for each in infos]
        return sum(buffer is not None and buffer.device.type != "meta" for buffer in given)


def recorded_run(config: Any) -> tuple[list[Order], list[list[int]]]:
    """Return the passes of every rank's stages in the second step, and the number of receive buffers at each pass."""
    order: Order = []
    buffers: list[int] = []
    known = Stages()
    forward, backward = TrainStage.forward_one_chunk, TrainStage.backward_one_chunk

    @wraps(forward)
    def forward_noted(stage: TrainStage, chunk: int, *args: Any, **kwargs: Any) -> Any:
        order.append(("F", stage.stage_index, chunk))
        buffers.append(known.buffers())
        return forward(stage, chunk, *args, **kwargs)

    @wraps(backward)
    def backward_noted(stage: TrainStage, chunk: int, *args: Any, **kwargs: Any) -> None:
        order.append(("B", stage.stage_index, chunk))
        buffers.append(known.buffers())
        backward(stage, chunk, *args, **kwargs)

    TrainStage.forward_one_chunk, TrainStage.backward_one_chunk = forward_noted, backward_noted
    try:
        trainer = run_with(config, known, saves=False)
        assert known.buffers() == 0
    finally:
        TrainStage.forward_one_chunk, TrainStage.backward_one_chunk = forward, backward
    layout = trainer.strategy.layout
    half = len(order) // 2
    return layout.gather_over_stages(order[half:]), layout.gather_over_stages(buffers[half:])


@pytest.fixture
def words(small_run, tmp_path):
    def run(name: str, *more: str) -> list[str]:
        return small_run(
            tmp_path / name, "model.num_layers=4", "data.micro_batch_size=1", "data.global_batch_size=4",
            "checkpoint.every_steps=null", "precision.casts=eager", *more,
        )  # fmt: skip

    return run


@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=pytest.mark.full), "1f1b", "interleaved_1f1b"])
def test_a_recorded_step_has_the_bubble_that_plan_says(schedule, ranks, words):
    layout = "pp_interleaved" if schedule == "interleaved_1f1b" else "pp"
    config = compose_config(
        words("run", f"parallel={layout}", f"parallel.schedule={schedule}", "trainer.devices=2", *SHORT,
              "trainer.validate_every_steps=null")
    )  # fmt: skip
    orders, buffers = ranks(2).call(recorded_run, config)
    assert sum(len(order) for order in orders) == 2 * 4 * 2 * config.parallel.virtual_stages
    assert idle_fraction(orders) == pytest.approx(bubble_fraction(2, 4, config.parallel.virtual_stages), rel=1e-12)
    assert buffers == receives_waiting(config.parallel, 2, 4)  # of 4 micro-batches in both directions


class OverflowOnOneStage(pl.Callback):
    """Makes one gradient of the last block infinite, in one step."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: Any) -> None:
        named = dict(pl_module.model.named_parameters())
        if pl_module.completed_steps == 1 and (weight := named.get("layers.3.attention.q_proj.weight")) is not None:
            weight.grad[0, 0] = float("inf")


class InfiniteOperand(pl.Callback):
    """Makes an element of the gradient that the first block's q_proj is given infinite, in one step.

    Saturating casts make a number of it: no parameter's gradient shows it, and no other stage is given it.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        def spoiled(dy: torch.Tensor) -> torch.Tensor:
            dy = dy.clone()
            dy[0, 0, 0] = float("inf")
            return dy

        def after_forward(layer: Any, inputs: Any, y: torch.Tensor) -> None:
            if pl_module.completed_steps == 1 and y.requires_grad:
                y.register_hook(spoiled)

        if (layer := dict(pl_module.model.named_modules()).get("layers.0.attention.q_proj")) is not None:
            layer.register_forward_hook(after_forward, prepend=True)  # before the one that looks for it


def overflowing_run(config: Any, fault: type[pl.Callback]) -> dict[str, Any]:
    return traced_run(config, fault(), saves=False)


SATURATING = [f"precision.{gemm}.dy.{key}" for gemm in ("dgrad", "wgrad") for key in ("block=tensor", "scale=fp32")]
"""A scale per tensor, which is 1 where there is Inf: MXFP8's would be so large that products overflow again."""


@pytest.mark.parametrize(
    ("fault", "precision"),
    [
        pytest.param(OverflowOnOneStage, ["precision=fp16"], marks=pytest.mark.full),
        (InfiniteOperand, ["precision=fp16_mxfp8", *SATURATING]),
    ],
)
def test_an_overflow_on_one_stage_skips_the_step_on_all(fault, precision, ranks, words, tmp_path):
    precision = [*precision, "trainer.max_steps=3", "trainer.validate_every_steps=null"]
    pipeline = compose_config(words("ours", "parallel=pp", "trainer.devices=2", *precision))
    ours = ranks(2).call(overflowing_run, pipeline, fault)
    alone = ranks(1).call(overflowing_run, compose_config(words("alone", *precision)), fault)
    assert difference(ours, alone) is None
    records = [json.loads(line) for line in Path(tmp_path / "ours/run/metrics.jsonl").read_text().splitlines()]
    (skipped,) = [record for record in records if record.get("skipped")]
    assert skipped["step"] == 2
    assert math.isfinite(float(skipped["grad_norm"])) == (fault is InfiniteOperand)


class InfiniteLoss(pl.Callback):
    """Makes the loss infinite where it is computed: on the last stage alone."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.strategy.layout.coordinates.pp == 1:
            pl_module.parallel.loss_sum = lambda logits, labels: logits.float().sum() * float("inf")


def failing_run(config: Any) -> str:
    try:
        run_with(config, InfiniteLoss())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def test_a_loss_that_is_not_finite_ends_every_rank(ranks, words):
    said = ranks(2).call(failing_run, compose_config(words("run", "parallel=pp", "trainer.devices=2")))
    ranks(2).close()  # an error left its axes' groups as they were
    assert said.startswith("NonFiniteError"), said  # rank 0, on the stage without a loss


@pytest.mark.full
def test_a_sample_is_that_of_one_rank(ranks, words, tmp_path):
    sample = ["callbacks=default", "callbacks.sample.max_new_tokens=12", *SHORT]
    for name, world, layout in (("ours", 2, "pp_interleaved"), ("alone", 1, "single")):
        more = [f"parallel={layout}", f"trainer.devices={world}"]
        ranks(world).call(train, compose_config(words(name, *sample, *more)))
    text = Path(tmp_path / "ours/run/sample.txt").read_text()
    assert text == Path(tmp_path / "alone/run/sample.txt").read_text()
    assert text


def train(config: Any) -> None:
    run_with(config)


SPOILED = "layers.2.feed_forward.up_proj"


class SpoilOneWeight(pl.Callback):
    """Puts NaN into a weight of the second stage before the second step."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        named = dict(pl_module.model.named_parameters())
        if pl_module.completed_steps == 1 and (weight := named.get(f"{SPOILED}.weight")) is not None:
            with torch.no_grad():
                weight[0, 0] = float("nan")


def spoiled_run(config: Any) -> str:
    try:
        run_with(config, SpoilOneWeight(), QuantisationHealth(every_steps=1))
    except NonFiniteError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("layout", [pytest.param("pp", marks=pytest.mark.full), "pp_interleaved"])
def test_health_and_the_origin_of_nan_are_those_of_all_stages(layout, ranks, words, tmp_path):
    """Rank 0, which writes both, has the first stage; the second's weight was spoiled."""
    health = {}
    for name, world, place in (("ours", 2, layout), ("alone", 1, "single")):
        more = [f"parallel={place}", f"trainer.devices={world}", "precision=mxfp8"]
        said = ranks(world).call(spoiled_run, compose_config(words(name, *more)))
        ranks(world).close()  # as above
        assert f"first appeared in {SPOILED}, operand fprop.w, of micro-batch 0" in said
        health[name] = (tmp_path / name / "run" / "health.jsonl").read_text()
    assert health["ours"] == health["alone"]
    assert SPOILED in health["ours"]


@pytest.mark.parametrize("length", [1, 4, 5, 8])
def test_the_last_logits_are_of_the_last_token_and_of_no_padding(length, monkeypatch):
    """Under tp a length is padded to a multiple of the ranks; the logits of padding are nobody's."""
    monkeypatch.setattr(pipeline_module, "whole_vocabulary", lambda logits, layout: logits)
    whole = Pipeline.__new__(Pipeline)
    config = SimpleNamespace(max_sequence_length=8, padded_vocab_size=6)
    whole.stages = [
        SimpleNamespace(decoder=SimpleNamespace(config=config, token_shards=4, compute_dtype=torch.float32))
    ]
    whole.layout = SimpleNamespace(degrees=SimpleNamespace(width=2))
    seen = []

    def forward(tokens):
        seen.append(tokens.shape[1])
        return tokens[..., None].float().expand(-1, -1, 3)

    whole.forward = forward
    whole._from_last = lambda logits, shape, dtype: logits if logits.shape == shape else None
    tokens = torch.arange(1, 1 + 2 * length).view(2, length)
    assert whole.last_logits(tokens)[:, 0, 0].tolist() == tokens[:, -1].tolist()
    assert seen[0] % 4 == 0
