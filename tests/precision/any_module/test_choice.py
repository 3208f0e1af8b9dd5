"""The layers that `quantize` chooses in modules of all kinds, the reasons of the others, and refused arguments."""

import pytest
import torch
from torch import nn

from lightning_llm import ConfigError, dequantize, quantize
from lightning_llm.config.schema.module_rules import ModuleRules
from tests.precision.any_module.models import WIDTH, Model, batches, eager, loss_of


def test_the_report_names_every_linear_layer_with_its_reason():
    model = Model()
    report = quantize(model, eager("mxfp8"), keep=["lm_head", "layers.0.*"])
    assert report.quantized == [f"layers.{index}.{name}" for index in (1, 2) for name in ("up", "down")]
    kept = {"layers.0.up": "keep has 'layers.0.*'", "layers.0.down": "keep has 'layers.0.*'"}
    assert report.skipped == kept | {"lm_head": "keep has 'lm_head'"}
    assert {each.runs for each in report.modules if each.quantized} == {"emulated"}
    lines = str(report).splitlines()
    assert lines[0] == "mxfp8 quantizes 4 of 7 linear layers; blocks: layers (3)"
    assert "layers.1.up" in lines[3]
    assert "emulated" in lines[3]


def test_a_dry_run_changes_nothing():
    model = Model()
    report = quantize(model, eager("mxfp8"), dry_run=True)
    assert report.dry_run
    assert len(report.quantized) == 6
    assert type(model.layers[0].up) is nn.Linear
    with pytest.raises(ConfigError, match=r"^report\.step: dry_run"):
        report.step(0)


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(2 * x)


def test_layers_that_cannot_take_casts_are_skipped_with_the_reason():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True), 2)
    encoder.layers[0].linear1 = Own(WIDTH, 2 * WIDTH)
    encoder.layers[1].linear1.forward = encoder.layers[1].linear1.forward
    report = quantize(encoder, eager("mxfp8"))
    assert report.quantized == ["layers.0.linear2", "layers.1.linear2"]
    assert "MultiheadAttention" in report.skipped["layers.0.self_attn.out_proj"]
    assert "subclass" in report.skipped["layers.0.linear1"]
    assert "on the instance" in report.skipped["layers.1.linear1"]
    assert any("layers.*.self_attn.in_proj_weight" in note for note in report.notes)


def test_a_layer_in_two_places_is_one_layer_and_a_tied_head_stays():
    model = nn.Module()
    model.embedding, model.first = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH)
    model.second, model.head = model.first, nn.Linear(WIDTH, 16, bias=False)
    model.head.weight = model.embedding.weight
    report = quantize(model, eager("mxfp8"))
    assert report.quantized == ["first"]
    assert report.modules[0].names == ("first", "second")
    assert report.skipped == {"head": "its weight is tied to embedding"}


def test_blocks_are_the_outermost_longest_list_or_those_named():
    model = Model()
    model.encoder = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8)) for _ in range(2))
    assert quantize(model, eager("mxfp8"), dry_run=True).blocks == "layers (3)"
    both = quantize(model, eager("mxfp8"), blocks=["encoder", "layers"], dry_run=True)
    assert (both.blocks, len(both.quantized)) == ("encoder (2), layers (3)", 22)
    ends = eager("fp8_current")  # which keeps the first and the last block high
    assert quantize(Model(), ends, dry_run=True).quantized == ["layers.1.up", "layers.1.down"]
    model.encoder.append(nn.ModuleList())
    with pytest.raises(ConfigError, match=r"^blocks: layers and encoder have 3 blocks each"):
        quantize(model, eager("mxfp8"))


def test_numbered_module_dicts_are_blocks_and_wrappers_do_not_change_names():
    model = Model()
    model.layers = nn.ModuleDict({str(index): block for index, block in enumerate(model.layers)})
    model.forward = None
    wrapped = torch.compile(model)
    assert quantize(wrapped, eager("mxfp8"), dry_run=True).quantized[0] == "layers.0.up"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipe": "mxfp44"}, r"^recipe=mxfp44: there is no such precision recipe\. Did you mean 'mxfp8'\?"),
        ({"recipe": "bf16"}, r"^recipe=bf16: .*quantizes nothing"),
        ({"recipe": "none.yaml"}, r"^recipe: none\.yaml does not exist\. Give a YAML file"),
        (
            {"recipe": {"compute_dtype": torch.bfloat16, "modules": {"casts": [{"recipe": "mxfp8"}]}}},
            r"^recipe: has a value that no YAML file can have: .*'dtype'",
        ),
        ({"recipe": {"compute_dtype": "bf16", "fpropp": 1}}, r"^precision\.fpropp: unknown key\. Did you mean 'fprop'"),
        ({"recipe": 3}, r"^recipe: is of type int\. Give"),
        ({"keep": "*"}, r"^recipe=mxfp8: would quantize none of 7 .*layers\.\*\.up, layers\.\*\.down, lm_head"),
        ({"keep": ["lm_heat"]}, r"^keep: has 'lm_heat', which matches no linear layer\. Use names of these: layers"),
        (
            {"module": nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), "keep": ["nope"]},
            r"^keep: has 'nope', which matches no linear layer\. Use names of these: 0, 2\.",
        ),
        ({"blocks": "layer"}, r"^blocks=layer: .*Did you mean 'layers'"),
        ({"optimizer": 3}, r"^optimizer: is of type int.*report\.step"),
        ({"seed": -1}, r"^seed=-1: must be an integer"),
        ({"micro_batches": 0}, r"^micro_batches=0: must be an integer of at least 1"),
        ({"keep": 3}, r"^keep=\[3\]: must be names of modules"),
        ({"blocks": 3}, r"^blocks=3: must be names of modules"),
        ({"blocks": []}, r"^blocks=\[\]: must name at least one container"),
        ({"blocks": ["layers", "layers"]}, r"^blocks=.*layers is within layers\. Name each block once"),
        ({"device": "warp"}, r"^device='warp': must be a device of torch"),
        ({"group": "dp"}, r"^group: must be a torch.distributed.ProcessGroup.*not of type str"),
        ({"module": nn.ReLU()}, r"^module: has no linear layer, only ReLU"),
        ({"module": 3}, r"^module: must be a torch\.nn\.Module, not of type int"),
    ],
)
def test_wrong_arguments_are_one_line_with_the_remedy(arguments, message):
    given = {"module": Model(), "recipe": eager("mxfp8")} | arguments
    with pytest.raises(ConfigError, match=message):
        quantize(given.pop("module"), given.pop("recipe"), **given)


