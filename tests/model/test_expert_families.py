"""Weights of mixtures of experts, from and to transformers' files: logits, gradients, bits, refusals."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.interop.families import model_config_of
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.model.weights.folder import open_huggingface
from lightning_llm.model.weights.load import state_dict_of
from lightning_llm.model.weights.write import as_huggingface, write_tensors
from tests.model.huggingface_states import huggingface_config, to_huggingface
from tests.model.model_shapes import build, llama, qwen3, tokens_of


def with_experts(base, mixer: str, layers: list[str], **keys) -> ModelConfig:
    moe = {"kind": "moe", "experts": 6, "per_token": 2, "z_loss": 0.0, **keys}
    blocks = {"moe": {"mixer": {"kind": mixer}, "feed_forward": moe}}
    return base(num_layers=len(layers) if len(layers) > 1 else 2, blocks=blocks, layers=layers)


NO_GROUPS = {"groups": None, "groups_chosen": None, "normalise": False, "scale": 1.0}
CONFIGS = {
    "mixtral": with_experts(llama, "attention", ["moe"]),
    "qwen3_moe": with_experts(
        qwen3, "qk_norm_attention", ["moe"], ffn_hidden_size=40, router={"normalise": False}, balance_loss=0.25
    ),
    "qwen3_moe_with_a_dense_block": with_experts(
        qwen3, "qk_norm_attention", ["moe", "qk_norm_attention", "moe"], ffn_hidden_size=40
    ),
}
CONFIGS["mixtral_with_one_expert"] = with_experts(llama, "attention", ["moe"], experts=1, per_token=1)
SCALED = {"kind": "yarn", "factor": 4.0, "original_sequence_length": 40, "mscale": 0.7, "mscale_all_dim": 1.2}


def deepseek(dense: int = 1, latents: dict | None = None, router: dict | None = None, **changes) -> ModelConfig:
    sizes = {"q_rank": 24, "kv_rank": 20, "nope_dim": 12, "rope_dim": 8, "value_dim": 10} | (latents or {})
    mixer = {"kind": "mla", **sizes}
    groups = {"score": "sigmoid", "scale": 2.5, "groups": 3, "groups_chosen": 2, "bias_update_rate": 0.001}
    moe = {"kind": "moe", "experts": 6, "per_token": 2, "z_loss": 0.0, "balance_loss": 0.0, "shared_experts": 2}
    moe |= {"ffn_hidden_size": 40, "router": groups | (router or {})}
    blocks = {"dense": {"mixer": mixer}} if dense else {}
    blocks |= {"moe": {"mixer": mixer, "feed_forward": moe}}
    layers = ["dense"] * dense + ["moe"] * 2 if dense else ["moe"]
    shape = {"num_layers": dense + 2, "num_kv_heads": 4, "norm_eps": 1e-6, "blocks": blocks, "layers": layers}
    return llama(**(shape | changes))


CONFIGS |= {
    "deepseek_v3": deepseek(rope_scaling=SCALED),
    "deepseek_v3_without_groups": deepseek(0, {"q_rank": None, "interleaved": False}, NO_GROUPS),
    "deepseek_v3_other_epsilon": deepseek(2, {"norm_eps": 1e-6}, norm_eps=1e-5),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def theirs_of(config: ModelConfig, folder: Path) -> torch.nn.Module:
    """Return transformers' model of `config` with random weights, after saving it to `folder`."""
    torch.manual_seed(0)
    entries = AutoConfig.for_model(**huggingface_config(config))
    model = AutoModelForCausalLM.from_config(entries, attn_implementation="eager", experts_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.5 if name.endswith("gate.weight") else 0.1  # choices that no rounding changes
            parameter.add_(torch.randn_like(parameter) * spread)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    model.save_pretrained(folder)
    return model.eval()


def fused(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors by the names of transformers' files as its modules hold them: experts stacked, gate over up."""
    found, experts = {}, {}
    renamed = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    for name, tensor in state.items():
        name = name.replace("block_sparse_moe", "mlp").removesuffix(".weight")
        if ".experts." not in name:
            found[f"{name}.weight"] = tensor
            continue
        prefix, _, rest = name.partition(".experts.")
        number, _, kind = rest.partition(".")
        experts.setdefault((prefix, renamed.get(kind, kind)), {})[int(number)] = tensor
    stacks = {key: torch.stack([each[number] for number in range(len(each))]) for key, each in experts.items()}
    for prefix in {prefix for prefix, _ in stacks}:
        both = stacks[prefix, "gate_proj"], stacks[prefix, "up_proj"]
        found[f"{prefix}.experts.gate_up_proj"] = torch.cat(both, dim=1)
        found[f"{prefix}.experts.down_proj"] = stacks[prefix, "down_proj"]
    return found


@every_config
def test_logits_and_gradients_are_those_of_the_saved_model(config, tmp_path):
    theirs = theirs_of(config, tmp_path)
    weights = open_huggingface(tmp_path)
    assert weights.config == config.model_copy(update={"name": tmp_path.name, **untold(weights.config)})
    ours = build(config)
    ours.load_state_dict(state_dict_of(weights, config))
    ours.auxiliary.begin_step(0.0, 1.0)  # without the gradient of the balance loss
    tokens, labels = tokens_of(config), tokens_of(config, seed=1)
    logits, expected = ours(tokens), theirs(tokens).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(logits[..., : config.vocab_size], expected, atol=1e-5, rtol=1e-5)
    next_token_loss_sum(logits, labels).div(labels.numel()).backward()
    F.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in ours.named_parameters()}
    found = fused(to_huggingface(gradients, config))  # no gradient reaches the bias of the choice
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(
            found[name], parameter.grad, atol=1e-6, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_the_whole_loss_is_theirs_with_the_balance_loss(name, tmp_path):
    """Its value, its part, and every gradient. Of one block: of several, theirs multiplies means over all blocks."""
    config = CONFIGS[name].model_copy(update={"num_layers": 1})
    theirs = theirs_of(config, tmp_path)
    weights = open_huggingface(tmp_path)
    ours = build(weights.config)
    ours.load_state_dict(state_dict_of(weights, weights.config))
    ours.auxiliary.begin_step(1.0, 1.0)
    tokens = tokens_of(config)
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)  # theirs shifts by itself
    loss = next_token_loss_sum(ours(tokens), labels).div((labels != -100).sum())
    loss.backward()
    expected = theirs(tokens, labels=tokens, output_router_logits=True)
    expected.loss.backward()
    balance = ours.auxiliary.sums["balance"]
    assert balance > 1e-3
    torch.testing.assert_close(balance, theirs.config.router_aux_loss_coef * expected.aux_loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(loss + balance, expected.loss, rtol=1e-6, atol=0)
    found = fused(to_huggingface({name: p.grad for name, p in ours.named_parameters()}, config))
    for each, parameter in theirs.named_parameters():
        torch.testing.assert_close(
            found[each], parameter.grad, atol=1e-6, rtol=1e-3, msg=lambda text, n=each: f"{n}: {text}"
        )


def untold(found: ModelConfig) -> dict[str, object]:
    """Return the keys of a model that config.json does not have, as they were read."""
    return {key: getattr(found, key) for key in ("vocab_multiple", "head_dim")}


@every_config
def test_slices_across_experts_are_rows_of_the_stack(config, tmp_path):
    theirs_of(config, tmp_path)
    weights = open_huggingface(tmp_path)
    name = f"layers.{config.num_layers - 1}.feed_forward.experts.up_proj.weight"
    whole = weights.rows(name, 0, weights.shapes[name][0])
    width = weights.shapes[name][0] // 6
    for first, last in ((0, 1), (width - 1, width + 1), (3, 3 * width + 2), (5 * width, 6 * width)):
        assert torch.equal(weights.rows(name, first, last), whole[first:last])


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise: is 0.1, but this decoder has 0.0"),
        ("mixtral", {"scoring_func": "sigmoid"}, "scoring_func: is 'sigmoid', but this decoder has 'softmax'"),
        ("qwen3_moe", {"scoring_func": "sigmoid"}, "scoring_func: is 'sigmoid', but this decoder has 'softmax'"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts: must be a whole number"),
        ("mixtral", {"sliding_window": 128}, "sliding_window: is 128"),
        ("mixtral", {"router_aux_loss_coef": "0.02"}, "router_aux_loss_coef='0.02': must be a number of at least 0"),
        ("qwen3_moe", {"router_aux_loss_coef": -1}, "router_aux_loss_coef=-1: must be a number of at least 0"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers=3: must be a list of layer numbers"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func: is 'softmax', but this decoder has 'sigmoid'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method: is 'greedy'"),
        ("deepseek_v3", {"first_k_dense_replace": 3}, "first_k_dense_replace: is 3, which leaves none of"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads: is 2, and latents are expanded to"),
        ("deepseek_v3", {"n_group": None}, "n_group=None: must be a whole number"),
        ("deepseek_v3", {"kv_lora_rank": "a"}, "kv_lora_rank: must be a whole number"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias: is True"),
        ("deepseek_v3", {"routed_scaling_factor": 0}, "routed_scaling_factor=0: must be a number above 0"),
        ("qwen3_moe", {"num_experts": 4, "num_local_experts": 6}, "num_local_experts: is 6, but its synonym"),
    ],
)
def test_entries_that_are_not_supported_are_named(name, changes, text):
    values = huggingface_config(CONFIGS[name]) | changes
    with pytest.raises(ConfigError, match=text):
        model_config_of(values, "theirs")


def test_every_tensor_comes_back_bit_for_bit(tmp_path):
    """Through our names and files, and the bias in fp32 beside bf16 weights."""
    theirs_of(CONFIGS["deepseek_v3"], tmp_path)
    weights = open_huggingface(tmp_path)
    (tmp_path / "back").mkdir()
    write_tensors(tmp_path / "back", as_huggingface(weights, weights.config, "fp32"))
    ours, back = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert ours.keys() == back.keys()
    assert all(torch.equal(ours[name], back[name]) for name in ours)
    halves = {each.name: each.make().dtype for each in as_huggingface(weights, weights.config, "bf16")}
    assert {dtype for name, dtype in halves.items() if "correction" in name} == {torch.float32}
    assert {dtype for name, dtype in halves.items() if "correction" not in name} == {torch.bfloat16}


@pytest.mark.parametrize("bare", [False, True])
def test_blocks_that_predict_further_tokens_are_left_out_with_a_line(bare, tmp_path):
    config = CONFIGS["deepseek_v3"]
    theirs_of(config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"model.layers.{config.num_layers}.eh_proj.weight": torch.zeros(4, 4)}
    if bare:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    values = json.loads((tmp_path / "config.json").read_text())
    values.pop("num_mtp_layers", None)
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match=rf"has the tensor .*layers\.{config.num_layers}\.eh_proj"):
        open_huggingface(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_nextn_predict_layers": 1}))
    weights = open_huggingface(tmp_path)
    assert any("1 tensors of multi-token prediction" in note for note in weights.notes)
    assert set(state_dict_of(weights, weights.config)) == set(build(config).state_dict())


def test_published_config_of_deepseek_v3_is_the_preset():
    """The entries of deepseek-ai/DeepSeek-V3 as published, less quantization_config; its own code is not run."""
    own = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModel": "modeling_deepseek.DeepseekV3Model"}
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    values = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False,
        "auto_map": own, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
        "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
        "rope_scaling": {**scaling, "mscale": 1.0, "mscale_all_dim": 1.0}, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
        "v_head_dim": 128, "vocab_size": 129280,
    }  # fmt: skip
    read, preset = model_config_of(values, "deepseek_v3"), compose_config(["model=deepseek_v3"]).model
    trained = {"init_std", "parameters_published", "blocks", "max_sequence_length", "rope_scaling"}
    assert read.model_dump(exclude=trained) == preset.model_dump(exclude=trained)
    experts = preset.blocks["moe"].feed_forward.model_copy(update={"balance_loss": 0.0})
    assert read.blocks["moe"].feed_forward == experts
    assert read.blocks["moe"].mixer == preset.blocks["moe"].mixer == read.blocks["dense"].mixer
    with pytest.raises(ConfigError, match="auto_map"):
        model_config_of(values | {"auto_map": {"AutoModel": "modeling_other.Model"}}, "theirs")


@pytest.mark.parametrize(
    ("name", "entry", "tensor"),
    [("mixtral", "num_local_experts", r"experts\.6\.w"), ("deepseek_v3", "n_routed_experts", r"experts\.6\.")],
)
def test_another_number_of_experts_than_in_the_files_is_named(name, entry, tensor, tmp_path):
    theirs_of(CONFIGS[name], tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    changed = {entry: 9 if "n_group" in values else 7}
    (tmp_path / "config.json").write_text(json.dumps(values | changed))
    with pytest.raises(ConfigError, match=rf"has no tensor .*{tensor}"):
        open_huggingface(tmp_path)


@pytest.mark.parametrize(
    "keys",
    [{"router": {"score": "sigmoid"}}, {"shared_experts": 1}, {"capacity_factor": 1.0}, {"router": {"scale": 2.0}}],
    ids=str,
)
def test_mixtures_without_a_class_are_not_exported(keys):
    with pytest.raises(ConfigError, match="no Hugging Face counterpart"):
        huggingface_config(with_experts(llama, "attention", ["moe"], **keys))
