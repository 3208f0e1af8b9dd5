"""`wgrad_dtype: fp32` over ranks: the bits of one rank, in the bytes that are planned. 9 CPU seconds, 90 in full."""

import pytest
import torch

from lightning_llm.config.compose import compose_config
from lightning_llm.plan.memory.rank_bytes import memory_bytes
from lightning_llm.plan.resolve import plan_of
from lightning_llm.plan.traffic import bytes_sent
from tests.parallel.layout_matrix import Case, layers_of, length_of
from tests.parallel.test_bytes import HELD, measured, words_of
from tests.parallel.traced_run import difference, traced_run

FULL = pytest.mark.full
UNROUNDED = "precision.wgrad_dtype=fp32"


@pytest.mark.parametrize(
    ("case", "more"),
    [
        (Case("zero3", 2, 4, "mxfp8", "selective"), ()),
        pytest.param(Case("zero1", 4, 8, "bf16"), ("model.tie_embeddings=true",), marks=FULL),
        pytest.param(Case("hsdp", 4, 8, "nvfp4", "full"), (), marks=FULL),
        pytest.param(Case("ddp", 2, 4, "quartet"), (), marks=FULL),
        pytest.param(Case("fsdp_pp", 4, 4, "fp8_delayed"), (), marks=FULL),
        pytest.param(Case("ddp", 2, 4, "mxfp8"), ("parallel.compile=true",), marks=FULL),
        pytest.param(Case("zero3", 2, 4, "bf16"), ("parallel.compile=true",), marks=FULL),  # gathered as they are
    ],
    ids=str,
)
def test_a_layout_trains_to_the_bits_of_one_rank(case, more, to_the_bits):
    to_the_bits(case, UNROUNDED, layers_of(case.precision), *length_of(case.precision), *more)


@pytest.mark.full
def test_codes_are_gathered_all_the_same(ranks, matrix_run, alone):
    words = (UNROUNDED, "precision.modules.first_blocks_high_precision=0", "model.ffn_hidden_size=129")
    config = matrix_run("zero3", 2, 4, "fp8_current", *words, "precision.parameter_gather=quantised")
    ours = ranks(2).call(traced_run, config)
    assert difference(ours, alone(4, "fp8_current", *words)) is None


def whole_numbers(gradients):
    """Return the share of elements that have a bit of fp32's last 8: sums of few bf16 numbers seldom do."""
    matrices = [each for name, each in gradients.items() if each.dim() == 2 and "embedding" not in name]
    bits = torch.cat([each.flatten() for each in matrices]).view(torch.int32)
    return float(((bits & 0xFF) != 0).float().mean())


@pytest.mark.full
@pytest.mark.parametrize(("layout", "world"), [("tp", 2), ("fsdp_tp", 4), ("fsdp_cp", 4)])
def test_cut_weights_have_gradients_that_are_not_rounded(layout, world, ranks, matrix_run):
    words = ("model.num_heads=2", "model.num_kv_heads=2", "trainer.max_steps=1")
    found = [
        ranks(world).call(traced_run, matrix_run(layout, world, 2, "bf16", *words, *more))["gradients"][0]
        for more in ((), (UNROUNDED,))
    ]
    assert whole_numbers(found[0]) < 0.5 < 0.95 < whole_numbers(found[1])
    for name, gradient in found[1].items():
        assert (gradient - found[0][name]).norm() <= 2**-7 * gradient.norm(), name


@pytest.mark.parametrize(("layout", "tied"), [("zero3", "false"), pytest.param("zero1", "true", marks=FULL)])
def test_masters_are_gathered_as_they_are_and_planned(layout, tied, ranks, small_run, tmp_path):
    """FSDP2 gives a gradient the dtype of the gathered parameter: 4 bytes, not 2, if it is cast on use."""
    words = [*words_of(layout, "tree", "bf16", f"model.tie_embeddings={tied}"), "trainer.devices=2"]
    words += ["data.global_batch_size=4"]
    config = compose_config(small_run(tmp_path, *words, UNROUNDED))
    sent, held, _ = ranks(2).call(measured, config)
    plan = plan_of(config)
    assert sent == {kind: size for kind, size in bytes_sent(plan).items() if size}
    kinds = [kind for kind in HELD if kind != "gathered"]
    assert {kind: held.get(kind, 0) for kind in kinds} == {kind: memory_bytes(plan)[kind] for kind in kinds}
    rounded = bytes_sent(plan_of(compose_config(small_run(tmp_path, *words))))
    assert sent["reduce_scatter" if "reduce_scatter" in sent else "all_to_all"] == (
        rounded["reduce_scatter"] or rounded["all_to_all"]
    )
    assert rounded["all_gather"] < sent["all_gather"] <= 2 * rounded["all_gather"]
