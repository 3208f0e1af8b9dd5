"""Folders written by other programs, in many variants: they give transformers' logits or are rejected by name.

Each variant changes entries of config.json, or tensors, as model cards, tools and hands do. 6 seconds.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, logging

from lightning_llm.base.errors import ConfigError
from lightning_llm.model.weights.load import state_dict_of, whole_decoder
from lightning_llm.run.resume.weights import open_weights
from tests.model.model_shapes import gemma2, gpt2, llama, qwen3
from tests.weight_folders import write_huggingface

TINY = {"vocab_size": 48, "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 40, "max_sequence_length": 64}
WINDOW = {"attention_window": {"mixer": {"kind": "attention", "window": 6}}}
BASES = {
    "llama": llama(**TINY),
    "mistral": llama(**TINY, blocks=WINDOW, layers=["attention_window"]),
    "qwen3": qwen3(**TINY),
    "gemma2": gemma2(**TINY),
    "gpt2": gpt2(**TINY),
}
ROPE = ("llama", "mistral", "qwen3", "gemma2")
ROPE_PLAIN = ("llama", "mistral", "qwen3")
"""Gemma 2 is trained here without any scaling, and read with it."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GONE: Any = ...
"""In the place of a value: the entry is taken away."""
Tensors = dict[str, torch.Tensor]


class Variant:
    """Changed entries of config.json, and a change of the tensors; `families` have it."""

    def __init__(self, families: tuple[str, ...], change: Callable[[Tensors], Tensors] | None = None, **entries: Any):
        self.families, self.change, self.entries = families, change, entries


ALL = tuple(BASES)
FULL, SLIDING = "full_attention", "sliding_attention"
SWITCHED = {"use_sliding_window": True, "sliding_window": 4, "layer_types": GONE}
no_rope = {"rope_theta": GONE, "rope_scaling": GONE, "rope_parameters": GONE}


def head(scale: float) -> Callable[[Tensors], Tensors]:
    """A separate head: the embedding times `scale`."""

    def change(state: Tensors) -> Tensors:
        (embedding,) = (
            state[name] for name in ("model.embed_tokens.weight", "transformer.wte.weight") if name in state
        )
        return {**state, "lm_head.weight": embedding * scale}

    return change


def without_head(state: Tensors) -> Tensors:
    return {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}


def one_bias(state: Tensors) -> Tensors:
    name = "model.layers.0.self_attn.q_proj"
    return {**state, f"{name}.bias": torch.ones(len(state[f"{name}.weight"]))}


def bf16_norms(state: Tensors) -> Tensors:
    return {name: tensor.bfloat16() if "norm" in name or "ln_" in name else tensor for name, tensor in state.items()}


