"""Weights as codes: compressed-tensors reads the numbers that `evaluate --as` measures."""

import inspect
import itertools
from typing import get_args

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization.quant_config import QuantizationConfig

from lightning_llm import api
from lightning_llm.base.errors import ConfigError
from lightning_llm.cli.options import CODE_FORMATS
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema.casts import UNQUANTIZED, CastConfig
from lightning_llm.config.schema.number_formats import NUMBER_FORMATS
from lightning_llm.model.interop.families import architecture
from lightning_llm.model.weights.folder import Weights
from lightning_llm.precision.cast.quantize import quantize
from lightning_llm.precision.cast.rounding import decode
from lightning_llm.run.code_weights import CODES, CodeWeights, as_codes, quantization_entry, uncoded_modules


class Drawn(Weights):
    """Random weights of a small Llama; one has an outlier, so that weights that are read together differ in amax."""

    def __init__(self, *words: str, model: str = "llama_tiny"):
        shape = ["model.hidden_size=64", "model.num_heads=2", "model.num_kv_heads=1", "model.ffn_hidden_size=128"]
        shape += ["model.num_layers=3", "model.vocab_size=96"]
        self.config = compose_config([f"model={model}", *shape, *words]).model
        generator = torch.Generator().manual_seed(0)
        self.state = {name: torch.randn(*shape, generator=generator) / 8 for name, shape in self.shapes.items()}
        if (key := "layers.0.attention.k_proj.weight") in self.state:
            self.state[key][0, 0] = 9.0
        self.kind, self.path, self.architecture = "drawn", None, None

    def rows(self, name, first, last):
        return self.state[name][first:last]

    def dtype(self, name):
        return "fp32"

    def files(self):
        return {}

    def verify(self, rank=0, world=1):
        pass


def decompressed(weights):
    """Return {name of a linear of theirs: its weight} as compressed-tensors reads the written tensors."""
    tensors = {each.name: each.make() for each in as_codes(weights, "fp32")}
    for each in as_codes(weights, "fp32"):
        constant = 0 if each.size_bytes else tensors[each.name].nbytes
        assert tensors[each.name].nbytes == each.size_bytes + constant
    read = QuantizationConfig.model_validate(quantization_entry(weights)["quantization_config"])
    (scheme,) = read.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(read.format)
    found = {}
    for prefix in sorted({key.rpartition(".")[0] for key in tensors if key.endswith(".weight_scale")}):
        state = {key.removeprefix(f"{prefix}."): each for key, each in tensors.items() if key.startswith(f"{prefix}.")}
        found[prefix] = compressor.decompress(state, scheme)["weight"].float()
    others = [key for key in tensors if key.rpartition(".")[0] not in found]
    assert all(tensors[key].dtype == torch.float32 for key in others)
    assert {key.removesuffix(".weight") for key in others if "proj" in key} <= set(uncoded_modules(weights))
    return found


@pytest.mark.parametrize("name", CODES)
def test_compressed_tensors_reads_the_same_numbers(name):
    weights = CodeWeights(Drawn(), CODES[name], None)
    read = decompressed(weights)
    assert len(read) == len(weights.casts)
    for ours in weights.casts:
        theirs = (
            ours.replace("layers.", "model.layers.")
            .replace("attention.", "self_attn.")
            .replace("feed_forward.", "mlp.")
        )
        parameter = f"{ours}.weight"
        expected = weights.rows(parameter, 0, weights.shapes[parameter][0])
        # They multiply in bf16, ours are fp32: two roundings.
        torch.testing.assert_close(read[theirs], expected, rtol=2**-7, atol=0)
        relative = (expected - weights.weights.state[parameter]).norm() / weights.weights.state[parameter].norm()
        assert relative < {"fp8": 0.04}.get(name, 0.13)


MIXTRAL = ["model.blocks.moe.feed_forward.ffn_hidden_size=64"]
QWEN = [*MIXTRAL, "model.blocks.moe.mixer.kind=qk_norm_attention", "model.layers=[moe,qk_norm_attention,moe]"]
LATENTS = "{kind: mla, q_rank: 32, kv_rank: 64, nope_dim: 16, rope_dim: 16, value_dim: 32}"
DEEPSEEK = [
    *MIXTRAL, "model.num_kv_heads=2", "model.norm_eps=1e-6", f"model.blocks.moe.mixer={LATENTS}",
    "model.blocks.moe.feed_forward.router.score=sigmoid", "model.blocks.moe.feed_forward.shared_experts=1",
    "model.blocks.moe.feed_forward.router.bias_update_rate=0.001",
]  # fmt: skip


