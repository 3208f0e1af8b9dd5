"""Swapping linear layers by name: converted layers, reasons of the others; phases and both views of validation."""

import pytest
import torch
from torch import nn

from lightning_llm.base.errors import ConfigError
from lightning_llm.base.keyed_hash import StepKey
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema.precision import PrecisionConfig
from lightning_llm.linalg.gemm import product
from lightning_llm.model.decoder import Decoder
from lightning_llm.plan.resolve import coverage_of
from lightning_llm.precision.cast import inductor
from lightning_llm.precision.linear.delayed import update_delayed
from lightning_llm.precision.linear.module import (
    QuantizedLinear,
    high_precision_forward,
    quantized_layers,
    set_recipe,
    set_step_key,
)
from lightning_llm.precision.linear.swap import choose_backend, swap_linears
from tests.precision.recipes import RECIPES, load

LAYERS, WIDTH = 4, 128


class Linear(nn.Linear):
    """Master weights in fp32, cast where they are used."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up_proj = Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down_proj = Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down_proj(torch.relu(self.up_proj(self.norm(x.float()).to(x.dtype))))


class Model(nn.Module):
    """A residual network that learns a fixed random map; the head and its input are in fp32."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(index): Block() for index in range(LAYERS)})
        self.head = Linear(WIDTH, 16, bias=False)

    def forward(self, x, dtype=torch.bfloat16):
        x = x.to(dtype)
        for block in self.layers.values():
            x = block(x)
        return self.head(x.float())


def model():
    torch.manual_seed(0)
    return Model()


def swapped(name, **rules):
    made = model()
    recipe = load(name)
    if rules:
        recipe = recipe.model_copy(update={"modules": recipe.modules.model_copy(update=rules)})
    return made, swap_linears(made, recipe, LAYERS, "cpu", "eager")


@pytest.mark.parametrize(
    ("words", "expected", "shortfall"),
    [
        (["precision=nvfp4", "model.num_layers=3"], (21, 22, 3, 3), "0 of 3 blocks kept in bf16; its source keeps the"),
        (["precision=nvfp4", "model.num_layers=4"], (21, 29, 3, 4), "1 of 4 blocks kept in bf16; its source keeps the"),
        (["precision=nvfp4", "model.num_layers=16"], (13 * 7, 113, 13, 16), ""),
        (["precision=nvfp4_all_blocks", "model.num_layers=3"], (21, 22, 3, 3), ""),
        (
            ["precision=fp8_current", "precision.modules.first_blocks_high_precision=0", "model.num_layers=3"],
            (14, 22, 2, 3),
            "1 of 3 blocks kept in bf16; its source keeps the first 1 and the last 1",
        ),
        (["precision=fp8_current", "model.num_layers=3"], (7, 22, 1, 3), ""),
        (
            [
                "precision=nvfp4",
                "model.num_layers=16",
                "precision.modules.last_fraction_high_precision=null",
                "precision.modules.last_blocks_high_precision=1",
            ],
            (14 * 7, 113, 14, 16),
            "2 of 16 blocks kept in bf16; its source keeps the first 3.2 % and the last 12.9 %",
        ),
        (["precision=mxfp8", "model.num_layers=2", "model.tie_embeddings=true"], (14, 14, 2, 2), ""),
        (["precision=mxfp8", "model.num_layers=2", "precision.modules.include=['*.0.*']"], (7, 15, 1, 2), ""),
    ],
)
def test_the_coverage_of_a_config_is_that_of_its_swapped_model(words, expected, shortfall):
    config = compose_config(["model=llama_tiny", *words])
    with torch.device("meta"):
        decoder = Decoder(config.model, compute_dtype=torch.bfloat16)
    linears = sum(isinstance(module, nn.Linear) for module in decoder.modules())
    report = swap_linears(decoder, config.precision, config.model.num_layers, "cpu", "eager")
    made = [name for name, module in decoder.named_modules() if isinstance(module, QuantizedLinear)]
    counted = (len(made), linears, len({name.split(".")[1] for name in made}), len(decoder.layers))
    covered = coverage_of(config)
    assert (covered.linears, covered.all_linears, covered.blocks, covered.all_blocks) == counted == expected
    assert covered == report.coverage
    assert covered.shortfall.startswith(shortfall)
    assert bool(covered.shortfall) == bool(shortfall)


def test_a_recipe_without_casts_covers_nothing():
    assert coverage_of(compose_config(["precision=bf16"])) is None


