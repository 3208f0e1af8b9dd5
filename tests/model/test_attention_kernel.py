"""Attention kernels by name: the kernel that runs, equal results, and rejected settings. 2 s."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile

from lightning_llm.model.attention import kernel_choice as attention_kernel
from lightning_llm.model.attention.attention import dot_product_attention
from lightning_llm.model.attention.kernel_choice import (
    AttentionShape,
    NoKernelError,
    any_kernel,
    attention_by,
    document_mask,
    kernel_of,
)

CPU = torch.device("cpu")
OPERATORS = {
    "short": "lightning_llm::short_attention",
    "flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "math": "aten::_scaled_dot_product_attention_math",
}


def shape(tokens, *, masked=False, dtype=torch.bfloat16):
    return AttentionShape(4, 2, 16, tokens, masked, dtype)


def reference(q, k, v, mask):
    """Softmax attention in float64, written out."""
    q, k, v = (each.double().transpose(1, 2) for each in (q, k, v))
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if mask is None else mask
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "tokens"), [("auto", 40), ("auto", 520), ("short", 520), ("flash", 40), ("math", 40)])
def test_the_reported_kernel_is_the_one_that_runs(name, tokens, masked):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, tokens, heads, 16, generator=generator) for heads in (4, 2, 2))
    mask = document_mask((torch.arange(tokens) // 30).expand(2, -1)) if masked else None
    told = kernel_of(name, shape(tokens, masked=masked, dtype=torch.float32), CPU)
    with attention_by(name), profile(activities=[ProfilerActivity.CPU]) as recorded:
        found = dot_product_attention(q, k, v, mask)
    ran = {event.key for event in recorded.key_averages()}
    assert [each for each, operator in OPERATORS.items() if operator in ran] == [told]
    assert told == (name if name != "auto" else "short" if tokens <= 512 else "flash")
    torch.testing.assert_close(found.double(), reference(q, k, v, mask), rtol=1e-5, atol=1e-5)


def test_ranks_that_share_a_sequence_take_torchs_kernel():
    assert kernel_of("auto", shape(40, masked=True)._replace(shared=True), CPU) == "flash"


def test_the_chosen_kernel_ends_with_the_run_and_does_not_apply_to_caches():
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()

    def interrupted():
        with attention_by("flash"):
            assert not torch.backends.cuda.math_sdp_enabled()
            with any_kernel():
                assert torch.backends.cuda.math_sdp_enabled()
            assert not torch.backends.cuda.math_sdp_enabled()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()) == before
    assert attention_kernel._chosen == "auto"


def test_a_kernel_that_does_not_run_is_refused_in_torchs_words(monkeypatch):
    with pytest.raises(NoKernelError, match="No viable backend"):
        kernel_of("cudnn", shape(64), CPU)

    def refuses(*_, **__):
        attention_kernel.warnings.warn(
            "Flash attention does not support head_dim 512. (Triggered internally at x)", stacklevel=1
        )
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    monkeypatch.setattr(torch, "_fused_sdp_choice", refuses)
    with pytest.raises(NoKernelError, match=r"^Flash attention does not support head_dim 512. No available kernel"):
        kernel_of("flash", shape(64), CPU)


def test_flex_computes_masked_attention_or_the_reason_is_given(monkeypatch):
    """On CUDA, in compiled blocks; here the device is asked by name alone."""
    cuda, asked = SimpleNamespace(type="cuda"), []
    monkeypatch.setattr(attention_kernel, "flex_failure", lambda *_: asked.append(1))
    assert kernel_of("auto", shape(64, masked=True)._replace(compiled=True), cuda) == "flex"
    assert asked == [1]
    monkeypatch.setattr(attention_kernel, "flex_failure", lambda *_: "no Triton")
    with pytest.raises(NoKernelError, match="no Triton"):
        kernel_of("flex", shape(64, masked=True), cuda)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: SDPBackend.EFFICIENT_ATTENTION.value)
    told = kernel_of("auto", shape(64, masked=True)._replace(compiled=True), cuda)
    assert told == "efficient (flex fails here: no Triton)"
    assert kernel_of("auto", shape(64, masked=True), cuda) == "efficient"


def test_why_flex_does_not_run_is_torchs_reason():
    assert "backward on CPU" in attention_kernel.flex_failure(shape(64, masked=True, dtype=torch.float32), CPU)


def test_long_sequences_are_checked_in_part(monkeypatch):
    seen = []
    monkeypatch.setattr(
        torch, "_fused_sdp_choice", lambda q, k, v, mask, *_, **__: seen.append((q.shape, mask.shape)) or 1
    )
    assert kernel_of("auto", shape(1 << 20, masked=True), CPU) == "flash"
    assert seen == [((1, 4, 4096, 16), (1, 1, 4096, 4096))]
