"""Steps with a cache: the same bits however the tokens come, and those of the whole forward pass."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_llm.config.schema.model import MIXERS, ModelConfig
from lightning_llm.model.attention.attention import SoftmaxAttention
from lightning_llm.model.stepping import KeyValueCache
from tests.model.model_shapes import LLAMA3_SCALING, build, gemma2, gpt2, llama, qwen3, tokens_of

LENGTH = 90  # beyond a block of 64 keys, and no multiple of 16
SHORT = {"num_layers": 2, "max_sequence_length": 96}
WINDOWED = {"mixer": {"kind": "attention", "window": 20}}
LATENT = {"kind": "mla", "q_rank": 24, "kv_rank": 20, "nope_dim": 12, "rope_dim": 8, "value_dim": 10}
MODELS = {
    "attention": llama(**SHORT, rope_scaling=LLAMA3_SCALING),
    "qk_norm_attention": qwen3(**SHORT),
    "soft_capped_attention": gemma2(**SHORT),
    "multi_query": llama(**SHORT, num_kv_heads=1, head_dim=24),
    "gpt2": gpt2(**SHORT),
    "mla": llama(**SHORT, blocks={"mla": {"mixer": LATENT}}, layers=["mla"]),
    "window": llama(**SHORT, blocks={"local": WINDOWED}, layers=["local", "attention"]),
}
CONVOLVED = {"kind": "cca", "window": 20, "depthwise_tokens": 3}
SCALED = {"mixer": CONVOLVED, "residual_scaling": True, "input_scaling": True}
MODELS["cca with scaled residuals"] = llama(**SHORT, blocks={"scaled": SCALED}, layers=["cca", "scaled"])
MODELS |= {kind: llama(**SHORT, layers=[kind]) for kind in MIXERS if kind not in MODELS}
"""Every registered mixer, and the shapes that change the computation of a step."""
ROUNDING = 2e-6
"""Of the largest logit: what fp32 sums in another order differ by."""


def stepped(config: ModelConfig, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Return the logits of `tokens`, `counts` of them at a time."""
    model = build(config).eval()
    with torch.no_grad():
        cache = model.new_cache(tokens.shape[0], config.max_sequence_length)
        return torch.cat([model.step(part, cache) for part in tokens.split(counts, dim=1)], dim=1)


def forward(config: ModelConfig, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return build(config).eval()(tokens)


def far(logits: torch.Tensor, others: torch.Tensor, vocab_size: int) -> float:
    """Return the largest difference of logits of real ids, as a share of the largest."""
    one, other = logits[..., :vocab_size], others[..., :vocab_size]
    return ((one - other).abs().max() / other.abs().max()).item()


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=3)
@given(data=st.data())
def test_bits_do_not_depend_on_how_many_tokens_come_at_once(name, data):
    config, tokens = MODELS[name], tokens_of(MODELS[name], length=LENGTH)
    cuts = sorted(data.draw(st.sets(st.integers(1, LENGTH - 1), max_size=12)))
    counts = [stop - start for start, stop in pairwise([0, *cuts, LENGTH])]
    assert torch.equal(stepped(config, tokens, counts), stepped(config, tokens, [LENGTH]))


@pytest.mark.parametrize("name", MODELS)
def test_token_by_token_is_the_whole_forward_pass(name):
    config, tokens = MODELS[name], tokens_of(MODELS[name], length=LENGTH)
    logits, whole = stepped(config, tokens, [1] * LENGTH), forward(config, tokens)
    attention = isinstance(build(config).layers["0"].attention, SoftmaxAttention)
    if attention and torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert torch.equal(logits, whole)  # one kernel multiplies all M >= 16 rows
    assert far(logits, whole, config.vocab_size) <= ROUNDING


class DecayingSum(torch.nn.Module):
    """A recurrent mixer of one line, a sum of decaying inputs; its products have as many rows as new tokens."""

    def __init__(self, size: int):
        super().__init__()
        self.inner = torch.nn.Linear(size, 192)
        self.outer = torch.nn.Linear(192, size)

    def new_cache(self, batch_size, length):
        return SimpleNamespace(state=torch.zeros(batch_size, 192))

    def step(self, x, rope, cache):
        sums = []
        for row in self.inner(x).unbind(1):
            cache.state = 0.9 * cache.state + row
            sums.append(cache.state)
        return self.outer(torch.stack(sums, dim=1))


def test_a_mixer_that_knows_no_blocks_is_run_by_blocks():
    config = MODELS["attention"]
    torch.manual_seed(0)
    model, mixer, tokens = build(config).eval(), DecayingSum(config.hidden_size), tokens_of(config, length=LENGTH)
    model.layers["1"].attention = mixer
    logits = []
    with torch.no_grad():
        for counts in ([LENGTH], [1] * LENGTH, [7, 16, 1, 30, 36]):
            cache = model.new_cache(2, LENGTH)
            logits.append(torch.cat([model.step(part, cache) for part in tokens.split(counts, dim=1)], dim=1))
        mixer.forward = lambda x, rope, mask: mixer.step(x, rope, mixer.new_cache(2, LENGTH))
        whole = model(tokens)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert far(logits[0], whole, config.vocab_size) <= ROUNDING


def test_beyond_the_short_kernel_of_the_forward_pass():
    config = llama(num_layers=1, max_sequence_length=600)
    tokens = tokens_of(config, batch=1, length=600)
    assert far(stepped(config, tokens, [600]), forward(config, tokens), config.vocab_size) <= ROUNDING


def test_a_window_keeps_no_more_than_it_sees():
    cache = KeyValueCache(batch_size=1, length=1000, window=70)
    assert cache.capacity == 192  # of any query and its block, in blocks of 64
    for token in range(1000):
        k = torch.full((1, 1, 1, 1), float(token))
        cache.append(k, k)
        block = token // 64 * 64
        keys, _, mask = cache.seen_from(block)
        assert keys.shape[1] <= 192
        seen = keys[0, mask[0, 0, token - block], 0, 0]
        assert seen.tolist() == list(range(max(0, token - 69), token + 1))


def test_a_full_cache_and_another_batch_are_refused():
    config = MODELS["attention"]
    model, tokens = build(config).eval(), tokens_of(config, length=6)
    cache = model.new_cache(2, 5)
    with pytest.raises(ValueError, match="room for 2 x 5 tokens, but 2 x 6 were given"):
        model.step(tokens, cache)
    with pytest.raises(ValueError, match="1 x 3 were given"):
        model.step(tokens[:1, :3], cache)
    with pytest.raises(ValueError, match="max_sequence_length=96"):
        model.new_cache(1, 97)


def test_a_mixer_without_a_cache_is_named():
    model = build(MODELS["attention"])
    model.layers["1"].attention = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"layers\.1: a mixer of Identity has no cache"):
        model.new_cache(1, 8)