def test_first_and_last_blocks_and_the_head_stay_high():
    made, report = swapped("fp8_current")
    inner = [f"layers.{index}.{name}" for index in (1, 2) for name in ("up_proj", "down_proj")]
    assert list(report.converted) == inner == [layer.name for layer in quantized_layers(made)]
    assert report.kept["head"].startswith("it lies outside the blocks")
    assert report.kept["layers.0.up_proj"] == "modules.first_blocks_high_precision=1"
    assert report.kept["layers.3.down_proj"] == "modules.last_blocks_high_precision=1"
    assert len(report.kept) == 5


def test_names_and_parameters_stay():
    made = model()
    held = {name: id(parameter) for name, parameter in made.named_parameters()}
    swap_linears(made, load("mxfp8"), LAYERS, "cpu", "eager")
    assert {name: id(parameter) for name, parameter in made.named_parameters()} == held


def test_globs():
    _, report = swapped("mxfp8", include=("layers.[01].*",), exclude=("*.down_proj",))
    assert report.converted == ("layers.0.up_proj", "layers.1.up_proj")
    assert report.kept["layers.2.up_proj"] == "nothing in modules.include matches it"
    assert report.kept["layers.0.down_proj"] == "modules.exclude has '*.down_proj'"


def test_each_layer_equals_a_layer_of_its_own_recipe():
    """NVFP4, MXFP8 and bf16 in one model: every layer's products are those of a model of its recipe alone."""
    rules = [
        {"names": ["*.up_proj"], "last_blocks": 2, **load("mxfp8").model_dump(include={"fprop", "dgrad", "wgrad"})},
        {"names": ["layers.3.*"], "high": True},
    ]
    mixed = load("nvfp4_all_blocks").model_dump()
    mixed["modules"]["casts"] = rules
    made = model()
    report = swap_linears(made, PrecisionConfig.model_validate(mixed), LAYERS, "cpu", "eager")
    assert report.kept["layers.3.down_proj"] == "modules.casts.1 keeps it high"
    alone = {"nvfp4": swapped("nvfp4_all_blocks")[0], "mxfp8": swapped("mxfp8")[0]}
    recipe_of = {"layers.2.up_proj": "mxfp8", "layers.3.up_proj": "mxfp8"}
    assert len(report.converted) == 7
    for each in (made, *alone.values()):
        set_step_key(each, StepKey(0, 0, 0))
    generator = torch.Generator().manual_seed(2)
    for name in report.converted:
        width = made.get_submodule(name).in_features
        x = torch.randn(64, width, generator=generator).bfloat16()
        products = []
        for each in (made, alone[recipe_of.get(name, "nvfp4")]):
            layer, given = each.get_submodule(name), x.clone().requires_grad_()
            y = layer(given)
            y.backward(torch.ones_like(y) / 7)
            products.append((y, given.grad, layer.weight.grad))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*products, strict=True)), name


def test_a_phase_gives_every_layer_its_casts_and_then_each_has_its_own_again():
    mixed = load("mxfp8").model_dump()
    mixed["modules"]["casts"] = [{"names": ["*.up_proj"], "fprop": {"x": {"format": "e4m3"}}}]
    recipe = PrecisionConfig.model_validate(mixed | {"phases": [{"start": 0.5, "end": 0.6}]})
    made = model()
    swap_linears(made, recipe, LAYERS, "cpu", "eager")
    up, down = made.layers["0"].up_proj, made.layers["0"].down_proj
    for step, formats in ((4, ("tensor", "1x32")), (5, None), (6, ("tensor", "1x32"))):
        set_recipe(made, recipe.at(step, 10), LAYERS)
        quantizes = [layer.plan.casts["fprop.x"].quantizes for layer in (up, down)]
        assert quantizes == [formats is not None] * 2
        if formats:
            assert tuple(layer.plan.casts["fprop.x"].block for layer in (up, down)) == formats


def test_meta_models_can_be_swapped():
    with torch.device("meta"):
        made = Model()
    swap_linears(made, load("nvfp4"), LAYERS, "cpu", "eager")
    made.to_empty(device="cpu")
    assert all(layer.weight.device.type == "cpu" for layer in quantized_layers(made))


def test_converting_nothing_is_an_error():
    with pytest.raises(ConfigError, match="would quantize none of 9 linear layers"):
        swapped("mxfp8", exclude=("*",))
    with pytest.raises(ConfigError, match="the model has none"):
        swap_linears(nn.ReLU(), load("mxfp8"), 1, "cpu", "eager")


