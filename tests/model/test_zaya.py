"""ZAYA1's blocks compute what transformers' Zaya computes; each of its three kinds works in other models, too."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, ZayaConfig, ZayaForCausalLM

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.experts.moe import MixtureOfExperts
from lightning_llm.model.flops import flops_per_token
from lightning_llm.model.generate import generate
from lightning_llm.model.interop.families import architecture, model_config_of
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.model.structure import shape_problems
from lightning_llm.model.weights.folder import open_huggingface
from lightning_llm.model.weights.load import state_dict_of
from lightning_llm.model.weights.write import as_huggingface, write_tensors
from lightning_llm.plan.check import check_config
from tests.model.huggingface_states import huggingface_config, to_huggingface
from tests.model.model_shapes import build, llama, tokens_of

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
ROUTER = {"normalise": False, "bias_update_rate": 0.001, "hidden_size": 24, "skip": True}
MIXER = {"kind": "cca", "depthwise_tokens": 3, "rope_dim": 8}


def zaya(router: dict | None = None, **changes) -> ModelConfig:
    experts = {"kind": "moe", "experts": 4, "per_token": 1, "ffn_hidden_size": 40, "balance_loss": 0.0, "z_loss": 0.0}
    router = ROUTER | (router or {})
    block = {"mixer": MIXER, "feed_forward": experts | {"router": router}, "residual_scaling": True}
    blocks = {"first": block | {"input_scaling": True}}
    blocks["moe"] = block | {"feed_forward": experts | {"router": router | {"depth_mixing": True}}}
    shape = {
        "blocks": blocks,
        "layers": ["first", "moe", "moe"],
        "tie_embeddings": True,
        "ffn_hidden_size": 40,
        **HEADS,
    }
    return llama(**(shape | changes))


def theirs_of(config: ModelConfig, folder: Path) -> ZayaForCausalLM:
    """Return transformers' model of `config` with random weights, after saving it to `folder`."""
    # no end of text, and a gradient of the embedding of token 0
    entries = huggingface_config(config) | {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    entries = AutoConfig.for_model(**entries)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(entries, attn_implementation="eager", experts_implementation="eager")
    assert isinstance(model, ZayaForCausalLM)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            spread = 0.5 if ".gate." in name else 0.15  # choices that no rounding changes
            tensor.add_(torch.randn_like(tensor) * (0.05 if "balancing" in name else spread))
        for layer in model.model.layers:
            layer.self_attn.qk_norm.temp.add_(1)
    model.save_pretrained(folder)
    return model.eval()


def both(config: ModelConfig, folder: Path) -> tuple[Decoder, ZayaForCausalLM]:
    """Return our model of weights that transformers saved, and transformers' model."""
    theirs = theirs_of(config, folder)
    weights = open_huggingface(folder)
    ours = build(config).eval()
    ours.load_state_dict(state_dict_of(weights, config))
    return ours, theirs


def test_logits_and_gradients_are_those_of_transformers(tmp_path):
    config = zaya()
    ours, theirs = both(config, tmp_path)
    tokens, labels = tokens_of(config), tokens_of(config, seed=1)
    logits, expected = ours(tokens), theirs(tokens).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(logits[..., : config.vocab_size], expected, atol=1e-5, rtol=1e-5)
    next_token_loss_sum(logits, labels).div(labels.numel()).backward()
    F.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in ours.named_parameters()}
    found = to_huggingface(gradients, config)  # no gradient reaches the biases of the choice
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(
            found[name], parameter.grad, atol=1e-6, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_generation_and_skipped_tokens_are_those_of_transformers(tmp_path):
    """With a cache, and with a bias of the skip by which a part of the tokens takes no expert."""
    config = zaya()
    ours, theirs = both(config, tmp_path)
    with torch.no_grad():
        for index, block in ours.layers.items():
            block.feed_forward.router.skip_correction.fill_(0.2)
            theirs.model.layers[int(index)].mlp.gate.balancing_biases[-1] = 0.2
    tokens = tokens_of(config, length=40)
    with torch.no_grad():
        expected = theirs(tokens).logits
        logits = ours(tokens)
        torch.testing.assert_close(logits[..., : config.vocab_size], expected, atol=1e-5, rtol=1e-5)
        cache = ours.new_cache(2, 40)
        steps = torch.cat([ours.step(part, cache) for part in tokens.split(7, dim=1)], dim=1)
    torch.testing.assert_close(steps, logits, atol=1e-5, rtol=1e-5)
    found = generate(ours, tokens, 12, temperature=0.0)
    greedy = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(tokens)}
    assert torch.equal(found, theirs.generate(tokens, max_new_tokens=12, **greedy))


def test_documents_of_a_batch_are_computed_as_sequences_of_their_own(tmp_path):
    ours, _ = both(config := zaya(), tmp_path)
    tokens, lengths = tokens_of(config, length=40), (7, 1, 2, 30)
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).expand(2, -1)
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        alone = torch.cat([ours(part) for part in tokens.split(lengths, dim=1)], dim=1)
        torch.testing.assert_close(ours(tokens, positions.expand(2, -1), ids), alone, atol=1e-5, rtol=1e-5)


