"""Sampling: shapes, the window, and the distribution drawn from."""

import pytest
import torch

from lightning_llm.model.generate import generate
from tests.model.model_shapes import build, llama, tokens_of

CONFIG = llama(num_layers=1, max_sequence_length=16)


def test_shape_range_and_prompt():
    model, prompt = build(CONFIG), tokens_of(CONFIG, batch=3, length=5)
    tokens = generate(model, prompt, 20, generator=torch.Generator().manual_seed(0))
    assert tokens.shape == (3, 25)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens[:, :5], prompt)
    assert tokens.min() >= 0
    assert tokens.max() < CONFIG.vocab_size  # never a padding id
    assert model.training
    again = generate(model, prompt, 20, generator=torch.Generator().manual_seed(0))
    assert torch.equal(tokens, again)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": 1}], ids=["temperature_0", "top_1"])
def test_greedy_is_the_argmax_over_the_window(settings):
    model, prompt = build(CONFIG), tokens_of(CONFIG, batch=2, length=14)
    tokens = generate(model, prompt, 6, **settings)
    for position in range(14, 20):
        window = tokens[:, max(0, position - 16) : position]
        assert torch.equal(tokens[:, position], model(window)[:, -1].argmax(-1))


def test_frequencies_follow_temperature_and_top_k():
    model, prompt = build(CONFIG), tokens_of(CONFIG, batch=1, length=4)
    with torch.no_grad():
        logits = model(prompt)[0, -1, : CONFIG.vocab_size].double()
    kept = logits.topk(3)
    expected = torch.zeros(CONFIG.vocab_size, dtype=torch.float64)
    expected[kept.indices] = torch.softmax(kept.values / 0.5, -1)
    drawn = generate(model, prompt.expand(4000, -1), 1, 0.5, 3, torch.Generator().manual_seed(0))[:, -1]
    frequency = drawn.bincount(minlength=CONFIG.vocab_size) / 4000
    torch.testing.assert_close(frequency.double(), expected, atol=0.04, rtol=0)


@pytest.mark.parametrize("settings", [{"temperature": -1.0}, {"top_k": 0}])
def test_senseless_settings_are_refused(settings):
    with pytest.raises(ValueError, match="temperature"):
        generate(build(CONFIG), tokens_of(CONFIG), 1, **settings)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(build(CONFIG), torch.zeros(1, 0, dtype=torch.long), 1)
