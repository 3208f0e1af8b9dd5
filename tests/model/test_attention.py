"""The short-sequence attention on CPU against torch's own in fp64, and its derivative by gradcheck."""

import pytest
import torch
import torch.nn.functional as F

from lightning_llm.model.attention import cpu_kernel as attention_cpu
from lightning_llm.model.attention.attention import dot_product_attention, for_all_heads, torch_attention
from lightning_llm.model.attention.cpu_kernel import is_faster_here, short_attention
from lightning_llm.model.attention.kernel_choice import document_mask
from lightning_llm.model.attention.kinds import SHORT_KERNEL_TOKENS


def operands(length, kv_heads=2, dtype=torch.float64, batch=2, heads=4, size=6):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, length, count, size) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def mask_of(length):
    return document_mask(torch.stack([torch.arange(length) // 50, torch.arange(length) // 33]))


def plain(q, k, v, mask):
    """torch's attention, by its formula for the heads that share a key."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None).transpose(1, 2)


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 63, 64, 150])
def test_equals_torch_in_fp64(length, kv_heads, masked):
    q, k, v = operands(length, kv_heads)
    mask = mask_of(length) if masked else None
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine, expected = short_attention(q, k, v, mask), plain(q, k, v, mask)
    torch.testing.assert_close(mine, expected)
    for a, b in zip(
        torch.autograd.grad(mine, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_keys_for_all_heads_are_those_of_their_group(kv_heads):
    q, k, v = operands(70, kv_heads)
    mask, grad = mask_of(70), torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    spread = torch_attention(q, for_all_heads(k, 4), for_all_heads(v, 4), mask)
    grouped = torch_attention(q, k, v, mask)
    torch.testing.assert_close(spread, grouped)
    for a, b in zip(
        torch.autograd.grad(spread, (q, k, v), grad), torch.autograd.grad(grouped, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
def test_gradcheck_over_several_row_blocks(masked, monkeypatch):
    monkeypatch.setattr(attention_cpu, "ROWS", 3)
    q, k, v = operands(7, size=2)
    mask = mask_of(7) if masked else None
    assert torch.autograd.gradcheck(lambda *x: short_attention(*x, mask), (q, k, v))


def test_bf16_is_about_as_exact_as_torch():
    q, k, v = operands(200, dtype=torch.bfloat16, size=32)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = plain(*wide, None)
    exact = [exact, *torch.autograd.grad(exact, wide, grad)]

    def errors(attention):
        out = attention(q, k, v, None)
        assert out.dtype == torch.bfloat16
        results = [out, *torch.autograd.grad(out, (q, k, v), grad.bfloat16())]
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(results, exact, strict=True)]

    for mine, torchs in zip(errors(short_attention), errors(plain), strict=True):
        assert mine < 1.25 * torchs
        assert mine < 0.01


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
def test_operator_is_registered_right(masked):
    mask = mask_of(70) if masked else None
    torch.library.opcheck(torch.ops.lightning_llm.short_attention, (*operands(70, dtype=torch.float32), mask))


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_both_sides_of_the_length_limit_agree(kv_heads, masked):
    length = SHORT_KERNEL_TOKENS + 1
    q, k, v = operands(length, kv_heads, dtype=torch.float32)
    mask = mask_of(length) if masked else None
    assert not is_faster_here(q)
    assert is_faster_here(q[:, 1:])
    torch.testing.assert_close(
        dot_product_attention(q, k, v, mask), short_attention(q, k, v, mask), atol=1e-5, rtol=1e-5
    )
