"""Gated linear attention against the paper's recurrence, written out token by token. 15 seconds.

`recurrence` is equation 3 of arXiv:2312.06635 with per-element gates, in torch operations that autograd differentiates:
nothing of it is the package's.
"""

import math
import re
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_llm.config.compose import compose_config
from lightning_llm.model import gla as gla_chunked
from lightning_llm.model.gla import continue_from, gated_linear_attention
from lightning_llm.model.structure import shape_problems
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.divisibility import sharding_problems
from tests.model.model_shapes import build, llama, tokens_of


def recurrence(q, k, v, g, document_ids=None):
    """Return o_t = q_t S_t / sqrt(K), S_t = diag(exp g_t) S_(t-1) + k_t^T v_t, S = 0 before each document."""
    batch, length, heads, width = q.shape
    state, outputs = q.new_zeros(batch, heads, width, v.shape[-1]), []
    for t in range(length):
        if document_ids is not None and t > 0:
            same = document_ids[:, t] == document_ids[:, t - 1]
            state = torch.where(same[:, None, None, None], state, torch.zeros_like(state))
        state = g[:, t].exp()[..., None] * state + k[:, t][..., None] * v[:, t][..., None, :]
        outputs.append((q[:, t][..., None] * state).sum(-2) / math.sqrt(width))
    return torch.stack(outputs, dim=1)


def operands(length, heads=2, keys=3, values=5, batch=2, seed=0, dtype=torch.float64, gates=1.0):
    generator = torch.Generator().manual_seed(seed)

    def draw(width):
        return torch.randn(batch, length, heads, width, generator=generator, dtype=torch.float64)

    q, k, v, gk = draw(keys), draw(keys), draw(values), draw(keys) * gates
    return [each.to(dtype).requires_grad_() for each in (q, k, v, F.logsigmoid(gk) / 16)]


def documents_of(length, cuts, batch=2):
    """Return ids `[batch, length]` that change at `cuts`, at other places in the second sequence, and come again."""
    ids = torch.zeros(batch, length, dtype=torch.int64)
    for cut in cuts:
        ids[0, cut % length :] ^= 1
        ids[1, (7 * cut + 3) % length :] ^= 1
    return ids


def both(given_operands, document_ids):
    """Return (outputs, gradients) of the chunked form and of the recurrence, for one random gradient."""
    found = []
    for function in (gated_linear_attention, recurrence):
        o = function(*given_operands, document_ids)
        weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(o.dtype)
        found.append((o, *torch.autograd.grad(o, given_operands, weights)))
    return found


def assert_close(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        scale = other.abs().max().clamp(min=1.0)
        assert ((one - other).abs().max() / scale).item() <= tolerance


@settings(max_examples=40)
@given(
    st.integers(1, 150),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 6),
    st.one_of(st.none(), st.lists(st.integers(0, 149), max_size=12)),
    st.sampled_from([0.1, 1.0, 30.0, 3000.0]),
    st.integers(0, 99),
)
@example(150, 2, 3, 5, [100], 1.0, 0)  # three chunks: no state passes the second, in which a document begins
@example(192, 1, 2, 2, [64, 128], 1.0, 1)  # documents that begin with a chunk
def test_chunks_equal_the_recurrence(length, heads, keys, values, cuts, gates, seed):
    """Outputs and all gradients, over uneven lengths, documents (of one token, too) and gates that forget at once."""
    ids = None if cuts is None else documents_of(length, cuts)
    found, expected = both(operands(length, heads, keys, values, seed=seed, gates=gates), ids)
    assert_close(found, expected, 1e-12)


def test_in_fp32_no_gate_overflows():
    """Over 64 tokens of 200 each exp(-b) would be far beyond fp32: the reason for secondary chunks."""
    q, k, v, _ = operands(200, keys=8, dtype=torch.float32)
    for logit in (-3200.0, -100.0, 0.0, 100.0):
        g = torch.full_like(q, F.logsigmoid(torch.tensor(logit)) / 16).detach().requires_grad_()
        found, expected = both([q, k, v, g], None)
        assert all(each.isfinite().all() for each in found)
        assert_close(found, expected, 2e-5)


def test_16_bit_operands_are_computed_in_fp32():
    q, k, v, g = operands(100, keys=16, values=16)
    low = [each.detach().bfloat16() for each in (q, k, v)]
    mixed = gated_linear_attention(*low, g.detach().float(), None)
    exact = recurrence(*(each.double() for each in low), g.detach())
    assert mixed.dtype == torch.bfloat16
    assert ((mixed.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
def test_gradcheck(documents, monkeypatch):
    monkeypatch.setattr(gla_chunked, "CHUNK", 32)
    given_operands = operands(37, heads=1, keys=2, values=2, batch=1)
    ids = documents_of(37, [5, 20, 21])[:1] if documents else None
    assert torch.autograd.gradcheck(lambda *x: gated_linear_attention(*x, ids), given_operands)


def test_the_operator_is_registered_right():
    given_operands = (*operands(20, dtype=torch.float32), documents_of(20, [4]))
    torch.library.opcheck(torch.ops.lightning_llm.gated_linear_attention, given_operands)


@pytest.mark.parametrize("parts", [[1] * 40, [17, 1, 1, 21], [40], [39, 1]], ids=str)
def test_a_state_carries_on(parts):
    given_operands = [each.detach() for each in operands(40)]
    state, outputs = None, []
    for part in zip(*(each.split(parts, dim=1) for each in given_operands), strict=True):
        o, state = continue_from(state, *part)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), recurrence(*given_operands), rtol=0, atol=1e-12)


