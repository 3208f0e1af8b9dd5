"""The hand-written derivatives and the loss, against autograd, gradcheck and torch's own functions in fp64."""

import pytest
import torch
import torch.nn.functional as F

from lightning_llm.model import loss as loss_module
from lightning_llm.model.loss import compiled_loss_sum, next_token_loss_sum
from lightning_llm.model.norm import RMSNormZeroCentered, rms_norm
from lightning_llm.model.rope import apply_rope, rope_tables
from tests.model.model_shapes import LLAMA3_SCALING, llama


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_rope_turns_pairs_as_complex_numbers():
    config = llama(rope_scaling=LLAMA3_SCALING)
    positions = torch.arange(12)
    cosine, sine = (table.double() for table in rope_tables(config, positions))
    x = torch.randn(2, 12, 3, 16, generator=generator(), dtype=torch.float64)
    pairs = torch.complex(x[..., :8], x[..., 8:]) * torch.complex(cosine, sine)
    torch.testing.assert_close(apply_rope(x, cosine, sine), torch.cat([pairs.real, pairs.imag], dim=-1))
    torch.testing.assert_close(cosine.square() + sine.square(), torch.ones_like(sine), atol=1e-6, rtol=0)


def test_rope_gradient():
    config = llama(head_dim=4)
    cosine, sine = (table.double() for table in rope_tables(config, torch.arange(6).expand(2, 6)))
    x = torch.randn(2, 6, 2, 4, generator=generator(), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: apply_rope(t, cosine, sine), (x,))


@pytest.mark.parametrize("positions", [torch.arange(12), torch.arange(12).expand(5, 12)], ids=["shared", "own"])
@pytest.mark.parametrize("sequences", [1, 5])
def test_rope_has_the_same_bits_however_tables_are_spread(positions, sequences):
    tables = rope_tables(llama(head_dim=24), positions[:sequences] if positions.ndim == 2 else positions)
    x = torch.randn(sequences, 12, 3, 24, generator=generator())
    rows = [apply_rope(x[b : b + 1], *(t[b : b + 1] if t.ndim == 4 else t for t in tables)) for b in range(sequences)]
    assert torch.equal(apply_rope(x, *tables), torch.cat(rows))
    exact = torch.complex(*(half.double() for half in x.chunk(2, -1))) * torch.complex(*(t.double() for t in tables))
    torch.testing.assert_close(apply_rope(x, *tables), torch.cat([exact.real, exact.imag], -1).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_has_the_bits_of_torchs(dtype):
    """Within a residual stream: in fp32 torch adds the terms of a gradient one by one to what is there."""
    x = torch.randn(3, 33, 96, generator=generator()).to(dtype)
    weight, grad = torch.rand(96, generator=generator(1)).to(dtype), torch.randn(x.shape, generator=generator(2))
    found = []
    for norm in (lambda t, w: rms_norm(t, w, 1e-5), lambda t, w: F.rms_norm(t, (96,), w, 1e-5)):
        inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = inputs[0] + norm(*inputs)
        found.append((out, *torch.autograd.grad(out, inputs, grad.to(dtype))))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_a_zero_centered_norm_rounds_once():
    """In bf16 off by at most one rounding, 2^-8, from float64; 1 + weight in bf16 alone would be another."""
    norm = RMSNormZeroCentered(192, 1e-6)
    norm.weight.data = torch.randn(192, generator=generator()).mul(0.02).bfloat16().float()
    x = torch.randn(16, 192, generator=generator(1)).bfloat16()
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + norm.weight.double())
    torch.testing.assert_close(norm(x).double(), expected, rtol=1.001 * 2**-8, atol=0)


@pytest.fixture(params=[7, 1 << 20], ids=["row_by_row", "one_chunk"])
def chunk_elements(request, monkeypatch):
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", request.param)


def labelled(dtype, scale=3.0):
    logits = torch.randn(2, 9, 13, generator=generator(), dtype=torch.float64).mul(scale).to(dtype).requires_grad_()
    labels = torch.randint(13, (2, 9), generator=generator(1))
    labels[0, 3] = labels[1, :4] = -100
    return logits, labels


@pytest.mark.usefixtures("chunk_elements")
def test_loss_gradcheck():
    logits, labels = labelled(torch.float64)
    assert torch.autograd.gradcheck(lambda x: next_token_loss_sum(x, labels), (logits,))


@pytest.mark.usefixtures("chunk_elements")
@pytest.mark.parametrize(
    ("compiled", "dtype", "tolerance"),
    [
        (False, torch.float32, 1e-6),
        (False, torch.bfloat16, 2**-8),
        pytest.param(True, torch.float32, 1e-6, marks=pytest.mark.full),
        pytest.param(True, torch.bfloat16, 2**-8, marks=pytest.mark.full),
    ],
)
def test_loss_is_cross_entropy_in_high_precision(compiled, dtype, tolerance):
    loss_sum = compiled_loss_sum() if compiled else next_token_loss_sum
    logits, labels = labelled(dtype, scale=8.0)
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="sum")
    (expected * 0.25).backward()
    loss = loss_sum(logits, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, atol=0, rtol=1e-6)  # also in bf16: only the input is rounded
    (loss * 0.25).backward()
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=1e-7, rtol=tolerance)
    assert not logits.grad[labels == -100].any()


def test_a_row_of_ignored_labels_alone_counts_nothing():
    logits = torch.randn(1, 4, 13, generator=generator(), requires_grad=True)
    loss = next_token_loss_sum(logits, torch.full((1, 4), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert not logits.grad.any()
