"""Gradients sent as codes: messages against `quantize`, sums of ranks against NumPy, bytes against the plan."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.parallel import coded_sums
from lightning_llm.parallel.coded_sums import encode_message, sum_messages
from lightning_llm.plan.check import check_config
from lightning_llm.plan.gradient_codes import message_bytes
from lightning_llm.plan.memory.units import units_of
from lightning_llm.plan.resolve import plan_of
from lightning_llm.plan.traffic import bytes_sent
from lightning_llm.precision.cast.quantize import quantize
from tests.parallel.test_bytes import measured, words_of
from tests.parallel.test_tree import by_definition
from tests.parallel.traced_run import traced_run

FULL = pytest.mark.full
CODES = "precision.gradient_reduction={format: e4m3, block: 1x128, scale: e8m0_ceil}"


def gradients(ranks: int, elements: int) -> torch.Tensor:
    """Return [ranks, elements] of many magnitudes."""
    generator = torch.Generator().manual_seed(ranks)
    scale = 10.0 ** torch.randint(-9, 2, (ranks, elements), generator=generator)
    return torch.randn(ranks, elements, generator=generator) * scale


@pytest.mark.parametrize(
    ("format", "block", "scale"),
    [
        ("e4m3", "1x128", "e8m0_ceil"),
        ("e5m2", "1x64", "fp32"),
        ("e2m1", "1x32", "power_of_two"),
        ("e2m1", "1x32", "e8m0_floor"),
        ("int8", "1x128", "fp32"),
        ("int4", "1x2", "fp32"),
    ],
)
def test_messages_are_the_cast_gradients_summed_by_the_tree(format, block, scale):
    cast = CastConfig(format=format, block=block, scale=scale)
    for ranks, elements in ((2, 1), (3, 300), (5, 1024)):
        x = gradients(ranks, elements)
        expected = by_definition([quantize(row[None], cast).dequantized[0] for row in x])
        with patch.object(coded_sums, "ELEMENTS_AT_ONCE", 256):  # several pieces, the last one shorter
            messages = torch.stack([encode_message(row, cast) for row in x])
            assert torch.equal(sum_messages(messages, elements, cast), expected)
        assert messages.shape == (ranks, message_bytes(cast, elements))


@pytest.mark.parametrize("scale", ["fp32", "power_of_two", "e8m0_ceil", "e8m0_floor", "e8m0_even"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_an_overflow_reaches_the_sum(scale, value):
    cast = CastConfig(format="e4m3", block="1x4", scale=scale)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, value, 0.0, 0.0])
    found = sum_messages(torch.stack([encode_message(each, cast) for each in (torch.ones(8), x)]), 8, cast)
    assert found.isfinite().tolist() == [True] * 4 + [False] * 4


def in_e4m3(x: np.ndarray, width: int) -> np.ndarray:
    """Return [ranks, n] fp32 rounded to E4M3 times a power of two per `width` elements: the definition, in fp64."""
    blocks = np.pad(x.astype(np.float64), ((0, 0), (0, -x.shape[1] % width))).reshape(len(x), -1, width)
    amax = np.abs(blocks).max(2, keepdims=True)
    power = np.exp2(np.ceil(np.log2(np.where(amax > 0, amax, 1) / 448)).clip(-127, 127))
    codes = torch.from_numpy((blocks / power).astype(np.float32)).to(torch.float8_e4m3fn)
    return (codes.double().numpy() * power).astype(np.float32).reshape(len(x), -1)[:, : x.shape[1]]


def recorded(config: Config) -> tuple[list[str], int, int]:
    """Train; return wrong sums of rank 0, their number, and the elements of its parts."""
    wrong, sums, elements = [], 0, 0
    scatter = coded_sums.coded_reduce_scatter

    def compare(tensor, group, cast):
        nonlocal sums, elements
        inputs = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(inputs, tensor.clone(), group=group)
        part = yield from scatter(tensor, group, cast)
        ours = torch.stack([each.view(group.size(), -1)[group.rank()] for each in inputs]).numpy()
        expected = by_definition(list(torch.from_numpy(in_e4m3(ours, 128))))
        wrong.extend([] if torch.equal(part, expected) else [f"sum {sums}: {(part - expected).abs().max():g}"])
        sums, elements = sums + 1, elements + len(part)
        return part

    with patch.object(coded_sums, "coded_reduce_scatter", compare):
        traced_run(config, saves=False)
    return wrong, sums, elements


@pytest.mark.parametrize(
    ("layout", "turns"),
    [("ddp", 1), ("zero2", 2), pytest.param("zero1", 2, marks=FULL), pytest.param("zero3", 2, marks=FULL)],
)
def test_ranks_sum_what_the_codes_stand_for(layout, turns, ranks, matrix_run):
    """ZeRO-2 and 3 send each micro-batch, DDP and ZeRO-1 the rank's sum over the step."""
    config = matrix_run(layout, 2, 2 * turns, "bf16", "trainer.max_steps=2", CODES)
    wrong, sums, elements = ranks(2).call(recorded, config)
    assert wrong == []
    times = 2 * (turns if layout in ("zero2", "zero3") else 1)
    assert elements >= times * units_of(config.model).shard(2)
    assert sums % times == 0


