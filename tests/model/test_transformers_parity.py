"""The decoder computes what transformers' Llama, Mistral, GPT2, Qwen3 and Gemma2 compute, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.schema.model import RopeScaling
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.model.rope import inverse_frequencies
from tests.model.huggingface_states import from_huggingface, huggingface_config, to_huggingface
from tests.model.model_shapes import LLAMA3_SCALING, build, gemma2, gpt2, llama, qwen3, tokens_of

YARN = RopeScaling(
    kind="yarn",
    factor=2.0,
    original_sequence_length=80,
    beta_fast=16.0,
    beta_slow=2.0,
    attention_factor=1.3,
    truncate=False,
)
CONFIGS = {
    "llama_grouped": llama(),
    "llama_tied": llama(tie_embeddings=True),
    "llama_one_kv_head_wide": llama(num_kv_heads=1, head_dim=32, rope_theta=500_000.0, norm_eps=1e-6),
    "llama_scaled_rope": llama(rope_scaling=LLAMA3_SCALING, num_kv_heads=4),
    "gpt2": gpt2(),
    "gpt2_untied_exact_gelu": gpt2(tie_embeddings=False, gelu="exact"),
    "qwen3": qwen3(tie_embeddings=True),
    "gemma2": gemma2(),
    "gemma2_all_global": gemma2(layers=["attention_global"]),
    "mistral": llama(
        blocks={"attention_window": {"mixer": {"kind": "attention", "window": 24}}}, layers=["attention_window"]
    ),
    "llama_uneven_heads": llama(num_heads=5, num_kv_heads=1, head_dim=12),
    "qwen3_uneven_heads": qwen3(num_heads=5, num_kv_heads=1, head_dim=12),
    "llama_linear": llama(rope_scaling=RopeScaling(kind="linear", factor=4.0)),
    "llama_dynamic": llama(rope_scaling=RopeScaling(kind="dynamic", factor=4.0)),
    "llama_yarn": llama(rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_sequence_length=40)),
    "qwen3_yarn_spelled_out": qwen3(rope_scaling=YARN),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def reference(config, state):
    """Transformers' model with weights `state`, its norms and biases moved off 1 and 0 so that they count."""
    entries = huggingface_config(config)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**entries), attn_implementation="eager")
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_embeddings else set())
    return theirs.eval()


def shaken(config):
    ours = build(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return ours


@every_config
def test_logits_and_gradients_agree(config):
    ours = shaken(config)
    theirs = reference(config, to_huggingface(ours.state_dict(), config))
    tokens, labels = tokens_of(config), tokens_of(config, seed=1)

    logits = ours(tokens)
    expected = theirs(tokens).logits
    assert expected.std() > 0.5  # the comparison is not of near-zeros
    torch.testing.assert_close(logits[..., : config.vocab_size], expected, atol=1e-5, rtol=1e-5)

    next_token_loss_sum(logits, labels).div(labels.numel()).backward()
    F.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    mapped = to_huggingface(gradients, config)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(
            mapped[name], parameter.grad, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@every_config
def test_weights_survive_the_way_there_and_back(config):
    ours = shaken(config)
    exported = to_huggingface(ours.state_dict(), config)
    if config.tie_embeddings:
        assert "lm_head.weight" not in exported
    back = build(config, seed=5)
    back.load_state_dict(from_huggingface(exported, config))
    tokens = tokens_of(config, length=20)
    assert torch.equal(back(tokens), ours(tokens))


def test_models_without_a_counterpart_are_rejected():
    with pytest.raises(ConfigError, match="no Hugging Face counterpart: norm=layernorm"):
        huggingface_config(llama(norm="layernorm"))


def test_heads_that_no_class_takes_are_refused_by_name():
    with pytest.raises(ConfigError, match="num_heads=5 of hidden_size=64"):
        huggingface_config(gemma2(num_heads=5, num_kv_heads=1))


RAMPS = {
    "within": (10_000.0, 2048, 32, 1),
    "begins below the first pair": (10_000.0, 24, 32, 1),
    "ends between the last pair and the width": (100.0, 4096, 32, 1),
    "ends beyond the width": (12.0, 4096, 512, 1),
    "of no width": (10_000.0, 2048, 4, 4),
}


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("theta", "length", "fast", "slow"), RAMPS.values(), ids=RAMPS)
def test_yarns_ramp_is_transformers_wherever_it_ends(theta, length, fast, slow, truncate):
    scaling = {"factor": 4.0, "beta_fast": float(fast), "beta_slow": float(slow), "truncate": truncate}
    ours = llama(
        head_dim=32, rope_theta=theta, rope_scaling=RopeScaling(kind="yarn", original_sequence_length=length, **scaling)
    )
    entries = {"rope_type": "yarn", "original_max_position_embeddings": length, "rope_theta": theta, **scaling}
    theirs = AutoConfig.for_model("llama", head_dim=32, max_position_embeddings=4 * length, rope_parameters=entries)
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    torch.testing.assert_close(inverse_frequencies(ours, torch.device("cpu"), 32), expected, rtol=1e-6, atol=0)
