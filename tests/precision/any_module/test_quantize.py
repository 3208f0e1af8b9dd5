"""`quantize` on modules of all kinds: chosen layers, reasons of the others, errors, and that nothing else changes."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import lightning_llm
from lightning_llm import ConfigError, dequantize, quantize
from lightning_llm.config.schema.module_rules import ModuleRules
from lightning_llm.precision.any_module.choice import choose
from lightning_llm.precision.any_module.quantize import WITH_TRANSPOSED_WEIGHT, read_recipe
from lightning_llm.precision.linear.module import QuantizedLinear
from lightning_llm.precision.native.transformer_engine import NativeLinear
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


def test_parameters_names_dtypes_and_state_dicts_stay(tmp_path):
    model = Model()
    before, names = dict(model.named_parameters()), list(model.state_dict())
    report = quantize(model, eager("mxfp4_sr"))
    assert {name: id(each) for name, each in model.named_parameters()} == {name: id(p) for name, p in before.items()}
    assert list(model.state_dict()) == names
    Model().load_state_dict(model.state_dict())
    model.load_state_dict(Model().state_dict())
    assert dequantize(model) == report.quantized
    assert not any(isinstance(each, QuantizedLinear) for each in model.modules())
    tokens = batches()[0, 0]
    assert torch.equal(model(tokens), Model()(tokens))
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_a_dry_run_changes_nothing():
    model = Model()
    report = quantize(model, eager("mxfp8"), dry_run=True)
    assert report.dry_run
    assert len(report.quantized) == 6
    assert type(model.layers[0].up) is nn.Linear
    with pytest.raises(ConfigError, match=r"^report\.step: dry_run"):
        report.step(0)


def test_one_linear_layer_is_quantized_in_place():
    layer = nn.Linear(WIDTH, WIDTH)
    same, x = layer, torch.randn(4, WIDTH)
    plain = layer(x)
    assert lightning_llm.quantise(layer, eager("mxfp8")).quantized == [""]
    assert same is layer
    assert not torch.equal(layer(x), plain)
    assert layer(x).dtype == torch.float32


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


def test_torchs_encoder_calls_quantized_layers_in_evaluation_too():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True), 1).eval()
    quantize(encoder, eager("mxfp8"))
    seen = []
    encoder.layers[0].linear1.observe = lambda cast: seen.append(cast.slot)
    with torch.no_grad():
        encoder(torch.randn(2, 8, WIDTH))
    assert seen == ["fprop.x", "fprop.w"]


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


def test_copies_and_pickles_keep_the_casts_and_count_for_themselves():
    model = Model()
    report = quantize(model, eager("mxfp4_sr"))
    made = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    tokens = batches()[0, 0]
    loss_of(model, tokens).backward()
    for each in made:
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        loss_of(each, tokens).backward()
        assert torch.equal(each.layers[0].up.weight.grad, model.layers[0].up.weight.grad)
        optimizer.step()
        assert each.layers[0].up.clock.step == 1
    assert report.at == (0, 1)


def test_a_copy_keeps_the_group_of_ranks():
    """An average of the weights, copied from the module, counts over the same data-parallel ranks."""
    model, group = Model(), object()
    quantize(model, eager("mxfp8"))
    model.layers[0].up.clock.group = group
    copied = copy.deepcopy(model)
    loss_of(copied, batches()[0, 0])  # the first forward pass gives the layers their clock
    assert copied.layers[0].up.clock is not model.layers[0].up.clock
    assert copied.layers[0].up.clock.group is group


def test_autocast_rounds_operands_as_it_does_for_plain_layers():
    model, plain = Model(), Model()
    quantize(model, eager("mxfp8"))
    quantize(plain.to(torch.bfloat16), eager("mxfp8"))
    x = torch.randn(4, WIDTH).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model.layers[0].up(x.float())
        y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, plain.layers[0].up(x))
    assert model.layers[0].up.weight.grad.dtype == torch.float32


def test_frozen_weights_and_meta_modules():
    with torch.device("meta"):
        model = Model()
    quantize(model, eager("mxfp4_sr"))
    model.to_empty(device="cpu").load_state_dict(Model().state_dict())
    model.layers.requires_grad_(False)
    loss_of(model, batches()[0, 0]).backward()
    assert model.layers[0].up.weight.grad is None
    assert model.embedding.weight.grad is not None


def test_health_and_high_precision_contexts():
    model, tokens = Model(), batches()[0, 0]
    plain = model(tokens)
    report = quantize(model, eager("mxfp8"))
    with report.high_precision():
        assert torch.equal(model(tokens), plain)
    with report.health() as found:
        loss_of(model, tokens).backward()
    assert len(found) == 6 * 6
    assert 20 < found["layers.0.up", "fprop.w"]["sqnr_db"] < 40
    assert model.layers[0].up.observe is None


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4_rne", "fp8_current"])
def test_a_bias_in_fp32_is_added_in_fp32(name):
    """Codes fit bf16, in which a product with a bias would be rounded."""
    plain, biased, x = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH), torch.randn(8, WIDTH)
    biased.weight = plain.weight
    for each in (plain, biased):
        quantize(each, eager(name))
    torch.testing.assert_close(biased(x), plain(x) + biased.bias, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_inputs_that_are_no_floats_are_refused(dtype):
    layer = nn.Linear(WIDTH, WIDTH)
    quantize(layer, eager("mxfp8"))
    with pytest.raises(TypeError, match="floating-point"):
        layer(torch.ones(4, WIDTH, dtype=dtype))


def test_inputs_may_be_written_through_numpy_between_passes():
    layer, values = nn.Linear(WIDTH, WIDTH), np.random.default_rng(0).standard_normal((4, WIDTH), dtype=np.float32)
    quantize(layer, eager("mxfp8"))
    x = torch.from_numpy(values)
    layer(x)
    values[:] = 1
    assert torch.equal(layer(x), layer(torch.ones(4, WIDTH)))


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


@pytest.mark.parametrize("kind", [QuantizedLinear, NativeLinear])
def test_a_quantized_conv1d_can_be_pickled(kind):
    from transformers.pytorch_utils import Conv1D

    conv = Conv1D(2 * WIDTH, WIDTH)
    quantize(conv, eager("mxfp8"))
    layer = WITH_TRANSPOSED_WEIGHT[kind].adopt(Conv1D(2 * WIDTH, WIDTH), "conv", "layers.0.conv", conv.plan)
    made = pickle.loads(pickle.dumps(layer))
    assert type(made) is type(layer)
    assert made.plan.casts == layer.plan.casts
    assert "in_features=64, out_features=128, fprop.x=e4m3" in repr(made)
    assert torch.equal(made.weight, layer.weight)


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


def test_an_optimizer_of_other_parameters_is_noted():
    model, other = Model(), nn.Linear(2, 2)
    notes = quantize(model, eager("mxfp8"), optimizer=torch.optim.SGD(other.parameters(), 0.1)).notes
    assert any("no parameter of the module" in note for note in notes)
    own = Model()
    assert not any(
        "optimizer has" in note
        for note in quantize(own, eager("mxfp8"), optimizer=torch.optim.SGD(own.parameters(), 0.1)).notes
    )


SCALES = {"layers.0.up.scale": torch.ones(3), "layers.0.up.amax_history": torch.zeros(1024, 3)}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"weight": 1}, r"must be the result of report\.state_dict\(\).*Its keys: weight"),
        (None, r"It is a NoneType"),
        ({"step": "1", "scales": SCALES}, r"is damaged: step '1'"),
        ({"step": 1, "scales": {"layers.0.up.scale": torch.ones(3)}}, r"is damaged: scales of 'layers\.0\.up'"),
        (
            {"step": 1, "scales": SCALES | {"layers.0.up.scale": torch.ones(2)}},
            r"is damaged: scales of 'layers\.0\.up'",
        ),
        ({"step": 1, "scales": {f"h.{key}": each for key, each in SCALES.items()}}, r"not quantized here: 'h\.layers"),
    ],
)
def test_a_state_of_something_else_is_refused(state, message):
    report = quantize(Model(), eager("fp8_delayed"))
    with pytest.raises(ConfigError, match=rf"^state: .*{message}"):
        report.load_state_dict(state)
    report.load_state_dict({"step": 1, "scales": SCALES})
    assert report.at == (1, 0)


def test_a_first_forward_pass_in_inference_mode_starts_the_delayed_scales():
    """Lightning's Trainer validates so before the first training step."""
    models = [Model(), Model()]
    for number, model in enumerate(models):
        quantize(model, eager("fp8_delayed"))
        if number:
            with torch.inference_mode():
                model.eval()(batches()[0, 0])
        optimizer = torch.optim.SGD(model.train().parameters(), 0.1)
        for tokens in batches(2)[:, 0]:
            loss_of(model, tokens).backward()
            optimizer.step()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*(each.parameters() for each in models), strict=True))


def test_layers_of_one_kind_keep_their_own_sizes():
    layers = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 64))
    widths = choose(layers, read_recipe("mxfp8"), [], None, None).widths
    assert set(widths.values()) == {32, 48, 64}
