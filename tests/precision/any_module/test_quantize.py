"""Quantized modules of all kinds: nothing but the casts changes, copies and pickles keep them, state and dtypes."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import lightning_llm
from lightning_llm import ConfigError, dequantize, quantize
from lightning_llm.precision.any_module.choice import choose
from lightning_llm.precision.any_module.quantize import WITH_TRANSPOSED_WEIGHT, read_recipe
from lightning_llm.precision.linear.module import QuantizedLinear
from lightning_llm.precision.native.transformer_engine import NativeLinear
from tests.precision.any_module.models import WIDTH, Model, batches, eager, loss_of


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


def test_one_linear_layer_is_quantized_in_place():
    layer = nn.Linear(WIDTH, WIDTH)
    same, x = layer, torch.randn(4, WIDTH)
    plain = layer(x)
    assert lightning_llm.quantise(layer, eager("mxfp8")).quantized == [""]
    assert same is layer
    assert not torch.equal(layer(x), plain)
    assert layer(x).dtype == torch.float32


def test_torchs_encoder_calls_quantized_layers_in_evaluation_too():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True), 1).eval()
    quantize(encoder, eager("mxfp8"))
    seen = []
    encoder.layers[0].linear1.observe = lambda cast: seen.append(cast.slot)
    with torch.no_grad():
        encoder(torch.randn(2, 8, WIDTH))
    assert seen == ["fprop.x", "fprop.w"]


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
