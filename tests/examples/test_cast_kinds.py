"""A scale, a rounding and a transform of one file each: their arithmetic, and a recipe of them in all verbs."""

import importlib
import json
import sys

import pytest
import scipy.fft
import torch

from lightning_llm.__main__ import main
from lightning_llm.config.schema.cast_kinds import REGISTRIES
from lightning_llm.config.schema.precision import CastConfig, HadamardConfig, PrecisionConfig
from lightning_llm.precision.cast import kernel_cache
from lightning_llm.precision.cast.quantize import quantize, rotate, rotation
from lightning_llm.precision.lint import lint

CAST = "{format: e4m3, block: 1x32, scale: mean, rounding: truncate, hadamard: {size: 24, transform: cosine}}"
UNQUANTIZED = "{hadamard: {size: 24, transform: cosine}}"


@pytest.fixture
def registered(monkeypatch):
    """Register the examples for one test, as an entry point does at the start of a process."""
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_kinds", {name: registry[name] for name in registry})
        monkeypatch.setattr(registry, "_instances", {})
    for name in ("mean_scale", "truncate", "cosine_transform"):
        monkeypatch.delitem(sys.modules, f"tests.examples.{name}", raising=False)
        importlib.import_module(f"tests.examples.{name}")


def test_a_cast_of_own_kinds_is_their_definition_in_float64(registered):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    made = quantize(x, CastConfig(format="e4m3", block="1x32", scale="mean", rounding="truncate"))
    blocks = x.double().reshape(8, 2, 32)
    scale = 2 ** torch.log2(448 / 3 / blocks.abs().mean(2, keepdim=True)).floor()
    elements = (blocks * scale).clamp(-448, 448)
    step = 2 ** (torch.log2(elements.abs()).floor().clamp(min=-6) - 3)
    expected = (elements / step).trunc() * step / scale
    assert torch.equal(made.dequantized.double(), expected.reshape(8, 64))


def test_a_transform_of_any_size_is_scipys_and_cancels(registered):
    a, b = (torch.randn(6, 50, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    s = rotation(24, None, a.device, "cosine")
    turned = [rotate(each, s, 1, torch.float32, "cosine") for each in (a, b)]
    padded = torch.nn.functional.pad(a, (0, 22)).double().reshape(6, 3, 24)
    expected = torch.from_numpy(scipy.fft.dct(padded.numpy(), norm="ortho")).reshape(6, 72)
    torch.testing.assert_close(turned[0].double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(turned[0] @ turned[1].T, a @ b.T, rtol=0, atol=2e-5)
    assert HadamardConfig(size=24, transform="cosine").padded(50) == 72


def test_a_scale_by_rotation_rejects_groups_that_blocks_of_16_do_not_halve_into(registered):
    eden = {"format": "e2m1", "block": "1x16", "scale": "eden"}
    with pytest.raises(ValueError, match=r"hadamard.size=48: must be a power of two with scale: eden"):
        CastConfig.model_validate(eden | {"hadamard": {"size": 48, "transform": "cosine"}})
    CastConfig.model_validate(eden | {"hadamard": {"size": 64, "transform": "cosine"}})


def test_two_transforms_in_one_product_do_not_cancel(registered):
    both = {"x": {"hadamard": {"size": 16, "transform": "cosine"}}, "w": {"hadamard": {"size": 16}}}
    recipe = PrecisionConfig.model_validate({"name": "mine", "compute_dtype": "bf16", "fprop": both})
    (problem,) = lint(recipe)
    assert problem.key == "precision.fprop"
    assert "fprop.x has cosine of size 16 signs none and fprop.w has size 16 signs none" in problem.text.replace(
        ",", ""
    )


def test_a_recipe_of_own_kinds_plans_trains_and_is_probed(registered, small_run, tmp_path, capsys):
    recipe = [f"precision.fprop.x={CAST}", f"precision.fprop.w={UNQUANTIZED}", "precision.casts=eager"]
    words = small_run(tmp_path, "precision=bf16", *recipe, "trainer.max_steps=2")
    assert main(["plan", "--json", *words]) == 0
    slots = json.loads(capsys.readouterr().out)["precision"]["slots"]
    assert (slots["fprop.x"]["scale"], slots["fprop.x"]["rounding"]) == ("mean", "truncate")
    assert slots["fprop.x"]["runs"] == "emulated"
    assert main(["train", *words]) == 0
    assert main(["probe", str(tmp_path / "run"), "--batches", "1", "--keys", "1", "--json", *recipe]) == 0
    capsys.readouterr()
    assert main(["plan", *words, "precision.fprop.x={format: e4m3, block: 32x32, scale: mean}"]) == 2
    assert "scale: mean needs a block 1xN, and block is 32x32" in capsys.readouterr().err
    assert main(["plan", *words, f"precision.dgrad.dy={CAST}", f"precision.dgrad.w={UNQUANTIZED}"]) == 2
    assert "precision.dgrad.dy.scale: mean clips, which biases gradients" in capsys.readouterr().err


def test_kernels_depend_on_the_files_of_installed_kinds(registered):
    names = {file.name for file in kernel_cache._sources_of_installed_kinds()}
    assert {"mean_scale.py", "truncate.py", "cosine_transform.py"} <= names
