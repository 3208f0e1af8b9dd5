"""Weights of mixtures of experts, from and to transformers' files: logits, gradients, bits, refusals."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.interop.families import model_config_of
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.model.weights.folder import open_huggingface
from lightning_llm.model.weights.load import state_dict_of
from tests.model.huggingface_states import huggingface_config, to_huggingface
from tests.model.model_shapes import build, llama, qwen3, tokens_of


def with_experts(base, mixer: str, layers: list[str], **keys) -> ModelConfig:
    moe = {"kind": "moe", "experts": 6, "per_token": 2, "z_loss": 0.0, **keys}
    blocks = {"moe": {"mixer": {"kind": mixer}, "feed_forward": moe}}
    return base(num_layers=len(layers) if len(layers) > 1 else 2, blocks=blocks, layers=layers)


CONFIGS = {
    "mixtral": with_experts(llama, "attention", ["moe"]),
    "qwen3_moe": with_experts(
        qwen3, "qk_norm_attention", ["moe"], ffn_hidden_size=40, router={"normalise": False}, balance_loss=0.25
    ),
    "qwen3_moe_with_a_dense_block": with_experts(
        qwen3, "qk_norm_attention", ["moe", "qk_norm_attention", "moe"], ffn_hidden_size=40
    ),
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
    found = fused(to_huggingface({name: p.grad for name, p in ours.named_parameters()}, config))
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(
            found[name], parameter.grad, atol=1e-6, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}"
        )


def untold(found: ModelConfig) -> dict[str, object]:
    """Return the keys of a model that config.json does not have, as they were read."""
    return {key: getattr(found, key) for key in ("vocab_multiple", "head_dim")}


@every_config
def test_slices_across_experts_are_rows_of_the_stack(config, tmp_path):
    theirs_of(config, tmp_path)
    weights = open_huggingface(tmp_path)
    name = "layers.0.feed_forward.experts.up_proj.weight"
    whole = weights.rows(name, 0, weights.shapes[name][0])
    width = weights.shapes[name][0] // 6
    for first, last in ((0, 1), (width - 1, width + 1), (3, 3 * width + 2), (5 * width, 6 * width)):
        assert torch.equal(weights.rows(name, first, last), whole[first:last])


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise: is 0.1, but this decoder has 0.0"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts: must be a whole number"),
        ("mixtral", {"sliding_window": 128}, "sliding_window: is 128"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers=3: must be a list of layer numbers"),
        ("qwen3_moe", {"num_experts": 4, "num_local_experts": 6}, "num_local_experts: is 6, but its synonym"),
    ],
)
def test_entries_that_are_not_supported_are_named(name, changes, text):
    values = huggingface_config(CONFIGS[name]) | changes
    with pytest.raises(ConfigError, match=text):
        model_config_of(values, "theirs")


def test_another_number_of_experts_than_in_the_files_is_named(tmp_path):
    theirs_of(CONFIGS["mixtral"], tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_local_experts": 7}))
    with pytest.raises(ConfigError, match=r"has no tensor .*experts\.6\.w"):
        open_huggingface(tmp_path)


@pytest.mark.parametrize(
    "keys",
    [{"router": {"score": "sigmoid"}}, {"shared_experts": 1}, {"capacity_factor": 1.0}, {"router": {"scale": 2.0}}],
    ids=str,
)
def test_mixtures_without_a_class_are_not_exported(keys):
    with pytest.raises(ConfigError, match="no Hugging Face counterpart"):
        huggingface_config(with_experts(llama, "attention", ["moe"], **keys))