def test_every_tensor_comes_back_bit_for_bit(tmp_path):
    """The config as it was built, tensors through our names, and slices of the stacked experts as rows."""
    config = zaya()
    theirs_of(config, tmp_path)
    weights = open_huggingface(tmp_path)
    differ = {"name", "vocab_multiple", "layers"}
    assert weights.config.model_dump(exclude=differ) == config.model_dump(exclude=differ)
    assert weights.config.layers == ("first", "moe", "moe")
    (tmp_path / "back").mkdir()
    write_tensors(tmp_path / "back", as_huggingface(weights, weights.config, "fp32"))
    ours, back = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert ours.keys() == back.keys()
    assert all(torch.equal(ours[name], back[name]) for name in ours)
    for name in ("layers.2.feed_forward.experts.up_proj.weight", "layers.1.attention.grouped.weight"):
        rows = weights.shapes[name][0]
        whole = weights.rows(name, 0, rows)
        for first, last in ((0, 1), (rows // 4 - 1, rows // 4 + 1), (3, 3 * rows // 4 + 2)):
            assert torch.equal(weights.rows(name, first, last), whole[first:last])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layer_types": ["hybrid", "hybrid_sliding", "hybrid"]}, "layer_types: is .* Only hybrid is supported"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok: is 2, but this decoder has 1"),
        ({"rope_parameters": {"rope_type": "default"}}, r"rope_parameters\.hybrid: is missing"),
        ({"lm_head_bias": True}, "lm_head_bias: is True"),
        ({"router_hidden_size": None}, "router_hidden_size: must be a whole number"),
    ],
)
def test_entries_that_are_not_supported_are_named(changes, text):
    with pytest.raises(ConfigError, match=text):
        model_config_of(huggingface_config(zaya()) | changes, "theirs")


def test_default_config_of_transformers_is_the_preset():
    """ZayaConfig's defaults are the entries of Zyphra/ZAYA1-8B."""
    values = ZayaConfig().to_dict() | {"architectures": ["ZayaForCausalLM"]}
    read, preset = model_config_of(values, "zaya1"), compose_config(["model=zaya1"]).model
    assert read.model_dump(exclude={"parameters_published"}) == preset.model_dump(exclude={"parameters_published"})


@pytest.mark.parametrize(
    "block",
    [
        {"mixer": {"kind": "cca", "rope_dim": 16, "window": 5}},
        {"residual_scaling": True},
        {"feed_forward": {"kind": "moe", "router": {"score": "sigmoid", "hidden_size": 16}}},
        {"feed_forward": {"kind": "moe", "router": {"skip": True}, "capacity_factor": 1.0, "shared_experts": 1}},
    ],
    ids=["mixer", "residuals", "router", "skip"],
)
def test_each_kind_trains_in_another_model(block):
    config = llama(blocks={"own": block}, layers=["own", "attention"])
    assert not shape_problems(config)
    model, tokens = build(config), tokens_of(config)
    model.auxiliary.begin_step(1.0, 1.0)
    next_token_loss_sum(model(tokens), tokens).div(tokens.numel()).backward()
    trained = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(gradient is not None and gradient.isfinite().all() for gradient in trained.values())
    assert all(gradient.any() for name, gradient in trained.items() if not name.endswith("grouped.bias"))


def test_skipped_choices_count_as_neither_load_nor_dropped():
    experts = {"kind": "moe", "experts": 4, "per_token": 2, "router": {"skip": True}}
    config = llama(blocks={"own": {"feed_forward": experts}}, layers=["own"])
    network = MixtureOfExperts(config.block_at(0).feed_forward, config)
    torch.nn.init.normal_(network.router.weight)
    for parameter in network.experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    network.router.skip_correction.data.fill_(1.0)  # each token skips with one of its choices
    network(torch.randn(3, 20, config.hidden_size))
    network.count()
    assert network.step_loads.sum() == 60
    assert network.step_dropped == 0


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("parallel.tp=2", "parallel.tp: is 2, and half of the value heads of cca are of the token before"),
        ("parallel.tp=2", "a router with hidden_size hands its state to the next block"),
        ("parallel.pp=2", "parallel.pp: is 2, and the router of 'moe' in model.layers takes the state"),
        ("parallel.cp=2", "parallel.cp: is 2, and the mixer of 'first' in model.layers needs whole sequences"),
    ],
)
def test_layouts_that_cannot_run_are_named_with_the_reason(layout, text):
    with pytest.raises(ConfigError) as error:
        check_config(compose_config(["recipe=quickstart", "model=zaya_tiny", "trainer.devices=2", layout]), False)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (zaya(layers=["moe"]), "depth_mixing: is true for block 0, and none is before it"),
        (
            zaya(layers=["first", "moe", "attention", "moe"], num_layers=4),
            "block 2 gives a state of 0 elements, not 24",
        ),
        (zaya(router={"hidden_size": None}), "depth_mixing: is true, and hidden_size is null"),
        (llama(blocks={"x": {"mixer": {"kind": "cca", "rope_dim": 7}}}, layers=["x"]), "rotates 7 of 16 elements"),
        (llama(layers=["cca"], num_kv_heads=1, head_dim=17, num_heads=1), "num_kv_heads: has 1 x 17 elements"),
    ],
)
def test_shapes_that_contradict_are_named(config, text):
    assert any(text in str(problem) for problem in shape_problems(config))


def test_scaled_residuals_are_not_exported_as_another_class():
    with pytest.raises(ConfigError, match="no Hugging Face counterpart"):
        architecture(llama(blocks={"attention": {"residual_scaling": True}}))


def test_flops_of_zaya1_by_hand():
    model = compose_config(["model=zaya1"]).model
    linears = 2048 * (1024 + 256 + 256) + 1024 * 2048 + 3 * 2048 * 2048
    others = 1280 * 128 * 2 + 2048 * 256 + 2 * 256 * 256 + 256 * 17
    assert flops_per_token(model, 4096) == 6 * (40 * (linears + others) + 262272 * 2048) + 12 * 40 * 1024 * 4096
