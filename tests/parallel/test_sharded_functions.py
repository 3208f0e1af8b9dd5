"""The loss over a cut vocabulary and attention over a shared sequence, against whole ones in float64; a cut linear's
bias. 3 seconds."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_llm.config.schema import ParallelConfig
from lightning_llm.model.attention.attention import dot_product_attention, torch_attention
from lightning_llm.model.attention.kernel_choice import document_mask
from lightning_llm.model.decoder import mask_padding
from lightning_llm.model.linear import Linear
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.parallel.cp import ContextAttention, SequenceSharder, keys_of_all_ranks, positions_of
from lightning_llm.parallel.tp import Region, _become, _Row, loss_sum_of
from tests.parallel.traced_run import layout_here

BATCH, TOKENS, VOCABULARY, REAL = 2, 16, 32, 13  # the last rank of two has no real token id
HEADS, KEYS, ELEMENTS = 4, 2, 8


def largest(tensor: Tensor) -> float:
    """Return the largest difference on any rank."""
    value = tensor.detach().abs().max()
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def loss_differences() -> dict[str, float]:
    layout = layout_here(ParallelConfig(name="tp", tp=2))
    generator = torch.Generator().manual_seed(1)
    logits = 30 * torch.randn(BATCH, TOKENS, VOCABULARY, dtype=torch.float64, generator=generator)
    labels = torch.randint(REAL, (BATCH, TOKENS), generator=generator)
    labels[0, :5] = -100
    whole = mask_padding(logits, REAL).requires_grad_()
    own = whole.detach().chunk(2, -1)[layout.coordinates.tp].clone().requires_grad_()
    expected, found = next_token_loss_sum(whole, labels), loss_sum_of(layout, torch.device("cpu"))(own, labels)
    (0.3 * expected).backward()
    (0.3 * found).backward()
    return {
        "loss": largest(found - expected),
        "gradient": largest(own.grad - whole.grad.chunk(2, -1)[layout.coordinates.tp]),
    }


def attention_differences(documents: bool) -> dict[str, float]:
    layout = layout_here(ParallelConfig(name="cp", cp=2))
    generator = torch.Generator().manual_seed(2)
    shapes = {"q": HEADS, "k": KEYS, "v": KEYS}
    whole = {
        name: torch.randn(BATCH, TOKENS, heads, ELEMENTS, dtype=torch.float64, generator=generator).requires_grad_()
        for name, heads in shapes.items()
    }
    ids = (torch.randn(BATCH, TOKENS, generator=generator) > 0.8).cumsum(1) if documents else None
    weight = torch.randn(BATCH, TOKENS, HEADS, ELEMENTS, dtype=torch.float64, generator=generator)
    mask = None if ids is None else document_mask(ids)
    expected = dot_product_attention(whole["q"], whole["k"], whole["v"], mask)
    (expected * weight).sum().backward()

    tokens = torch.arange(TOKENS).expand(BATCH, -1)
    cut, labels, positions, own_ids = SequenceSharder(layout)(tokens, tokens, ids)
    assert torch.equal(cut[0], positions)
    assert torch.equal(labels, cut)
    own = {name: tensor.detach()[:, positions].clone().requires_grad_() for name, tensor in whole.items()}
    own_mask = keys_of_all_ranks(positions, own_ids, None, 2).dense()
    found = ContextAttention(layout.group("cp"), torch_attention)(own["q"], own["k"], own["v"], own_mask)
    (found * weight[:, positions]).sum().backward()
    gradients = {name: largest(own[name].grad - whole[name].grad[:, positions]) for name in own}
    return {"output": largest(found - expected[:, positions]), **gradients}


def bias_gradient_is_the_sum(dtype: torch.dtype) -> bool:
    """Return whether a row-parallel linear's bias has the fp32 sum of its outputs' gradients, rounded once."""
    layout = layout_here(ParallelConfig(name="tp", tp=2))
    generator = torch.Generator().manual_seed(3)
    linear = Linear(ELEMENTS, ELEMENTS)
    x = torch.randn(BATCH, TOKENS, ELEMENTS, generator=generator).to(dtype)
    dy = (400 * torch.randn(BATCH, TOKENS, ELEMENTS, generator=generator).abs()).to(dtype)
    _become(linear, _Row, Region(layout.group("tp"), sequence=False))
    linear(x).backward(dy)
    return torch.equal(linear.bias.grad, dy.float().sum((0, 1)).to(dtype).float())


def test_the_loss_over_a_cut_vocabulary_is_the_whole_ones(ranks):
    assert {kind: value for kind, value in ranks(2).call(loss_differences).items() if value > 1e-12} == {}


@pytest.mark.parametrize("documents", [False, True])
def test_attention_over_a_shared_sequence_is_the_whole_ones(documents, ranks):
    found = ranks(2).call(attention_differences, documents)
    assert {kind: value for kind, value in found.items() if value > 1e-12} == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_bias_behind_a_sum_over_ranks_has_its_gradient_summed_in_fp32(dtype, ranks):
    """As precision.linear sums it on one rank."""
    assert ranks(2).call(bias_gradient_is_the_sum, dtype)


def test_every_rank_has_the_same_share_of_the_causal_triangle():
    shares = [(positions_of(rank, 4, 64) + 1).sum().item() for rank in range(4)]
    assert shares == [64 * 65 // 2 // 4] * 4
    everything = torch.cat([positions_of(rank, 4, 64) for rank in range(4)])
    assert torch.equal(everything.sort().values, torch.arange(64))
