"""Each family's config.json and tensors, there and back: the same model, the same bits, and refusals in words."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.interop.architecture import Architecture
from lightning_llm.model.interop.families import architecture, architectures, model_config_of, register
from lightning_llm.model.weights.folder import open_huggingface
from lightning_llm.model.weights.load import state_dict_of
from lightning_llm.model.weights.write import as_huggingface, as_ours
from lightning_llm.model.weights.write import write_tensors as write_planned
from tests.model.huggingface_states import huggingface_config, to_huggingface
from tests.model.model_shapes import gemma2, gpt2, llama, qwen3
from tests.model.test_transformers_parity import CONFIGS, tokens_of
from tests.weight_folders import random_weights, write_huggingface, write_tensors

NOT_STORED = {"name", "vocab_multiple", "init", "parameters_published", "head_dim", "blocks", "layers"}
FAMILIES = {name: CONFIGS[name] for name in ("llama_tied", "llama_yarn", "mistral", "qwen3", "gemma2", "gpt2")}
every_family = pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def computed(config: ModelConfig) -> dict:
    """All that a forward pass depends on."""
    blocks = [config.block_at(index).model_dump() for index in range(config.num_layers)]
    return {**config.model_dump(exclude=NOT_STORED), "head_dim": config.attention_head_dim, "blocks": blocks}


@every_config
def test_a_config_json_of_ours_and_one_of_transformers_read_back_as_the_same_model(config):
    entries = huggingface_config(config)
    assert computed(model_config_of(json.loads(json.dumps(entries)), "x")) == computed(config)
    written = json.loads(AutoConfig.for_model(**entries).to_json_string())
    assert computed(model_config_of(written, "x")) == computed(config)


def test_entries_that_config_json_leaves_out_are_transformers_defaults():
    for config in CONFIGS.values():
        entries = huggingface_config(config)
        needed = architecture(config).sizes
        bare = {key: value for key, value in entries.items() if key in (*needed, "architectures", "model_type")}
        theirs = AutoConfig.for_model(**bare)
        whole = json.loads(theirs.to_json_string()) | {"architectures": entries["architectures"]}
        assert computed(model_config_of(bare, "x")) == computed(model_config_of(whole, "x"))


@every_family
def test_bf16_is_as_near_to_fp32_as_transformers_bf16_is(config, tmp_path):
    folder = write_huggingface(tmp_path / "hf", config)
    weights = open_huggingface(folder)
    tokens = tokens_of(weights.config, length=40)

    def theirs(dtype):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        return loaded.eval()(tokens).logits.float()

    def ours(dtype):
        with torch.device("meta"):
            model = Decoder(weights.config, dtype)
        model.load_state_dict(dict(state_dict_of(weights)), assign=True)
        return model(tokens)[..., : config.vocab_size].float()

    with torch.no_grad():
        exact = theirs(torch.float32)
        torch.testing.assert_close(ours(torch.float32), exact, atol=2e-5, rtol=1e-5)
        error, usual = (ours(torch.bfloat16) - exact).std(), (theirs(torch.bfloat16) - exact).std()
    assert 0 < error < 1.5 * usual  # roundings of the same size: this model's masters stay in fp32, theirs do not


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_come_back_bit_for_bit(config, dtype, tmp_path):
    source = write_huggingface(tmp_path / "hf", config, shards=2, dtype=dtype)
    weights = open_huggingface(source)
    original = {name: tensor.to(dtype) for name, tensor in random_weights(config).items()}
    expected = to_huggingface(original, config)
    for name, stored in weights.stored.items():  # rows from anywhere, whichever way round they lie
        rows = weights.rows(name, stored.shape[0] // 3, stored.shape[0])
        assert torch.equal(rows, original[name][stored.shape[0] // 3 : stored.shape[0]])
    ours = {each.name: each.make() for each in as_ours(weights)}
    assert all(tensor.dtype == dtype for tensor in ours.values())
    (tmp_path / "back").mkdir()
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    planned = as_huggingface(weights, weights.config, name)
    files = write_planned(tmp_path / "back", planned, shard_bytes=sum(each.size_bytes for each in planned) // 3)
    assert len(files) > 2
    (tmp_path / "back" / "config.json").write_text((source / "config.json").read_text())
    back = open_huggingface(tmp_path / "back")
    assert back.tensors.entries.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(back.tensors.part(name, 0, len(tensor)), tensor)


def test_old_files_of_gpt2_are_read_without_their_prefix_and_buffers(tmp_path):
    config = gpt2()
    folder = write_huggingface(tmp_path / "hf", config)
    state = to_huggingface(random_weights(config), config)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    bare |= {f"h.{index}.attn.bias": torch.ones(1, 1, 8, 8) for index in range(config.num_layers)}
    bare["lm_head.weight"] = bare["wte.weight"].clone()
    write_tensors(folder, bare)
    weights = open_huggingface(folder)
    assert torch.equal(state_dict_of(weights)["layers.1.attention.k_proj.weight"],
                       random_weights(config)["layers.1.attention.k_proj.weight"])  # fmt: skip


REFUSED = {
    "another class": (
        llama(),
        {"architectures": ["FalconForCausalLM"]},
        "is FalconForCausalLM. Read here are DeepseekV3ForCausalLM, GPT2LM",
    ),
    "code of its own": (llama(), {"auto_map": {"AutoModel": "modeling.X"}}, "trust_remote_code"),
    "quantised": (llama(), {"quantization_config": {"bits": 4}}, "quantized"),
    "biases": (llama(), {"attention_bias": True}, "attention_bias: is True, but this decoder has False"),
    "an activation": (llama(), {"hidden_act": "gelu"}, "hidden_act: is 'gelu', but this decoder has 'silu'"),
    "longrope": (llama(), {"rope_parameters": {"rope_type": "longrope"}}, "'longrope': which of its two sets"),
    "partial rope": (llama(), {"partial_rotary_factor": 0.5}, "the whole head is rotated"),
    "no factor": (llama(), {"rope_parameters": {"rope_type": "linear"}}, "rope_scaling.factor: is missing"),
    "a size that is none": (llama(), {"num_hidden_layers": "two"}, "num_hidden_layers: must be a whole number"),
    "a size without bounds": (llama(), {"num_hidden_layers": 10**9}, "num_layers here"),
    "qwen3 windows": (qwen3(), {"use_sliding_window": True}, "use_sliding_window: is True"),
    "gpt2 scaling": (gpt2(), {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: is True"),
    "gemma2 layers": (gemma2(), {"layer_types": ["full_attention"]}, "a list with one kind per layer"),
    "gemma2 without caps": (gemma2(), {"attn_logit_softcapping": None}, "attn_logit_softcapping=None: must"),
    "rope as text": (llama(), {"rope_parameters": "x"}, "must be an object or null"),
}


@pytest.mark.parametrize(("config", "entries", "said"), REFUSED.values(), ids=REFUSED)
def test_unsupported_entries_are_named(config, entries, said):
    with pytest.raises(ConfigError) as caught:
        model_config_of({**huggingface_config(config), **entries}, "x")
    assert said in str(caught.value)


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        model_config_of({**huggingface_config(llama()), "mlp_bias": True, "hidden_act": "relu", "vocab_size": 0}, "x")
    assert len(caught.value.problems) == 3


def test_an_installed_package_adds_an_architecture_once():
    known = architectures()[0]
    with pytest.raises(ValueError, match="is lightning_llm"):
        register(type("Other", (type(known),), {})())
    assert all(isinstance(each, Architecture) for each in architectures())
