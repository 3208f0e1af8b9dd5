"""Axes by names and shapes against the model's own roles, and against the plans of other architectures. 5 seconds."""

import json

import pytest
import torch

from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import ModelConfig
from lightning_llm.model.decoder import Decoder
from lightning_llm.plan.axes.tp import alike, style_of, tensor_axes
from tests.weight_folders import write_huggingface

AXES = {
    "column": "outputs",
    "row": "inputs",
    "vocabulary": "vocabulary",
    "replicate": "replicate",
    "per_head": "replicate",
}
"""The sides that the roles of `Decoder.roles` share."""
SMALL = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_hidden_size": 128,
    "vocab_size": 320,
}


def small(name: str) -> ModelConfig:
    return compose_config([f"model={name}", *(f"model.{key}={value}" for key, value in SMALL.items())]).model


@pytest.mark.parametrize("name", ["llama_tiny", "gpt3_345m", "qwen3_tiny", "gemma2_tiny"])
def test_they_are_the_decoders_own_roles(name):
    decoder = Decoder(small(name), torch.float32)
    shapes = {name: tuple(each.shape) for name, each in decoder.named_parameters()}
    roles = {name: AXES[role] for name, role in decoder.roles().items()}
    assert tensor_axes(shapes, ranks=2) == roles


@pytest.mark.parametrize("name", ["llama_tiny", "gpt3_345m"])
def test_unknown_names_of_matrices_alternate_as_they_should(name):
    """In the feed-forward network, under invented names: tensors cut by outputs are summed by inputs."""
    decoder = Decoder(small(name), torch.float32)
    shapes = {
        name.replace("up_proj", "alpha").replace("down_proj", "omega"): tuple(each.shape)
        for name, each in decoder.named_parameters()
        if "gate_proj" not in name
    }
    found = tensor_axes(shapes, ranks=2)
    assert found["layers.0.feed_forward.alpha"] == "outputs"
    assert found["layers.0.feed_forward.omega"] == "inputs"


def test_each_block_is_split_independently():
    odd = {f"layers.{block}.{name}.weight": (8, 8) for block in range(2) for name in ("alpha", "beta", "gamma")}
    found = tensor_axes(odd, ranks=2)
    assert [found[f"layers.1.{name}"] for name in ("alpha", "beta", "gamma")] == ["outputs", "inputs", "outputs"]
    assert alike(found) == {(f"layers.*.{name}", found[f"layers.0.{name}"]): 2 for name in ("alpha", "beta", "gamma")}


def test_the_head_is_split_by_its_outputs():
    assert style_of("lm_head", "vocabulary") == "ColwiseParallel"
    assert style_of("model.embed_tokens", "vocabulary") == "RowwiseParallel"


GPTJ = {
    "transformer.wte": "vocabulary", "transformer.h.0.ln_1": "replicate", "transformer.h.0.attn.k_proj": "outputs",
    "transformer.h.0.attn.v_proj": "outputs", "transformer.h.0.attn.q_proj": "outputs",
    "transformer.h.0.attn.out_proj": "inputs", "transformer.h.0.mlp.fc_in": "outputs",
    "transformer.h.0.mlp.fc_out": "inputs", "lm_head": "vocabulary",
}  # fmt: skip
OPT = {
    "model.decoder.embed_tokens": "vocabulary", "model.decoder.embed_positions": "replicate",
    "model.decoder.layers.0.self_attn.k_proj": "outputs", "model.decoder.layers.0.self_attn.v_proj": "outputs",
    "model.decoder.layers.0.self_attn.q_proj": "outputs", "model.decoder.layers.0.self_attn.out_proj": "inputs",
    "model.decoder.layers.0.self_attn_layer_norm": "replicate", "model.decoder.layers.0.fc1": "outputs",
    "model.decoder.layers.0.fc2": "inputs",
}  # fmt: skip
T5 = {
    "shared": "vocabulary", "encoder.block.0.layer.0.SelfAttention.q": "outputs",
    "encoder.block.0.layer.0.SelfAttention.k": "outputs", "encoder.block.0.layer.0.SelfAttention.v": "outputs",
    "encoder.block.0.layer.0.SelfAttention.o": "inputs",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias": "replicate",
    "encoder.block.0.layer.0.layer_norm": "replicate", "encoder.block.0.layer.1.DenseReluDense.wi": "outputs",
    "encoder.block.0.layer.1.DenseReluDense.wo": "inputs", "decoder.block.0.layer.1.EncDecAttention.o": "inputs",
}  # fmt: skip


@pytest.mark.parametrize("plan", [GPTJ, OPT, T5], ids=["GPT-J", "OPT", "T5"])
def test_other_architectures_are_shared_as_they_are_by_hand(plan):
    vectors = ("ln_1", "layer_norm")
    shapes = {f"{name}.weight": (64,) if name.endswith(vectors) else (64, 64) for name in plan}
    assert tensor_axes(shapes, ranks=4) == plan


def test_sizes_that_ranks_do_not_divide_are_replicated():
    shapes = {"h.0.attn.q_proj.weight": (6, 8), "h.0.attn.o_proj.weight": (8, 6), "h.0.attn.c_attn.weight": (8, 6)}
    assert set(tensor_axes(shapes, ranks=4).values()) == {"replicate", "outputs"}
    assert set(tensor_axes(shapes, ranks=4, transposed=["h.0.attn.c_attn"]).values()) == {"replicate"}
    assert tensor_axes(shapes, ranks=3)["h.0.attn.o_proj"] == "inputs"


def test_a_folder_of_weights_is_read_by_its_names(tmp_path, capsys):
    write_huggingface(tmp_path / "llama", small("llama_tiny"))
    assert main(["plan", "--tensor-axes", str(tmp_path / "llama"), "parallel.tp=2", "--json"]) == 0
    axes = json.loads(capsys.readouterr().out)["tensor_parallel_axes"]
    assert axes["model.layers.1.mlp.down_proj"] == "inputs"
    assert axes["model.norm"] == "replicate"
    assert main(["plan", "--tensor-axes", str(tmp_path / "llama")]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "o_proj" in line)
    assert line.split() == ["model.layers.*.self_attn.o_proj", "inputs", "RowwiseParallel", "2"]
    assert main(["plan", "--tensor-axes", str(tmp_path / "nothing")]) == 2
    for words in (["model=llama_tiny"], ["parallel.tp=0"], ["parallel.tp=two"], ["--dry-run"]):
        assert main(["plan", "--tensor-axes", str(tmp_path / "llama"), *words]) == 2
    (tmp_path / "llama" / "config.json").write_text('{"architectures": {"a": 1}}')
    assert main(["plan", "--tensor-axes", str(tmp_path / "llama")]) == 0
