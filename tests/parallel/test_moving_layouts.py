"""Layouts that cut tensors: checkpoints to and from other layouts, an overflow on one rank, samples. 25 seconds."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_llm.config.compose import compose_config
from lightning_llm.linalg import local
from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.apply import apply_parallel
from lightning_llm.parallel.gathered_logits import GatheredLogits
from lightning_llm.parallel.pp import Pipeline, PipelinedDecoder
from tests.parallel.curve_limits import SHIPPED, exceeded, off
from tests.parallel.slow_weights import SlowWeights
from tests.parallel.traced_run import layout_here, traced_run

SHAPE = [
    "model.num_heads=4", "model.num_kv_heads=2", "data.global_batch_size=4", "data.micro_batch_size=2",
    "model.ffn_hidden_size=66",  # a part of 33 rows, which two ranks of FSDP2 pad to 34
]  # fmt: skip


@pytest.fixture
def run(ranks, small_run, tmp_path):
    def traced(name: str, layout: str, world: int, *words: str, function: Any = traced_run) -> dict[str, Any]:
        place = [f"parallel={layout}", f"trainer.devices={world}"]
        config = compose_config(small_run(tmp_path / name, *SHAPE, *place, *words))
        return ranks(world).call(function, config)

    return traced


FULL = pytest.mark.full
CHAINS = [
    ("fp32", [("fsdp_tp", 4), ("cp", 2), ("zero3", 2)], 2e-6),
    pytest.param("fp8_delayed", [("zero1", 2), ("fsdp_cp_tp", 4), ("tp", 2), ("single", 1)], 2e-4, marks=FULL),
    pytest.param("fp32", [("hsdp_tp", 8), ("fsdp_cp", 4), ("fsdp_pp_tp", 8)], 2e-6, marks=FULL),
    pytest.param("fp32", [("pp_interleaved", 2), ("pp_tp", 4), ("ddp_pp", 4), ("single", 1)], 2e-6, marks=FULL),
]
STAGED = ["model.num_layers=4", "model.tie_embeddings=true", "data.micro_batch_size=1", "data.global_batch_size=8"]
"""For chains through pipelines: four stages, and micro-batches enough for eight ranks."""


@pytest.mark.parametrize(("precision", "chain", "tolerance"), CHAINS, ids=lambda value: str(value)[:11])
def test_a_run_moves_between_cut_and_data_parallel_layouts(precision, chain, tolerance, run):
    """Two steps under each layout, then on from its checkpoint under the next; the curve is that of one rank."""
    words = [f"precision={precision}", "precision.casts=eager", "schedule.total_steps=8", "checkpoint.every_steps=2"]
    words += STAGED if any("pp" in layout for layout, _ in chain) else []
    words += ["trainer.validate_every_steps=2", *(["precision.compute_dtype=fp32"] if precision != "fp32" else [])]
    steps = 2 * len(chain)
    alone = run("alone", "single", 1, *words, f"trainer.max_steps={steps}")
    for index, (layout, world) in enumerate(chain):
        parts = run("parts", layout, world, *words, f"trainer.max_steps={2 * index + 2}", "resume=auto")
    assert len(parts["curve"]) == len(alone["curve"]) == steps + steps // 2
    for one, other in zip(parts["curve"], alone["curve"], strict=True):
        assert one[:2] == other[:2]
        assert [one[2], one[5]] == [
            None if v is None else pytest.approx(v, rel=tolerance) for v in (other[2], other[5])
        ]


def slowly_traced_run(config: Any) -> dict[str, Any]:
    """Train with slow weights in place of the synchronous algorithm, which has no state."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(config.chosen_algorithm), "build", lambda self, parameters, layout: SlowWeights(parameters, 3)
        )
        return traced_run(config)


