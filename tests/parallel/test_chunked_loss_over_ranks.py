"""The loss by chunks of rows under layouts: one rank's bits where it sees the same rows, and the bytes of the plan.

7 CPU seconds, 40 in full. What a chunk is, is made small in each process.
"""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest

from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.dry_run.rank import CPU, count_step
from lightning_llm.model import flops as loss_spec
from lightning_llm.model import loss as chunked_loss
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.memory.rank_bytes import memory_bytes
from lightning_llm.plan.resolve import plan_of
from tests.parallel.traced_run import Trace, difference, traced_run

FULL = pytest.mark.full


def small_chunks(logits: int) -> ExitStack:
    """Have at most so many `logits` at once, of however few rows."""
    stack = ExitStack()
    stack.enter_context(patch.dict(loss_spec.WHOLE_LOGITS, {"cpu": logits, "cuda": logits}))
    stack.enter_context(patch.object(loss_spec, "ROWS_PER_COLUMN", 0))
    return stack


def chunked_run(config: Config, logits: int) -> tuple[Trace, int]:
    """Return the run, and how many losses this rank took by chunks."""
    counted = [0]
    apply = chunked_loss._ChunkedLoss.apply

    def counting(*arguments: Any) -> Any:
        counted[0] += 1
        return apply(*arguments)

    with small_chunks(logits), patch.object(chunked_loss._ChunkedLoss, "apply", counting):
        return traced_run(config, saves=False), counted[0]


@pytest.mark.parametrize(
    ("layout", "world", "precision", "more"),
    [
        ("zero3", 2, "bf16", ("parallel.activation_checkpoint=selective",)),
        pytest.param("ddp", 4, "fp16", (), marks=FULL),
        pytest.param("zero1", 2, "mxfp8", ("model.tie_embeddings=true",), marks=FULL),
        pytest.param("hsdp", 4, "bf16", ("precision.wgrad_dtype=fp32",), marks=FULL),
    ],
)
def test_a_layout_trains_to_the_bits_of_one_rank(layout, world, precision, more, ranks, matrix_run):
    """Each micro-batch's rows are cut in the same way; another power of two in the loss scale changes no bit."""
    words = (precision, "trainer.max_steps=2", *more)
    ours, losses = ranks(world).call(chunked_run, matrix_run(layout, world, 4, *words), 10_000)
    one, _ = ranks(1).call(chunked_run, matrix_run("single", 1, 4, *words), 10_000)
    assert losses == 2 * 4 // world
    assert difference(ours, one) is None


@pytest.mark.full
@pytest.mark.parametrize(("layout", "world"), [("tp", 2), ("fsdp_tp", 4), ("fsdp_cp", 4)])
def test_gradients_are_those_of_whole_logits(layout, world, ranks, matrix_run):
    """Up to the order of sums over rows, in fp32: the ranks of a vocabulary take each chunk's sums together."""
    words = ("fp32", "model.num_heads=2", "model.num_kv_heads=2", "trainer.max_steps=1")
    config = matrix_run(layout, world, 4, *words)
    whole, none = ranks(world).call(chunked_run, config, 1 << 30)
    cut, losses = ranks(world).call(chunked_run, matrix_run(layout, world, 4, *words), 5_000)
    assert (none, losses > 0) == (0, True)
    for name, gradient in whole["gradients"][0].items():
        assert (cut["gradients"][0][name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def peaks(config: Config, logits: int) -> tuple[int, int]:
    """Return (peak bytes of this rank in a step, the plan's figure)."""
    with small_chunks(logits):
        plan = plan_of(config)
        counts = count_step(plan, Layout.from_config(plan.config.parallel, plan.degrees, CPU), None)
        return counts.peak_bytes, memory_bytes(plan)["total"]


@pytest.mark.parametrize(
    ("layout", "world", "more"),
    [
        ("zero3", 2, ()),
        pytest.param("single", 1, ("model.tie_embeddings=true", "precision.wgrad_dtype=fp32"), marks=FULL),
        pytest.param("tp", 2, ("model.num_kv_heads=2",), marks=FULL),
        pytest.param("single", 1, ("model.logit_cap=30.0",), marks=FULL),
    ],
)
def test_a_step_holds_what_is_planned(layout, world, more, ranks, small_run, tmp_path):
    """At its peak, in the loss: of 8 x 64 tokens over 8,192 ids, whole and an eighth at a time."""
    words = [f"parallel={layout}", "precision=bf16", "data.micro_batch_size=8", f"data.global_batch_size={16 * world}"]
    words += [f"trainer.devices={world}", "data.sequence_length=64", "model.vocab_size=8192", "model.num_heads=2"]
    config = compose_config(small_run(tmp_path, *words, *more))
    found = {
        limit: ranks(world).call(peaks, config, limit)
        for limit in (1 << 30, 64 * 8192 // (world if layout == "tp" else 1))
    }
    for counted, planned in found.values():  # plans count all of FSDP2's buffers at every moment
        assert planned == pytest.approx(counted, rel=0.15 if layout == "zero3" else 0.04)
    (whole, _), (cut, _) = found.values()
    assert cut < 0.7 * whole