def gla(**changes):
    return llama(**({"layers": ["gla"]} | changes))


def layer_by_hand(layer, x, heads, ids=None):
    """Return the layer's output for `x`, computed like fla-org's GatedLinearAttention without short convolutions."""
    weights = dict(layer.named_parameters())

    def project(name):
        bias = weights.get(f"{name}.bias")
        return x @ weights[f"{name}.weight"].T + (0 if bias is None else bias)

    def by_head(y):
        return y.unflatten(-1, (heads, -1))

    down = weights["gk_down_proj.weight"]
    gk = x @ down.T @ weights["gk_up_proj.weight"].T + weights["gk_up_proj.bias"]
    g = torch.log(torch.sigmoid(gk)) / 16
    o = recurrence(*map(by_head, (project("q_proj"), project("k_proj"), project("v_proj"), g)), ids)
    o = o / torch.sqrt(o.square().mean(-1, keepdim=True) + 1e-5) * weights["g_norm.weight"]
    gate = project("g_proj")
    return (o.flatten(2) * gate * torch.sigmoid(gate)) @ weights["o_proj.weight"].T


@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
def test_the_layer_is_the_published_one(documents):
    layer = build(gla(num_layers=1), dtype=torch.float64).double().layers["0"].attention
    torch.nn.init.normal_(layer.gk_up_proj.bias)
    torch.nn.init.normal_(layer.g_norm.weight)
    x = torch.randn(2, 70, 64, dtype=torch.float64, requires_grad=True)
    ids = documents_of(70, [10, 33]) if documents else None
    wanted = [x, *layer.parameters()]
    found = layer(x, None, ids)
    expected = layer_by_hand(layer, x, 4, ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(each.square().sum(), wanted) for each in (found, expected)]
    assert_close(*gradients, 1e-12)


def test_token_by_token_equals_the_whole_sequence():
    """`step` with a cache, a prompt first and then token by token, against one pass, in fp64."""
    layer = build(gla(num_layers=1), dtype=torch.float64).double().layers["0"].attention
    x = torch.randn(2, 50, 64, dtype=torch.float64)
    cache = layer.new_cache(2, 50)
    with torch.no_grad():
        steps = [layer.step(part, None, cache) for part in x.split([21] + [1] * 29, dim=1)]
        torch.testing.assert_close(torch.cat(steps, 1), layer(x, None, None), rtol=0, atol=1e-12)
    assert cache.state.shape == (2, 4, 8, 16)


def test_a_cached_state_is_fp32_for_every_activation_dtype():
    layer = build(gla(num_layers=1), dtype=torch.bfloat16).layers["0"].attention
    cache = layer.new_cache(2, 8)
    assert layer.step(torch.randn(2, 3, 64).bfloat16(), None, cache).dtype == torch.bfloat16
    assert cache.state.dtype == torch.float32


def test_documents_in_one_sequence_equal_documents_run_apart():
    config = gla(num_layers=2, layers=["gla", "attention"])
    model, tokens = build(config), tokens_of(config, batch=1, length=90)
    positions = torch.cat([torch.arange(40), torch.arange(50)])
    ids = torch.cat([torch.zeros(40), torch.ones(50)]).long()[None]
    together = model(tokens, positions, ids)
    apart = torch.cat([model(part) for part in tokens.split([40, 50], dim=1)], dim=1)
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)


class _Largest(TorchDispatchMode):
    """Finds the largest bool or floating tensor with both of its last two sizes equal to the length."""

    def __init__(self, length):
        super().__init__()
        self.length, self.found = length, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape[-2:] == (self.length, self.length):
            self.found.append(str(function))
        return result


@contextmanager
def no_square(length):
    with _Largest(length) as mode:
        yield
    assert mode.found == []


def test_no_mask_of_all_pairs_is_made_for_gla_alone():
    config = gla()
    ids = documents_of(150, [20, 90])
    with no_square(150):
        build(config)(tokens_of(config), document_ids=ids).sum().backward()
    with pytest.raises(AssertionError), no_square(150):
        build(gla(layers=["gla", "attention"]))(tokens_of(config), document_ids=ids)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"num_heads": 5}, "model.hidden_size=64 x expand_k=0.5 is 32, not a multiple of gla's num_heads=5."),
        ({"expand_v": 0.3}, "model.hidden_size=64 x expand_v=0.3 is 19.2, not a multiple of gla's num_heads=4."),
    ],
)
def test_sizes_that_make_no_heads_are_refused(keys, text):
    config = gla(blocks={"x": {"mixer": {"kind": "gla", **keys}}}, layers=["x"])
    assert any(re.escape(text) in re.escape(problem.text) for problem in shape_problems(config))


def test_context_parallelism_is_refused_with_what_works_instead():
    config = compose_config(["model=hybrid_tiny"])
    (problem,) = list(sharding_problems(config, Degrees(cp=2)))
    assert problem.key == "parallel.cp"
    assert "the mixer of 'gla' in model.layers needs whole sequences. Set 1, and split weights" in problem.text
