"""Casts and the loss as Inductor writes them for CUDA, compiled for sm_90 and sm_100 without a GPU, by Triton."""

import pytest

from gpu_check import precheck
from lightning_llm.config.schema.precision import CastConfig

MXFP8 = CastConfig(format="e4m3", block="1x32", scale="e8m0_ceil")


@pytest.mark.full
@pytest.mark.parametrize("capability", precheck.CAPABILITIES)
def test_a_block_scaled_cast_is_one_kernel_that_spills_nothing_and_contracts_nothing(capability, tmp_path):
    pytest.importorskip("triton", reason="pip install --no-deps -r requirements/precheck.txt")
    (source,) = precheck.triton_of(MXFP8, 1, capability)
    assert "tl.bfloat16" in source  # the rounding that a compiler may not leave out
    made = precheck.compiled(source, capability, tmp_path)
    assert (made.spilled_bytes, made.fuses) == (0, False)
    assert 0 < made.registers < 64


@pytest.mark.full
@pytest.mark.parametrize("capability", precheck.CAPABILITIES)
def test_the_compiled_loss_writes_no_logits_in_fp32(capability, tmp_path):
    pytest.importorskip("triton", reason="pip install --no-deps -r requirements/precheck.txt")
    sources = precheck.triton_of_loss(capability)
    made = [precheck.compiled(source, capability, tmp_path) for source in sources]
    assert [each.spilled_bytes for each in made] == [0] * 3  # rows, their sum, and the gradient
    assert [source.count("'*bf16'") for source in sources] == [1, 1, 2]  # logits are read thrice, the gradient written