@pytest.mark.parametrize("layout", ["zero3", pytest.param("ddp", marks=FULL), pytest.param("zero1", marks=FULL)])
def test_a_quarter_of_the_bytes_is_sent_and_planned(layout, ranks, small_run, tmp_path):
    words = words_of(layout, "tree", "fp32", "data.sequence_length=64", "trainer.devices=2", "data.global_batch_size=4")
    config = compose_config(small_run(tmp_path, *words, CODES))
    sent, _, _ = ranks(2).call(measured, config)
    planned = bytes_sent(plan_of(config))
    plain = bytes_sent(plan_of(compose_config(small_run(tmp_path, *words))))
    if layout == "ddp":  # buckets are padded to whole blocks
        assert sent["all_gather"] == planned["all_gather"]
        assert abs(sent["all_to_all"] - planned["all_to_all"]) <= 2 * 129
    else:
        assert sent == {kind: size for kind, size in planned.items() if size}
    assert planned["all_to_all"] / plain["all_to_all"] == pytest.approx(129 / 128 / 4, rel=0.01)
    assert planned["all_gather"] == plain["all_gather"]


@pytest.mark.parametrize(
    ("layout", "cast", "key"),
    [
        ("single", {}, "precision.gradient_reduction: "),
        ("hsdp", {}, "dp_replicate=2 and dp_shard=2 sum"),
        ("fsdp_tp", {}, "tp=2 cuts"),
        ("fsdp_cp", {}, "cp=2 cuts"),
        ("pp", {}, "pp=4 cuts"),
        ("zero2 parallel.ep=2 model=moe_tiny", {}, "ep=2 cuts"),
        ("zero1", {"format": "e2m3"}, r"precision.gradient_reduction.format=e2m3: must have codes of 4 or 8 bits"),
        ("zero1", {"block": "128x128"}, "precision.gradient_reduction.block=128x128: "),
        ("zero1", {"block": "1x16", "format": "e2m1", "scale": "two_level_e4m3"}, "'two_level_e4m3': must follow"),
        ("zero1", {"scale": "delayed"}, "scale='delayed': must follow from the block alone"),
        ("zero1", {"scale": "e8m0_cel"}, "Did you mean 'e8m0_ceil'"),
    ],
)
def test_what_cannot_be_summed_from_codes_is_refused(layout, cast, key):
    values = {"format": "e4m3", "block": "1x128", "scale": "e8m0_ceil"} | cast
    given = ", ".join(f"{name}: {value}" for name, value in values.items())
    words = [*f"model=llama_tiny parallel={layout}".split(), f"trainer.devices={1 if layout == 'single' else 4}"]
    with pytest.raises(ConfigError, match=key):
        check_config(compose_config([*words, f"precision.gradient_reduction={{{given}}}"]))


def test_native_sums_are_refused_and_auto_takes_the_tree():
    words = ["model=llama_tiny", "parallel=zero1", "world=16", "trainer.devices=8", "data.global_batch_size=64", CODES]
    with pytest.raises(ConfigError, match=r"parallel\.reduction: is native"):
        check_config(compose_config([*words, "parallel.reduction=native"]))
    assert plan_of(compose_config(words)).config.parallel.reduction == "tree"


def test_coded_gradients_are_part_of_the_recipe():
    plain, coded = (compose_config(["precision=bf16", *more]).precision for more in ((), (CODES,)))
    assert plain.recipe_hash != coded.recipe_hash
    assert "gradient_reduction" not in plain.model_dump()
