"""Casts of weights kept within a step, over ranks: the bits of a run that keeps none. 4 CPU seconds, 30 in full."""

from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_llm.config.schema import Config
from lightning_llm.plan.memory.rank_bytes import memory_at
from lightning_llm.plan.resolve import plan_of
from lightning_llm.precision.cast.quantize import Operand
from lightning_llm.precision.linear.module import quantized_layers
from lightning_llm.precision.linear.plan import KeptCasts, WantedCast
from tests.parallel.traced_run import Trace, difference, traced_run, unsaved_run

FULL = pytest.mark.full
ALL_BLOCKS = ("precision.modules.first_blocks_high_precision=0", "precision.modules.last_blocks_high_precision=0")


class Casts(pl.Callback):
    """Counts how often casts of weights were made and wanted in the first step, and the bytes that are kept of them."""

    def __init__(self) -> None:
        self.made, self.wanted, self.kept_bytes = Counter(), Counter(), 0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            return
        for layer in quantized_layers(pl_module.model):
            assert isinstance(layer.plan.weight_casts, KeptCasts)
            self._look(layer.plan.weight_casts)

    def _look(self, kept: KeptCasts) -> None:
        operand, end = kept.operand, kept.end_step

        def looked(wanted: WantedCast) -> Operand:
            before = len(kept.kept)
            made = operand(wanted)
            self.made[id(kept), wanted.slot] += len(kept.kept) > before
            self.wanted[id(kept), wanted.slot] += 1
            return made

        def weighed() -> None:
            self.kept_bytes += sum(each.tensor.untyped_storage().nbytes() for each in kept.kept.values())
            self.kept_bytes += sum(each.factor.nbytes for each in kept.kept.values() if each.factor is not None)
            end()
            del kept.operand, kept.end_step

        kept.operand, kept.end_step = looked, end

        def begin() -> None:
            KeptCasts.begin_step(kept)
            kept.end_step = weighed
            del kept.begin_step

        kept.begin_step = begin


def kept_run(config: Config) -> tuple[Trace, int, int, int]:
    """Return the run; of its first step how many casts were kept, and wanted, and the bytes of those that were kept."""
    casts = Casts()
    trace = traced_run(config, casts, saves=False)
    return trace, sum(casts.made.values()), sum(casts.wanted.values()), casts.kept_bytes


@pytest.mark.parametrize(
    ("layout", "world", "micro_batches", "precision", "more"),
    [
        ("zero2", 2, 4, "fp8_current", ()),
        pytest.param("ddp", 2, 4, "fp8_subchannel", ("model.hidden_size=128",), marks=FULL),
        pytest.param("zero1", 2, 4, "mxfp8", ("parallel.activation_checkpoint=full",), marks=FULL),
        pytest.param("tp", 2, 2, "nvfp4", ("model.num_heads=2", "model.num_kv_heads=2"), marks=FULL),
        pytest.param("cp", 2, 2, "fp8_delayed", (), marks=FULL),
        pytest.param("pp", 2, 4, "fp8_delayed", (), marks=FULL),
        pytest.param("pp_interleaved", 2, 4, "mxfp8", ("model.num_layers=4",), marks=FULL),
    ],
)  # fmt: skip
def test_it_trains_to_the_bits_of_a_run_that_keeps_none(
    layout, world, micro_batches, precision, more, ranks, matrix_run, alone
):
    """Curve, validation, gradients and weights; casts are made once and used often, in the bytes that are planned.

    The other run is a single rank's, where the layout trains to its bits, else one under the same layout.
    """
    more = (*ALL_BLOCKS, "trainer.max_steps=2", *more)
    config = matrix_run(layout, world, micro_batches, precision, *more, "precision.keep_weight_casts=true")
    ours, made, wanted, held = ranks(world).call(kept_run, config)
    more = (*more, "precision.keep_weight_casts=false")
    if layout in ("tp", "cp"):
        theirs = ranks(world).call(unsaved_run, matrix_run(layout, world, micro_batches, precision, *more))
    else:
        theirs = alone(micro_batches, precision, *more)
    assert difference(ours, theirs) is None
    plan = plan_of(config)
    layers = 7 * config.model.num_layers // plan.degrees.pp
    assert made == layers * (2 if precision == "mxfp8" else 1)
    assert wanted >= layers * 2 * plan.micro_batches
    assert held == memory_at(plan, 0).largest["weight_casts"]