def updates(traced: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [record for record in traced["curve"] if record[2] is not None]  # each leg ends with a validation


def test_an_algorithms_state_moves_between_layouts(run):
    """Its tensors and its number are saved between two moves; data-parallel layouts continue with one rank's bits."""
    words = ["precision.casts=eager", "checkpoint.every_steps=2"]
    words += ["schedule.total_steps=8", "trainer.validate_every_steps=null", "data.micro_batch_size=1"]

    alone = updates(run("alone", "single", 1, *words, "trainer.max_steps=6", function=slowly_traced_run))
    without = updates(run("without", "single", 1, *words, "trainer.max_steps=6"))
    assert without[:3] == alone[:3]
    assert without[3][2] != alone[3][2]
    for (layout, world), steps in zip([("zero3", 2), ("ddp", 4), ("single", 1)], (2, 4, 6), strict=True):
        more = [f"trainer.max_steps={steps}", "resume=auto"]
        parts = run("parts", layout, world, *words, *more, function=slowly_traced_run)
    assert updates(parts) == alone


@pytest.mark.full
def test_an_algorithms_state_moves_to_a_cut_layout(run):
    words = ["precision.casts=eager", "checkpoint.every_steps=2"]
    words += ["schedule.total_steps=8", "trainer.validate_every_steps=null", "data.micro_batch_size=1"]
    alone = updates(run("alone", "single", 1, *words, "trainer.max_steps=6", function=slowly_traced_run))
    run("cut", "zero3", 2, *words, "trainer.max_steps=2", function=slowly_traced_run)
    more = ["trainer.max_steps=6", "resume=auto"]
    cut = updates(run("cut", "fsdp_tp", 4, *words, *more, function=slowly_traced_run))
    assert cut[:2] == alone[:2]
    assert [one[2] for one in cut] == pytest.approx([one[2] for one in alone], rel=2e-6)


class InfinityOn(pl.Callback):
    """Puts Inf into one element of one rank's part of a gradient, in one step, before ranks sum theirs."""

    def __init__(self, rank: int, step: int):
        self.rank, self.step = rank, step

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.global_rank != self.rank:
            return
        weight = dict(pl_module.model.named_parameters())["layers.1.feed_forward.down_proj.weight"]

        def overflowing(grad: torch.Tensor) -> torch.Tensor:
            if pl_module.completed_steps == self.step:
                grad = grad.clone()
                local(grad)[0, 0] = float("inf")
            return grad

        weight.register_hook(overflowing)


def overflowing_run(config: Any) -> dict[str, Any]:
    return traced_run(config, InfinityOn(rank=config.trainer.devices - 1, step=2))  # which has the last layers


@pytest.mark.parametrize(
    ("layout", "world"), [("tp", 2), pytest.param("cp", 2, marks=FULL), pytest.param("pp_tp", 4, marks=FULL)]
)
def test_an_overflow_in_one_shard_skips_the_step_on_all(layout, world, run, tmp_path):
    words = ["precision=fp16", "precision.casts=eager", "trainer.max_steps=4"]
    ours = run("over", layout, world, *words, function=overflowing_run)
    alone = run("alone", "single", 1, *words, function=overflowing_run)
    assert exceeded(off(ours, alone), SHIPPED["fp16"]) == []
    records = [json.loads(line) for line in Path(tmp_path / "over/run/metrics.jsonl").read_text().splitlines()]
    steps = {record["step"]: record for record in records if "loss_scale" in record}
    assert [step for step, record in steps.items() if record.get("skipped")] == [3]
    assert steps[4]["loss_scale"] == steps[3]["loss_scale"] / 2


@pytest.mark.parametrize("layout", ["tp", pytest.param("cp", marks=FULL)])
def test_samples_are_those_of_one_rank(layout, run, tmp_path):
    words = ["callbacks=default", "callbacks.sample.max_new_tokens=9", "callbacks.sample.temperature=0"]
    words += ["callbacks.sample.top_k=null", "trainer.max_steps=2", "schedule.warmup_steps=1"]
    texts = []
    for place, world in (("single", 1), (layout, 2)):
        run(place, place, world, *words)
        texts.append(Path(tmp_path / place / "run" / "sample.txt").read_text())
    assert texts[0]
    assert texts[1] == texts[0]


def logits_after(config: Any, length: int) -> Any:
    """Return [1, 1, V]: what sampling sees after `length` tokens, before any training."""
    layout = layout_here(config.parallel)
    with torch.device("meta"):
        model = Decoder(config.model)
    syncs = apply_parallel(model, layout, config.precision, 1, config.data.sequence_length, torch.device("cpu"))
    pipeline = Pipeline(syncs, layout, config.data, 2, torch.device("cpu")) if layout.degrees.pp > 1 else None
    whole = GatheredLogits(model, layout) if pipeline is None else PipelinedDecoder(pipeline)
    with torch.no_grad():
        return whole(torch.arange(length)[None] % 300)


@pytest.mark.parametrize(
    ("layout", "world"), [("tp", 2), ("cp", 2), pytest.param("fsdp_cp_tp", 4, marks=FULL), ("pp_tp", 4)]
)
def test_any_number_of_tokens_has_the_logits_of_one_rank(layout, world, ranks, small_run, tmp_path):
    """33 tokens are the longest window: an odd number, which ranks do not share, so of 33 they see the last 32."""

    def after(layout: str, world: int, length: int) -> Any:
        place = [f"parallel={layout}", f"trainer.devices={world}", "model.max_sequence_length=33"]
        return ranks(world).call(logits_after, compose_config(small_run(tmp_path, *SHAPE, *place)), length)

    for length in (1, 7, 32):
        torch.testing.assert_close(after(layout, world, length), after("single", 1, length), rtol=1e-5, atol=1e-6)
    assert after(layout, world, 33).shape == (1, 1, after("single", 1, 33).shape[-1])
