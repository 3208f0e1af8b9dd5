"""Weights as codes: compressed-tensors reads the numbers that `evaluate --as` measures."""

import inspect
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
        self.state["layers.0.attention.k_proj.weight"][0, 0] = 9.0
        self.kind, self.path, self.architecture = "drawn", None, None

    def rows(self, name, first, last):
        return self.state[name][first:last]

    def dtype(self, name):
        return "fp32"

    def files(self):
        return {}

    def verify(self, rank=0, world=1):
        pass


@pytest.mark.parametrize("name", CODES)
def test_compressed_tensors_reads_the_same_numbers(name):
    weights = CodeWeights(Drawn(), CODES[name], None)
    tensors = {each.name: each.make() for each in as_codes(weights, "fp32")}
    for each in as_codes(weights, "fp32"):
        constant = 0 if each.size_bytes else tensors[each.name].nbytes
        assert tensors[each.name].nbytes == each.size_bytes + constant
    read = QuantizationConfig.model_validate(quantization_entry(weights)["quantization_config"])
    (scheme,) = read.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(read.format)
    for ours in weights.casts:
        theirs = (
            ours.replace("layers.", "model.layers.")
            .replace("attention.", "self_attn.")
            .replace("feed_forward.", "mlp.")
        )
        prefix = theirs.removesuffix("weight")
        state = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        found = compressor.decompress(state, scheme)["weight"]
        expected = weights.rows(ours, 0, weights.shapes[ours][0])
        # They multiply in bf16, ours are fp32: two roundings.
        torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=0)
        relative = (expected - weights.weights.state[ours]).norm() / weights.weights.state[ours].norm()
        assert relative < {"fp8": 0.04}.get(name, 0.13)
    others = [key for key in tensors if "proj" not in key]
    assert all(tensors[key].dtype == torch.float32 for key in others)


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
    name = "layers.1.attention.o_proj.weight"
    assert weights.casts[name].block == "16x16"
    assert torch.equal(weights.rows(name, 0, 64), quantize(drawn.state[name], weights.casts[name]).dequantized)


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


def test_experts_are_refused():
    with pytest.raises(ConfigError, match=r"^--as=fp8: experts \(layers\.0\.feed_forward\.experts\.gate_proj\)"):
        CodeWeights(Drawn(model="moe_tiny"), CODES["fp8"], None, key="--as")


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
    torch.testing.assert_close(found, weights.rows(ours, 0, len(found)), rtol=1e-6, atol=0)