def test_quantizing_twice_and_dequantizing_nothing_are_refused():
    model = Model()
    with pytest.raises(ConfigError, match=r"^module: has no quantized layer"):
        dequantize(model)
    quantize(model, eager("mxfp8"))
    with pytest.raises(ConfigError, match=r"^module: has 6 quantized layers already"):
        quantize(model, eager("mxfp8"))


def test_recipes_are_read_from_files_and_mappings(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("compute_dtype: bf16\ncasts: eager\nfprop: {x: {format: e4m3, block: 1x32, scale: e8m0_floor}}\n")
    assert quantize(Model(), file, dry_run=True).recipe.name == "own"
    keys = {"compute_dtype": "bf16", "casts": "eager", "modules": {"casts": [{"recipe": "mxfp8", "names": ["*.up"]}]}}
    report = quantize(Model(), keys, dry_run=True)
    assert report.quantized == ["layers.0.up", "layers.1.up", "layers.2.up"]


def test_phases_need_the_length_of_the_training_and_follow_it():
    keys = eager("mxfp8").model_dump() | {"phases": [{"start": 0.5}]}
    with pytest.raises(ConfigError, match=r"^max_steps: must be given"):
        quantize(Model(), keys)
    model = Model()
    report = quantize(model, keys, max_steps=4)
    assert model.layers[0].up.plan.casts["fprop.x"].quantizes
    report.step(2)
    assert not model.layers[0].up.plan.casts["fprop.x"].quantizes


def test_the_conv1d_of_gpt2_is_a_linear_layer_with_a_transposed_weight():
    from transformers.pytorch_utils import Conv1D

    conv, linear, x = Conv1D(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), torch.randn(8, WIDTH)
    linear.load_state_dict({"weight": conv.weight.detach().t(), "bias": conv.bias.detach()})
    for each in (conv, linear):
        quantize(each, eager("mxfp4_sr"))
        each(x).square().sum().backward()
    assert torch.equal(conv(x), linear(x))
    assert torch.equal(conv.weight.grad, linear.weight.grad.t())
    assert dequantize(conv) == [""]
    assert type(conv) is Conv1D


class Adapter(nn.Module):
    """A LoRA layer with the structure of PEFT's."""

    def __init__(self, base_layer: nn.Linear, rank: int = 4):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base_layer.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


@pytest.mark.parametrize("quantized_first", [True, False])
def test_adapted_layers_keep_the_name_and_bits_of_the_layer(quantized_first):
    plain, model, tokens = Model(), Model(), batches()[0, 0]
    rule = {"exclude": ["layers.*.down"]}  # matches the layer with and without the adapter
    recipe = eager("mxfp4_sr").model_copy(update={"modules": ModuleRules(**rule)})
    reports = [quantize(plain, recipe)]
    reports += [quantize(model, recipe)] if quantized_first else []
    for block in model.layers:
        block.up, block.down = Adapter(block.up), Adapter(block.down)
    if not quantized_first:
        reports.append(quantize(model, recipe, keep=["lora_*"]))
        assert "layers.0.down" in reports[1].skipped
        assert reports[1].skipped["layers.0.up.lora_A.default"] == "keep has 'lora_*'"
    assert reports[1].quantized == reports[0].quantized == [f"layers.{at}.up" for at in range(3)]
    assert torch.equal(model(tokens), plain(tokens))
    loss_of(model, tokens).backward()
    assert model.layers[0].up.base_layer.weight.grad is None
    assert model.layers[0].up.lora_B["default"].weight.grad.abs().sum() > 0
    assert reports[1].at == (0, 1)


def test_an_adapter_may_be_named_by_its_base_layer():
    model = Model()
    model.layers[0].up = Adapter(model.layers[0].up)
    report = quantize(model, eager("mxfp8"), keep=["layers.0.up.base_layer", "lora_*"])
    assert report.skipped["layers.0.up"] == "keep has 'layers.0.up.base_layer'"
