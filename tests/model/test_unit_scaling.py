"""Unit scaling: logits and gradients of the `unit-scaling` package 0.3.5 of the same weights, deviations, rates."""

import numpy as np
import pytest
import torch

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.interop.families import BUILT_IN
from lightning_llm.model.linear import Linear
from lightning_llm.model.structure import shape_problems
from lightning_llm.optim.kinds import AdamWConfig
from lightning_llm.optim.optimizer import adamw

CONFIG = ModelConfig(
    name="t", vocab_size=250, num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=4, ffn_hidden_size=96,
    max_sequence_length=32, unit_scaling=True,
)  # fmt: skip
TOKENS = 64
LOGITS, NORM = [0.122545, 0.035543, -0.138707, -0.178861], 15.78011
"""Of the package's functions, composed as its TransformerStack with a head: the last token's first logits, all."""
GRADIENTS = {
    "embedding.weight": 162.19, "norm.weight": 7.4405, "head.weight": 126.27,
    "layers.0.attention_norm.weight": 13.375, "layers.0.attention.q_proj.weight": 13.101,
    "layers.0.attention.k_proj.weight": 13.286, "layers.0.attention.v_proj.weight": 96.304,
    "layers.0.attention.o_proj.weight": 91.81, "layers.0.feed_forward_norm.weight": 10.586,
    "layers.0.feed_forward.gate_proj.weight": 60.873, "layers.0.feed_forward.up_proj.weight": 57.875,
    "layers.0.feed_forward.down_proj.weight": 80.922, "layers.1.attention_norm.weight": 11.771,
    "layers.1.attention.q_proj.weight": 9.6195, "layers.1.attention.k_proj.weight": 9.4981,
    "layers.1.attention.v_proj.weight": 89.992, "layers.1.attention.o_proj.weight": 98.419,
    "layers.1.feed_forward_norm.weight": 9.0848, "layers.1.feed_forward.gate_proj.weight": 58.928,
    "layers.1.feed_forward.up_proj.weight": 52.838, "layers.1.feed_forward.down_proj.weight": 69.559,
}  # fmt: skip
"""Norms of the package's gradients for a Gaussian gradient of the logits."""


@pytest.fixture
def built():
    """A decoder with N(0, 1) weights, tokens [2, 32], and a gradient of the logits."""
    random, model = np.random.default_rng(0), Decoder(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            given = random.standard_normal(parameter.shape) if parameter.ndim > 1 else np.ones(parameter.shape)
            parameter.copy_(torch.from_numpy(given))
    tokens = torch.from_numpy(random.integers(0, 250, (2, 32)))
    return model, tokens, torch.from_numpy(random.standard_normal((2, 32, 250))).float()


def test_logits_and_gradients_are_the_packages(built):
    model, tokens, gradient = built
    logits = model(tokens)[..., :250]
    torch.testing.assert_close(logits[1, -1, :4], torch.tensor(LOGITS), rtol=0, atol=2e-6)
    assert float(logits.detach().norm()) == pytest.approx(NORM, rel=1e-5)
    logits.backward(gradient)
    for name, parameter in model.named_parameters():
        # The package divides by the root of the tokens; of the embedding, by that of tokens over rows.
        root = (TOKENS / 256 if name == "embedding.weight" else TOKENS) ** 0.5
        assert float(parameter.grad.norm()) / root == pytest.approx(GRADIENTS[name], rel=2e-4), name


def test_linears_see_operands_of_unit_deviation(built):
    model, tokens, gradient = built
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            module.register_forward_hook(lambda _, x, y, name=name: seen.update({name: [x[0].detach().std()]}))
            module.register_full_backward_hook(lambda _, dx, dy, name=name: seen[name].append(dy[0].detach().std()))
    model(tokens).backward(torch.nn.functional.pad(gradient, (0, 6)))
    for name, (x, dy) in seen.items():
        assert 0.5 < x.item() < 2, name
        assert (0.05 if name.endswith(("q_proj", "k_proj")) else 0.5) < dy.item() < 2, name


def test_generation_step_by_step_gives_the_same_logits(built):
    model, tokens, _ = built
    with torch.no_grad():
        cache = model.new_cache(2, 32)
        steps = torch.cat([model.step(tokens[:, :20], cache), model.step(tokens[:, 20:], cache)], 1)
        torch.testing.assert_close(steps[..., :250], model(tokens)[..., :250], rtol=1e-4, atol=1e-5)


def test_rates_are_those_of_umup():
    """`unit_scaling.optim.lr_scale_func_adam`, depth 2."""
    config = AdamWConfig(learning_rate=0.5, umup_depth=2)
    model = Decoder(CONFIG)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = adamw(model.named_parameters(), config).param_groups
    rates = {names[id(parameter)]: group["lr"] / 0.5 for group in groups for parameter in group["params"]}
    expected = {"embedding.weight": 0.125, "head.weight": 1, "norm.weight": 1}
    expected |= {
        "layers.1.feed_forward.down_proj.weight": 0.0721688,
        "layers.0.attention.q_proj.weight": 0.125 / 2**0.5,
    }
    assert {name: rates[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert rates["layers.0.attention_norm.weight"] == pytest.approx(0.5**0.5)
    assert len(rates) == len(names)


def test_other_structures_are_refused_and_no_transformers_class_fits():
    (problem,) = shape_problems(CONFIG.model_copy(update={"tie_embeddings": True, "activation": "gelu"}))
    assert problem.key == "model.unit_scaling"
    assert "tie_embeddings=True, feed_forward=gelu" in problem.text
    assert shape_problems(CONFIG) == []
    assert not any(architecture.fits(CONFIG) for architecture in BUILT_IN)