def test_high_recipes_convert_nothing_but_fp16_on_a_cpu():
    for name in ("fp32", "bf16", "bf16_true"):
        made, report = swapped(name)
        assert report.converted == ()
        assert quantized_layers(made) == []
    made, report = swapped("fp16")
    assert report.converted == ()
    assert len(quantized_layers(made)) == 9
    x = torch.randn(8, WIDTH).half()
    layer = made.layers["0"].up_proj
    wanted = (x.double() @ layer.weight.half().double().T).half()
    torch.testing.assert_close(layer(x), wanted, rtol=2.0**-10, atol=1e-5)


def test_the_high_precision_view_is_the_unquantised_model():
    made, _ = swapped("mxfp8")
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    layer = made.layers["0"].up_proj
    assert isinstance(layer, QuantizedLinear)
    wanted = nn.functional.linear(x, layer.weight.bfloat16())
    with high_precision_forward(made):
        assert torch.equal(layer(x), wanted)
    assert not torch.equal(layer(x), wanted)


@pytest.mark.parametrize(("casts", "reason", "chosen"), [
    ("auto", None, ("compiled", None)),
    ("auto", "it is broken", ("eager", "casts run eagerly, some ten times slower: it is broken")),
    ("compiled", None, ("compiled", None)),
    ("eager", None, ("eager", "casts run eagerly, some ten times slower, since precision.casts=eager asks for it")),
])  # fmt: skip
def test_casts_run_as_the_recipe_says_and_the_machine_allows(casts, reason, chosen, monkeypatch):
    monkeypatch.setattr(inductor, "why_not", lambda device_type: reason)
    recipe = load("mxfp8").model_copy(update={"casts": casts})
    assert choose_backend(recipe, "cpu") == chosen
    assert swap_linears(model(), recipe, LAYERS, "cpu").backend == chosen[0]


def test_casts_that_must_be_compiled_need_a_compiler(monkeypatch):
    monkeypatch.setattr(inductor, "why_not", lambda device_type: "it is broken")
    with pytest.raises(ConfigError, match=r"precision\.casts=compiled: is not possible here: it is broken"):
        choose_backend(load("mxfp8").model_copy(update={"casts": "compiled"}), "cpu")
    assert choose_backend(load("fp16").model_copy(update={"casts": "compiled"}), "cpu") == ("eager", None)


def test_a_phase_changes_the_casts_of_swapped_layers():
    made, _ = swapped("fp8_current")
    set_recipe(made, load("bf16"), LAYERS)
    layer = made.layers["1"].up_proj
    x = torch.randn(32, WIDTH).bfloat16()
    assert torch.equal(layer(x), product(x, layer.weight.bfloat16().T))


def test_a_phase_leaves_layers_that_only_emulate_fp16_alone():
    made, _ = swapped("fp16_mxfp8")
    set_recipe(made, load("fp16_mxfp8"), LAYERS)
    assert not any(cast.quantizes for cast in made.head.plan.casts.values())
    assert all(cast.quantizes for cast in made.layers["0"].up_proj.plan.casts.values())


def losses(name, steps):
    """The loss of every step of a small training run; each recipe sees the same data."""
    recipe = load(name)
    made = model()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[recipe.compute_dtype]
    swap_linears(made, recipe, LAYERS, "cpu", "eager")
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(WIDTH, 16, generator=generator) / WIDTH**0.5
    optimizer = torch.optim.AdamW(made.parameters(), lr=5e-3)
    seen = []
    for step in range(steps):
        set_step_key(made, StepKey(0, step, 0))
        x = torch.randn(64, WIDTH, generator=generator)
        loss = (made(x, dtype) - x @ target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_delayed(made)
        seen.append(loss.item())
    return seen


@pytest.fixture(scope="module")
def exact_losses():
    return losses("fp32", 14)


QUICK = ("fp8_current", "fp8_delayed", "mxfp8", "fp16_mxfp8")
"""In `make test`, where tests/golden holds the first steps of every recipe bit for bit."""
OTHERS = [pytest.param(name, marks=pytest.mark.full) for name in RECIPES if name not in ("fp32", *QUICK)]


@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
def test_every_recipe_trains_and_none_has_fp32s_bits(name, exact_losses):
    seen = losses(name, 14)
    assert all(torch.isfinite(torch.tensor(seen)))
    assert sum(seen[-5:]) < 0.5 * sum(seen[:5])
    assert seen != exact_losses
