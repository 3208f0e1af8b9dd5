"""Weights that are gathered as FP8 codes: the bits of those gathered in bf16, in half the bytes. 20 CPU seconds."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from test_bytes import measured, words_of
from torch.distributed.tensor import DTensor
from traced_run import Trace, difference, run_with, traced_run

from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.precision import slots_of
from lightning_llm.errors import ConfigError
from lightning_llm.plan.check import check_config
from lightning_llm.plan.memory import memory_bytes
from lightning_llm.plan.resolve import plan_of
from lightning_llm.plan.traffic import bytes_sent
from lightning_llm.precision.module import QuantisedLinear, quantised_layers
from lightning_llm.precision.quantize import quantise

FULL = pytest.mark.full
CODES = "precision.parameter_gather=quantised"
ALL_BLOCKS = ("precision.modules.first_blocks_high_precision=0", "precision.modules.last_blocks_high_precision=0")
PADDED = "model.ffn_hidden_size=129"  # of rows that no number of ranks divides


class Decoded(pl.Callback):
    """Counts the weights that were gathered as codes, by what a gather gives the layer."""

    def __init__(self) -> None:
        self.layers: set[str] = set()

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for layer in quantised_layers(pl_module.model):
            layer.register_forward_hook(self._look)

    def _look(self, layer: QuantisedLinear, *_: Any) -> None:
        source: Any = layer.plan.weight_casts
        if source is not None and source.gathered is not None:
            self.layers.add(layer.name)


def gathered_run(config: Config) -> tuple[Trace, int]:
    decoded = Decoded()
    trace = traced_run(config, decoded, saves=False)
    return trace, len(decoded.layers)


@pytest.mark.parametrize(
    ("layout", "world", "micro_batches", "precision", "more"),
    [
        ("zero3", 2, 4, "fp8_current", (*ALL_BLOCKS, PADDED)),
        pytest.param("zero2", 2, 4, "fp8_delayed", (PADDED,), marks=FULL),
        pytest.param("zero1", 4, 8, "fp8_current", ALL_BLOCKS, marks=FULL),
        pytest.param("hsdp", 4, 4, "fp8_current", (*ALL_BLOCKS, "precision.fprop.w.scale=power_of_two",
            "precision.dgrad.w.scale=power_of_two"), marks=FULL),
        pytest.param("fsdp_pp", 4, 4, "fp8_delayed", ("parallel.activation_checkpoint=full",), marks=FULL),
    ],
)  # fmt: skip
def test_it_trains_to_the_bits_of_a_run_that_gathers_bf16(
    layout, world, micro_batches, precision, more, ranks, matrix_run, alone
):
    """Curve, both views of validation, gradients and weights, over uneven shards, against a rank that gathers none."""
    config = matrix_run(layout, world, micro_batches, precision, *more, CODES)
    ours, layers = ranks(world).call(gathered_run, config)
    assert layers == 7 * config.model.num_layers // (2 if layout == "fsdp_pp" else 1)
    assert difference(ours, alone(micro_batches, precision, *more)) is None