VARIANTS = {
    "as it is": Variant(ALL),
    # positions
    "yarn beside the default": Variant(ROPE, rope_scaling=YARN, rope_parameters=PLAIN),
    "yarn at both places": Variant(ROPE_PLAIN, rope_scaling=YARN, rope_parameters={**YARN, "rope_theta": 1e4}),
    "two factors": Variant(ROPE, rope_scaling=YARN, rope_parameters={**YARN, "factor": 8.0, "rope_theta": 1e4}),
    "yarn as transformers 5 writes it": Variant(ROPE, **no_rope | {"rope_parameters": {**YARN, "rope_theta": 3e4}}),
    "yarn as transformers 4 wrote it": Variant(ROPE, **no_rope | {"rope_theta": 3e4, "rope_scaling": YARN}),
    "linear by its old name": Variant(ROPE, **no_rope | {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "a type by two names": Variant(ROPE, **no_rope | {"rope_scaling": {**YARN, "type": "linear"}}),
    "theta at two places": Variant(ROPE, rope_theta=5e5, rope_scaling=None, rope_parameters={"rope_theta": 1e4}),
    "theta inside": Variant(ROPE, **no_rope | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "theta outside": Variant(ROPE, **no_rope | {"rope_theta": 5e5}),
    "theta of the entry that counts less": Variant(ROPE, **no_rope | {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 5e5}}),
    "theta null": Variant(ROPE, **no_rope | {"rope_theta": None}),
    "theta zero": Variant(ROPE, **no_rope | {"rope_theta": 0}),
    "no positions at all": Variant(ROPE, **no_rope),
    "original length at two places": Variant(ROPE, **no_rope | {
        "rope_scaling": YARN, "original_max_position_embeddings": 8}),
    "original length outside": Variant(ROPE, **no_rope | {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16}),
    "original length null": Variant(ROPE, **no_rope | {
        "rope_scaling": {**YARN, "original_max_position_embeddings": None}}),
    "original length left out": Variant(ROPE, **no_rope | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "positions by layer type": Variant(ROPE, **no_rope | {
        "layer_types": [FULL, FULL], "rope_parameters": {FULL: {**YARN, "rope_theta": 1e4}}}),
    "truncate null": Variant(ROPE, **no_rope | {"rope_scaling": {**YARN, "truncate": None}}),
    "truncate false": Variant(ROPE, **no_rope | {"rope_scaling": {**YARN, "truncate": False}}),
    "mscale": Variant(ROPE, **no_rope | {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}),
    "mscale as text": Variant(ROPE, **no_rope | {"rope_scaling": {**YARN, "mscale": "1", "mscale_all_dim": "2"}}),
    "attention factor": Variant(ROPE, **no_rope | {"rope_scaling": {**YARN, "attention_factor": 1.3}}),
    "a ramp of zero": Variant(ROPE, **no_rope | {"rope_scaling": {**YARN, "beta_fast": 0}}),
    "llama3": Variant(ROPE, **no_rope | {
        "rope_theta": 1e4, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16}}),
    "llama3 without its length": Variant(ROPE, **no_rope | {"rope_theta": 1e4, "rope_scaling": LLAMA3}),
    "dynamic": Variant(ROPE, **no_rope | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "a factor without a type": Variant(ROPE, **no_rope | {"rope_scaling": {"factor": 4.0}}),
    "half a head": Variant(ROPE, partial_rotary_factor=0.5),
    "half a head inside": Variant(ROPE, **no_rope | {
        "rope_parameters": {**YARN, "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    # sizes
    "head_dim null": Variant(ROPE, head_dim=None),
    "head_dim left out": Variant(ROPE, head_dim=GONE),
    "head_dim of another size": Variant(ROPE, head_dim=16),
    "heads that do not divide": Variant(ROPE, num_attention_heads=3, num_key_value_heads=3),
    "key heads null": Variant(ROPE, num_key_value_heads=None),
    "key heads left out": Variant(ROPE, num_key_value_heads=GONE),
    "a row too many": Variant(ALL, vocab_size=49),
    "a row too few": Variant(ALL, vocab_size=47),
    "longer positions": Variant(ALL, max_position_embeddings=128, n_positions=128),
    # norms and activations
    "another epsilon": Variant(ALL, rms_norm_eps=0.1, layer_norm_epsilon=0.1),
    "epsilon null": Variant(ALL, rms_norm_eps=None, layer_norm_epsilon=None),
    "epsilon left out": Variant(ALL, rms_norm_eps=GONE, layer_norm_epsilon=GONE),
    "another activation": Variant(ALL, hidden_act="gelu", hidden_activation="relu", activation_function="relu"),
    "activation null": Variant(ALL, hidden_act=None, hidden_activation=None, activation_function=None),
    "gelu by its old key": Variant(("gemma2",), hidden_act="gelu"),
    "gelu exact": Variant(("gpt2",), activation_function="gelu"),
    # biases
    "biases that are not there": Variant(ROPE, attention_bias=True),
    "mlp biases that are not there": Variant(ROPE, mlp_bias=True),
    "a bias that config.json does not know": Variant(ROPE, one_bias),
    # windows
    "a window": Variant(ALL, sliding_window=4),
    "a window of null": Variant(ALL, sliding_window=None),
    "a window left out": Variant(ROPE, sliding_window=GONE),
    "a window switched on": Variant(ROPE, **SWITCHED | {"max_window_layers": 0}),
    "a window above the last layer": Variant(ROPE, **SWITCHED | {"max_window_layers": 2}),
    "a window switched off": Variant(ROPE, use_sliding_window=False, sliding_window=4),
    "layer types": Variant(ROPE, sliding_window=4, layer_types=[SLIDING, FULL]),
    "layer types turned round": Variant(ROPE, sliding_window=4, layer_types=[FULL, SLIDING]),
    "layer types all full": Variant(ROPE, sliding_window=4, layer_types=[FULL, FULL]),
    "layer types of three": Variant(ROPE, layer_types=[FULL, FULL, FULL]),
    "layer types null": Variant(ROPE, layer_types=None),
    # heads of the model
    "tied, with another head": Variant(ALL, head(1.5), tie_word_embeddings=True),
    "tied, with the same head": Variant(ALL, head(1.0), tie_word_embeddings=True),
    "tied, without a head": Variant(ALL, without_head, tie_word_embeddings=True),
    "untied": Variant(ALL, head(1.5), tie_word_embeddings=False),
    "untied, without a head": Variant(ALL, without_head, tie_word_embeddings=False),
    "tied or not is not said": Variant(ALL, head(1.5), tie_word_embeddings=GONE),
    "tied as text": Variant(ALL, head(1.5), tie_word_embeddings="false"),
    "tied null": Variant(ALL, head(1.5), tie_word_embeddings=None),
    # dtypes
    "two dtypes": Variant(ALL, dtype="float32", torch_dtype="bfloat16"),
    "another dtype than the tensors'": Variant(ALL, torch_dtype="float16"),
    "norms in another dtype": Variant(ALL, bf16_norms),
    # what it is
    "another model_type": Variant(("llama", "qwen3"), model_type="mistral"),
    "mistral by class alone": Variant(("mistral",), model_type="llama"),
    "no model_type": Variant(ALL, model_type=GONE),
    "no architectures": Variant(ALL, architectures=GONE),
    "without its head": Variant(("llama",), architectures=["LlamaModel"]),
    "quantised": Variant(ALL, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "code of its own": Variant(ALL, auto_map={"AutoModelForCausalLM": "modeling.X"}),
    "layers of their own": Variant(("llama", "qwen3"), per_layer_config={"1": {"rms_norm_eps": 0.1}}),
    "tokens see later ones": Variant(ALL, is_causal=False),
    "tokens see later ones, null": Variant(("qwen3", "llama"), is_causal=None),
    "tokens see earlier ones": Variant(("mistral",), is_causal=True),
    "chunks, which generate goes by": Variant(("llama",), attention_chunk_size=4),
    "weights of another name": Variant(("llama",), transformers_weights="other.safetensors"),
    # GPT-2
    "an alias": Variant(("gpt2",), hidden_size=64),
    "an alias of heads": Variant(("gpt2",), num_attention_heads=2),
    "an alias that agrees": Variant(("gpt2",), hidden_size=32),
    "inner null": Variant(("gpt2",), n_inner=None),
    "scaled by layer": Variant(("gpt2",), scale_attn_by_inverse_layer_idx=True),
    "not scaled": Variant(("gpt2",), scale_attn_weights=False),
    "upcast": Variant(("gpt2",), reorder_and_upcast_attn=True),
    "cross attention": Variant(("gpt2",), add_cross_attention=True),
    # Gemma 2
    "another scalar": Variant(("gemma2",), query_pre_attn_scalar=8),
    "a scalar left out": Variant(("gemma2",), query_pre_attn_scalar=GONE),
    "no caps": Variant(("gemma2",), attn_logit_softcapping=None),
    "no last cap": Variant(("gemma2",), final_logit_softcapping=None),
    "caps left out": Variant(("gemma2",), attn_logit_softcapping=GONE, final_logit_softcapping=GONE),
    "both ways": Variant(("gemma2",), use_bidirectional_attention=True),
}  # fmt: skip
ONE_MEANING = (
    "as it is", "yarn at both places", "yarn as transformers 5 writes it", "yarn as transformers 4 wrote it", "llama3",
    "linear by its old name", "theta inside", "theta outside", "no positions at all", "original length outside",
    "original length left out", "truncate false", "mscale", "attention factor", "dynamic", "key heads left out",
    "another epsilon", "epsilon left out", "tied, with the same head", "tied, without a head",
    "another dtype than the tensors'", "norms in another dtype", "no architectures", "an alias that agrees",
    "inner null", "gelu exact", "upcast", "another scalar", "a scalar left out", "caps left out",
    "tokens see earlier ones",
)  # fmt: skip
"""Variants that say one thing: they may be refused only where transformers does not load them either."""
CASES = [(family, name) for name, variant in VARIANTS.items() for family in variant.families]


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("bases")
    for name, config in BASES.items():
        write_huggingface(root / name, config)
    return root


def varied(base: Path, folder: Path, variant: Variant) -> Path:
    """The folder `base` with `variant`: entries that its class does not have are left out."""
    shutil.copytree(base, folder, copy_function=os.link)
    values = json.loads((base / "config.json").read_text())
    for key, value in variant.entries.items():
        values.pop(key, None)
        if value is not GONE:
            values[key] = value
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(values))
    if variant.change is not None:
        changed = variant.change(load_file(base / "model.safetensors"))
        (folder / "model.safetensors").unlink()
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
    return folder


TOKENS = torch.randint(47, (1, 40), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def theirs(folder: Path) -> torch.Tensor | str:
    """Transformers' logits, or why there are none."""
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if found["missing_keys"] or found["mismatched_keys"]:
            return f"random numbers for {found['missing_keys'] or found['mismatched_keys']}"
        return model.eval()(TOKENS).logits
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@torch.no_grad()
def ours(folder: Path) -> torch.Tensor | str:
    """This decoder's logits, or why the folder is refused."""
    try:
        weights = open_weights(folder)
    except ConfigError as error:
        return "\n".join(each.text for each in error.problems)
    return whole_decoder(weights.config, state_dict_of(weights))(TOKENS)[..., : weights.config.vocab_size]


SOON = [(each.families[number % len(each.families)], name) for number, (name, each) in enumerate(VARIANTS.items())]
"""Each variant of one family, in turn."""
EVERY = [case if case in SOON else pytest.param(case, marks=pytest.mark.full) for case in CASES]


@pytest.mark.parametrize("case", EVERY, ids=lambda case: "-".join(case))
def test_a_folder_gives_the_logits_of_transformers_or_is_rejected(case, bases, tmp_path):
    family, name = case
    folder = varied(bases / family, tmp_path / "folder", VARIANTS[name])
    found, expected = ours(folder), theirs(folder)
    if isinstance(found, str):
        assert all(line.endswith(".") for line in found.splitlines())
        assert name not in ONE_MEANING or isinstance(expected, str), found
        return
    assert not isinstance(expected, str), f"read here, and transformers does not: {expected}"
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
