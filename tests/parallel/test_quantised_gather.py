"""Weights gathered as FP8 codes: the bits of those gathered in bf16, in half the bytes. 17 CPU seconds, 54 in full."""

from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.plan.check import check_config
from lightning_llm.plan.memory.rank_bytes import memory_bytes
from lightning_llm.plan.resolve import plan_of
from lightning_llm.plan.traffic import bytes_sent
from lightning_llm.precision.cast import inductor
from lightning_llm.precision.cast.quantize import quantize
from lightning_llm.precision.linear.gathered import GatheredWeight
from lightning_llm.precision.linear.module import QuantizedLinear, quantized_layers
from lightning_llm.precision.linear.plan import LinearPlan, WantedCast
from tests.parallel.test_bytes import measured, words_of
from tests.parallel.traced_run import Trace, difference, traced_run, whole

FULL = pytest.mark.full
CODES = "precision.parameter_gather=quantised"
ALL_BLOCKS = ("precision.modules.first_blocks_high_precision=0", "precision.modules.last_blocks_high_precision=0")
PADDED = "model.ffn_hidden_size=129"  # of rows that no number of ranks divides
WIDE = ("model.ffn_hidden_size=290",)  # ranks' shards of 145 rows cut blocks of 128, and the last block is a part


class Gathers(pl.Callback):
    """Compares the codes that come with those of the whole weight, and notes which layers multiply such numbers."""

    def __init__(self) -> None:
        self.layers: set[str] = set()
        self.compared, self.wrong = 0, list[str]()
        self._codes: dict[str, Tensor] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for layer in quantized_layers(pl_module.model):
            layer.register_forward_hook(self._look)
        gathers, decode = self, GatheredWeight.decode

        def compare(weight: GatheredWeight, codes: Tensor, into: Tensor, cast: CastConfig) -> None:
            decode(weight, codes, into, cast)
            wanted = gathers._codes.get(weight.layer.name)
            if wanted is not None:
                gathers.compared += 1
                gathers.wrong += [] if torch.equal(codes[: len(wanted)], wanted) else [weight.layer.name]

        self._restored = patch.object(GatheredWeight, "decode", compare)
        self._restored.start()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for layer in quantized_layers(pl_module.model):
            cast = layer.plan.casts["fprop.w"]
            delayed = None if cast.scale != "delayed" or layer.scale is None else layer.scale[1]
            if cast.scale != "delayed" or delayed is not None:
                self._codes[layer.name] = quantize(whole(layer.weight).bfloat16(), cast, delayed=delayed).codes

    def on_train_batch_end(self, *_: Any) -> None:
        self._codes.clear()

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._restored.stop()

    def _look(self, layer: QuantizedLinear, *_: Any) -> None:
        if layer.plan.weight_casts is not None and layer.plan.weight_casts.gathered is not None:
            self.layers.add(layer.name)


def gathered_run(config: Config) -> tuple[Trace, int, int, list[str]]:
    """Return the run, how many layers multiplied codes, how many gathers were compared, and which gave other codes."""
    gathers = Gathers()
    trace = traced_run(config, gathers, saves=False)
    return trace, len(gathers.layers), gathers.compared, gathers.wrong


@pytest.mark.parametrize(
    ("layout", "world", "micro_batches", "precision", "more"),
    [
        ("zero3", 2, 4, "fp8_current", (*ALL_BLOCKS, PADDED)),
        pytest.param("zero3", 2, 4, "fp8_subchannel", (*ALL_BLOCKS, *WIDE), marks=FULL),
        pytest.param("zero1", 4, 4, "fp8_subchannel_fp32scales", (*ALL_BLOCKS, *WIDE), marks=FULL),
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
    ours, layers, compared, wrong = ranks(world).call(gathered_run, config)
    assert layers == 7 * config.model.num_layers // (2 if layout == "fsdp_pp" else 1)
    assert compared >= 5 * layers
    assert wrong == []
    assert difference(ours, alone(micro_batches, precision, *more)) is None


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("zero3", ()),
        pytest.param("zero1", ("model.bias=true",), marks=FULL),
        pytest.param("fsdp_tp", ("model.num_kv_heads=2", "model.num_layers=6"), marks=FULL),
    ],
)
def test_half_the_bytes_of_what_is_cast_are_gathered_and_planned(layout, more, ranks, small_run, tmp_path):
    words = words_of(layout, "tree", "fp8_current", "precision.casts=eager", "model.num_layers=5", *more)
    world = 4 if layout == "fsdp_tp" else 2
    words += [f"trainer.devices={world}", "data.global_batch_size=4", "data.sequence_length=64"]
    config = compose_config(small_run(tmp_path, *words, CODES))
    sent, held, _ = ranks(world).call(measured, config)
    plan = plan_of(config)
    assert sent == {kind: size for kind, size in bytes_sent(plan).items() if size}
    assert held["parameters"] == memory_bytes(plan)["parameters"]
    high = bytes_sent(plan_of(compose_config(small_run(tmp_path, *words))))
    hidden, narrow, ffn = 32, (32 if "model.num_kv_heads=2" in more else 16), 258
    of_a_block = (2 * hidden + 2 * narrow + 3 * ffn) * hidden // (2 if layout == "fsdp_tp" else 1)
    of_a_block += 2 * hidden if layout == "fsdp_tp" else 0  # 129 rows of gate and up, which two ranks pad to 130
    gathers = {"zero3": 2 * 2, "zero1": 1, "fsdp_tp": 2 * 2}[layout]
    cast = config.model.num_layers - 2  # the recipe keeps the first and the last block high
    assert high["all_gather"] - sent["all_gather"] == gathers * cast * of_a_block // 2
    assert sent["all_reduce"] - high["all_reduce"] == 4 * 7 * cast * (2 if layout == "fsdp_tp" else 1)


