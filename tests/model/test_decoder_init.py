"""Initial weights: statistics of each scheme, and that any slice of any parameter can be made alone."""

import math
from itertools import pairwise

import pytest
import torch

from lightning_llm.base.keyed_hash import hash_words, name_word
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import CHUNK_ELEMENTS, distribution_of, initialise, parameter_slice
from tests.model.model_shapes import build, gpt2, llama, tokens_of

WIDE = {"hidden_size": 256, "ffn_hidden_size": 512, "vocab_size": 1024, "num_heads": 4, "num_kv_heads": 4}


def expected_std(config, name):
    """The schemes as published, written out per name."""
    layer = int(name.split(".")[1]) if name.startswith("layers") else None
    if config.init == "gpt2":
        return 0.02 / math.sqrt(2 * config.num_layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
    if name == "embedding.weight" and not config.tie_embeddings:
        return 1.0
    if name in {"embedding.weight", "head.weight"}:  # a normal cut at 3 std keeps 98.658 % of its std
        largest = 0.02 if config.tie_embeddings else 1.0
        return 0.98658 * min(largest, 1 / math.sqrt(config.hidden_size))
    if name.endswith(("o_proj.weight", "up_proj.weight", "down_proj.weight")):
        return 0.02 / math.sqrt(2 * (layer + 1))
    return 0.02


@pytest.mark.parametrize(
    "config", [llama(**WIDE), llama(**WIDE, tie_embeddings=True), gpt2(**WIDE)], ids=["llama", "llama_tied", "gpt2"]
)
def test_statistics(config):
    model = build(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert parameter.eq(1).all(), name
        elif name.endswith("bias"):
            assert parameter.eq(0).all(), name
        else:
            std, count = expected_std(config, name), parameter.numel()
            assert parameter.mean().abs() < 5 * std / math.sqrt(count), name
            assert parameter.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * count)), name
            fourth = (parameter.double() ** 4).mean() / parameter.double().square().mean() ** 2
            assert fourth.item() == pytest.approx(3.0, abs=0.25), name  # normal, not uniform (1.8)
    if config.init == "llama":
        head = model.embedding.weight if config.tie_embeddings else model.head.weight
        assert head.abs().max() <= 3 / math.sqrt(256)


def test_a_wide_tied_table_is_drawn_as_a_head():
    wide = llama(hidden_size=4096, num_heads=32, tie_embeddings=True)
    assert distribution_of(wide, "embedding.weight").std == 1 / 64


SHAPES = {"narrow": (64, 1), "quickstart's": (192, 4), "deep": (128, 24)}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("width", "layers"), SHAPES.values(), ids=SHAPES)
def test_the_first_loss_is_near_that_of_equal_logits(width, layers, tied):
    shape = {"hidden_size": width, "num_layers": layers, "num_heads": width // 32, "num_kv_heads": width // 32}
    config = llama(**shape, ffn_hidden_size=2 * width, vocab_size=1000, tie_embeddings=tied)
    tokens, labels = tokens_of(config, batch=1), tokens_of(config, batch=1, seed=1)
    with torch.no_grad():
        logits = build(config)(tokens)[..., : config.vocab_size]
    excess = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item() - math.log(1000)
    assert -0.1 < excess < 0.75  # 0.1 of noise: 150 tokens


def test_parameters_are_independent_draws():
    model = build(llama(**WIDE))
    query, key = model.layers["0"].attention.q_proj.weight, model.layers["0"].attention.k_proj.weight
    other = model.layers["1"].attention.q_proj.weight
    embedding = model.embedding.weight.flatten()  # four chunks
    for a, b in [
        (query, key),
        (query, other),
        (embedding[:CHUNK_ELEMENTS], embedding[CHUNK_ELEMENTS : 2 * CHUNK_ELEMENTS]),
    ]:
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert correlation.abs() < 5 / math.sqrt(a.numel())


def test_slices_equal_the_whole():
    config = llama(**WIDE)
    for name in ("embedding.weight", "head.weight", "layers.2.feed_forward.down_proj.weight", "norm.weight"):
        whole = build(config).get_parameter(name).flatten()
        edges = [0, 1, 17, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1, 100_000, whole.numel()]
        edges = sorted({edge for edge in edges if edge <= whole.numel()})
        pieces = [parameter_slice(config, 0, name, a, b) for a, b in pairwise(edges)]
        assert torch.equal(torch.cat(pieces), whole), name
    assert parameter_slice(config, 0, "head.weight", 5, 5).numel() == 0


def test_layout_changes_nothing():
    config = llama()
    whole = build(config, seed=7)
    stage = Decoder(config)
    del stage.layers["0"], stage.layers["1"]
    stage.embedding = None
    initialise(stage, seed=7)
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name)), name
    wider = build(llama(vocab_multiple=64), seed=7)  # padding to another multiple adds rows and moves none
    assert torch.equal(wider.head.weight[:112], whole.head.weight)


def test_seed_and_name_key_every_chunk():
    config = gpt2()
    word = hash_words(name_word("layers.0.attention.q_proj.weight"), 0, seed=11)
    expected = torch.randn(CHUNK_ELEMENTS, generator=torch.Generator().manual_seed(word))[:4096] * 0.02
    model = build(config, seed=11)
    assert torch.equal(model.layers["0"].attention.q_proj.weight.flatten(), expected)
    assert not torch.equal(build(config, seed=12).embedding.weight, model.embedding.weight)


def test_initialising_leaves_the_global_generator_alone():
    model = Decoder(llama())
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    initialise(model, seed=0)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("name", ["layers.0.attention.qkv.weight", "head.scale", "weight"])
def test_unknown_names_are_refused(name):
    with pytest.raises(KeyError, match="is not a parameter of a decoder"):
        distribution_of(llama(), name)