FAMILIES = {
    "MixtralForCausalLM": (MIXTRAL, "block_sparse_moe.experts.{}.w1", "block_sparse_moe.gate"),
    "Qwen3MoeForCausalLM": (QWEN, "mlp.experts.{}.gate_proj", "mlp.gate"),
    "DeepseekV3ForCausalLM": (DEEPSEEK, "mlp.experts.{}.gate_proj", "mlp.gate"),
}
QUICK = {("MixtralForCausalLM", "nvfp4"), ("Qwen3MoeForCausalLM", "int4"), ("DeepseekV3ForCausalLM", "fp8")}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.full)
        for pair in itertools.product(FAMILIES, CODES)
    ],
)
def test_each_expert_has_codes_and_scales_of_its_own(family, name):
    words, expert, router = FAMILIES[family]
    drawn = Drawn(*words, model="moe_tiny")
    assert architecture(drawn.config).class_name == family
    weights = CodeWeights(drawn, CODES[name], None)
    parameter = "layers.2.feed_forward.experts.gate_proj.weight"
    drawn.state[parameter][:64] *= 100
    read = decompressed(weights)
    ours = weights.rows(parameter, 0, weights.shapes[parameter][0])
    torch.testing.assert_close(weights.rows(parameter, 70, 140), ours[70:140], rtol=0, atol=0)
    rows = len(ours) // 8
    for number, part in enumerate(ours.split(rows)):
        theirs = f"model.layers.2.{expert.format(number)}"
        torch.testing.assert_close(read[theirs], part, rtol=2**-7, atol=0)
        plain = drawn.state[parameter][number * rows : (number + 1) * rows]
        assert (part - plain).norm() / plain.norm() < {"fp8": 0.04}.get(name, 0.13)
    assert f"model.layers.2.{router}" in uncoded_modules(weights)


def test_an_expert_that_the_recipe_keeps_high_has_no_codes():
    words = ["precision=nvfp4_qat", "precision.modules.exclude=['*.experts.3.*']"]
    drawn = Drawn(*MIXTRAL, model="moe_tiny")
    weights = CodeWeights(drawn, CODES["nvfp4"], compose_config(words).precision)
    kept = [each for each in uncoded_modules(weights) if ".0.block_sparse_moe.experts." in each]
    assert kept == [f"model.layers.0.block_sparse_moe.experts.3.w{part}" for part in (1, 2, 3)]
    assert not any(".0.block_sparse_moe.experts.3." in each for each in decompressed(weights))
    parameter = "layers.0.feed_forward.experts.gate_proj.weight"
    found, plain = weights.rows(parameter, 0, 512), drawn.state[parameter]
    assert torch.equal(found[192:256], plain[192:256])
    assert not torch.equal(found[128:192], plain[128:192])


def test_weights_that_engines_run_together_share_a_scale():
    weights = CodeWeights(Drawn(), CODES["nvfp4"], None)
    tensors = {each.name: each.make() for each in as_codes(weights, "bf16")}
    scales = {key: tensor.item() for key, tensor in tensors.items() if key.endswith("weight_global_scale")}
    first = [scales[f"model.layers.0.self_attn.{part}_proj.weight_global_scale"] for part in "qkv"]
    assert first == [pytest.approx(2688 / 9.0, rel=1e-6)] * 3
    assert scales["model.layers.0.self_attn.o_proj.weight_global_scale"] != first[0]


def test_layers_that_the_recipe_keeps_high_have_no_codes():
    recipe = compose_config(["precision=nvfp4", "precision.modules.last_blocks_high_precision=1",
                             "precision.modules.last_fraction_high_precision=null",
                             "precision.modules.first_fraction_high_precision=null"]).precision  # fmt: skip
    weights = CodeWeights(Drawn(), CODES["nvfp4"], recipe)
    assert {name.split(".")[1] for name in weights.casts} == {"0", "1"}
    kept = uncoded_modules(weights)
    assert "lm_head" in kept
    assert "model.layers.2.mlp.down_proj" in kept
    assert len(kept) == 8
    whole = weights.rows("layers.2.feed_forward.down_proj.weight", 0, 64)
    assert torch.equal(whole, weights.weights.state["layers.2.feed_forward.down_proj.weight"])