@pytest.mark.full
def test_tensor_parallel_parts_travel_as_codes_of_the_whole(ranks, matrix_run):
    """The same bits as gathered in bf16, under the same layout."""
    words = ("fp8_current", *ALL_BLOCKS, "model.num_heads=2", "model.num_kv_heads=2", "trainer.max_steps=3")
    high = ranks(4).call(traced_run, matrix_run("fsdp_tp", 4, 4, *words))
    ours, layers, _, _ = ranks(4).call(gathered_run, matrix_run("fsdp_tp", 4, 4, *words, CODES))
    assert layers == 14
    assert difference(ours, high) is None


@pytest.mark.parametrize("ranks_of_weight", [1, 3, 5])
@pytest.mark.parametrize("keys", [
    {"block": "128x128", "scale": "fp32"}, {"block": "128x128", "scale": "power_of_two"},
    {"block": "32x32", "scale": "e8m0_ceil"}, {"block": "tensor", "scale": "fp32"},
])  # fmt: skip
def test_shards_that_cut_blocks_have_the_codes_and_operands_of_the_whole(keys, ranks_of_weight):
    """Also with a part of a block at the end, and on ranks without rows."""
    cast = CastConfig(format="e4m3", **keys)
    casts = dict.fromkeys(("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"), cast)
    layer = QuantizedLinear("a", torch.nn.Linear(200, 290, bias=False), LinearPlan(casts, "eager"))
    weight = torch.randn(290, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[140] *= 64
    gathered, rows = GatheredWeight(layer), -(-290 // ranks_of_weight)
    shards = [(weight[row : row + rows], row) for row in range(0, 290, rows)] + [(weight[:0], 290)]
    amaxes = [gathered.amax_of(shard, cast, row, 290) for shard, row in shards]
    gathered.amax = torch.stack(amaxes).amax(0)
    scaled = gathered.scales(weight[:0], cast)
    codes = torch.cat([gathered.codes(shard, cast, scaled, row) for shard, row in shards])
    assert torch.equal(codes, quantize(weight, cast).codes)
    values = torch.empty_like(weight)
    gathered.decode(codes, values, cast)
    gathered.gathered = scaled
    for slot, axis in (("fprop.w", 1), ("dgrad.w", 0)):
        ours = gathered.operand(WantedCast(slot, casts, False, lambda: values, lambda: None))
        theirs = inductor.operand(weight, cast, axis, "eager")
        assert torch.equal(ours.tensor, theirs.tensor)
        assert torch.equal(ours.dequantized(), theirs.dequantized())


REFUSED = [
    ("mxfp8", "zero3", "fprop.w has blocks of 1x32, along other axes for fprop and dgrad"),
    ("nvfp4", "zero3", "fprop.w is e2m1, which has no 8-bit codes"),
    ("fp8_delayed_micro_batch", "zero3", "moves with every micro-batch"),
    ("quartet", "zero3", "fprop.w is rotated"),
    ("bf16", "zero3", "the recipe casts no weights"),
    ("fp8_current", "ddp", "parallel=ddp shards no weights"),
]


@pytest.mark.parametrize(("precision", "layout", "why"), REFUSED)
def test_weights_that_codes_cannot_represent_are_rejected_with_the_reason(precision, layout, why):
    config = compose_config([f"precision={precision}", f"parallel={layout}", "trainer.devices=2", CODES])
    with pytest.raises(ConfigError, match=r"precision\.parameter_gather: ") as error:
        check_config(config)
    assert why in str(error.value)


def test_all_reasons_are_reported_and_the_hash_ignores_the_format_of_gathers():
    config = compose_config(["precision=mxfp8", "parallel=ddp", "trainer.devices=2", CODES])
    with pytest.raises(ConfigError) as error:
        check_config(config)
    assert len([each for each in error.value.problems if each.key == "precision.parameter_gather"]) == 2
    codes = compose_config(["precision=fp8_current", "parallel=zero3", "trainer.devices=2", CODES])
    high = compose_config(["precision=fp8_current", "parallel=zero3", "trainer.devices=2"])
    assert plan_of(codes).identity == plan_of(high).identity
    assert codes.precision.recipe_hash == high.precision.recipe_hash