def test_the_recipes_own_cast_is_used_if_the_layout_holds_it():
    own = CODES["nvfp4"].cast
    square = CastConfig(format="e2m1", block="16x16", scale="two_level_e4m3")
    assert CODES["nvfp4"].chosen_cast(square) == square
    others = [UNQUANTIZED, own.model_copy(update={"rounding": "stochastic"}), CODES["mxfp4"].cast, CODES["fp8"].cast]
    assert [CODES["nvfp4"].chosen_cast(each) for each in others] == [own] * 4
    ceil = CastConfig(format="e2m1", block="1x32", scale="e8m0_ceil")
    assert CODES["mxfp4"].chosen_cast(ceil) == ceil


def test_a_model_trained_with_the_codes_keeps_them():
    """Square blocks are written as rows of blocks, and the numbers are those of the training cast."""
    drawn = Drawn()
    recipe = compose_config(["precision=nvfp4_all_blocks"]).precision
    weights = CodeWeights(drawn, CODES["nvfp4"], recipe)
    name = "layers.1.attention.o_proj"
    assert weights.casts[name].block == "16x16"
    parameter = f"{name}.weight"
    made = quantize(drawn.state[parameter], weights.casts[name]).dequantized
    assert torch.equal(weights.rows(parameter, 0, 64), made)


def test_rows_that_blocks_do_not_divide_are_refused():
    narrow = CodeWeights(Drawn(), CODES["int4"], None)  # rows of 64: blocks of 32
    assert narrow.format.scheme["group_size"] == 32
    with pytest.raises(ConfigError, match=r"^--as=nvfp4: has blocks of 16 inputs, and a linear layer has 72\."):
        CodeWeights(Drawn("model.ffn_hidden_size=72"), CODES["nvfp4"], None, key="--as")


def test_weights_stored_transposed_are_refused():
    gpt2 = CodeWeights(Drawn("model.num_kv_heads=2", model="gpt3_345m"), CODES["fp8"], None)
    with pytest.raises(ConfigError, match=r"^--codes=fp8: GPT2LMHeadModel stores its weights as \[inputs, outputs\]"):
        as_codes(gpt2, "fp32")


def test_the_flags_offer_every_format():
    offered, _none = get_args(inspect.signature(api.evaluate).parameters["codes"].annotation)
    assert tuple(CODES) == CODE_FORMATS == get_args(offered)


CASTS = {
    "nvfp4": [
        "precision=quartet_ii",
        "precision=nvfp4_4over6",
        "precision.fprop.w.amax=row",
        "precision.fprop.w.headroom=0.9",
    ],
    "fp8": ["precision.fprop.w.scale=power_of_two", "precision.fprop.w.scale=unit", "precision.fprop.w.block=row"],
    "mxfp4": [
        "precision.fprop.w.scale=e8m0_even",
        "precision.fprop.w.block=32x32",
        "precision.fprop.w.scale=e8m0_ceil",
    ],
}


@pytest.mark.parametrize(("name", "word"), [(name, word) for name, words in CASTS.items() for word in words])
def test_stored_codes_are_the_numbers_of_the_recipes_cast(name, word):
    """Code times scale, read back here as compressed-tensors defines it."""
    mxfp4 = ["precision=nvfp4_qat", "precision.fprop.w.block=1x32", "precision.fprop.w.scale=e8m0_floor"]
    base = {"nvfp4": ["precision=nvfp4_qat"], "fp8": ["precision=fp8_current"], "mxfp4": mxfp4}[name]
    words = [word] if word.startswith("precision=") else [*base, word]
    weights = CodeWeights(Drawn(), CODES[name], compose_config(words).precision)
    ours = next(iter(weights.casts))
    stored = weights.format.stored(weights.coded(ours), weights.casts[ours])
    if name == "fp8":
        found = stored["weight"].float() * stored["weight_scale"]
    else:
        packed = stored["weight_packed"]
        codes = torch.stack([packed & 15, packed >> 4], 2).flatten(1)
        scales = stored["weight_scale"]
        scales = scales.float() / stored["weight_global_scale"] if name == "nvfp4" else 2.0 ** (scales.float() - 127)
        found = decode(codes, NUMBER_FORMATS["e2m1"]) * scales.repeat_interleave(weights.format.width, 1)
    torch.testing.assert_close(found, weights.rows(f"{ours}.weight", 0, len(found)), rtol=1e-6, atol=0)
