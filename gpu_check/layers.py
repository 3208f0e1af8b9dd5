"""Single linear layers: Transformer Engine's products against fp32's, and a recipe's time against compiled bf16's.

Times are of layers of an 8B model, forward and backward, with fp32 masters.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gpu_check import setting
from gpu_check.journal import Row, guarded, judged, missing
from gpu_check.setting import milliseconds, recipes
from lightning_llm.config.schema.precision import PrecisionConfig
from lightning_llm.precision.linear.plan import KEY_COUNT
from lightning_llm.precision.native.decide import decide, device_problems
from lightning_llm.precision.native.express import Kind, native_recipe
from lightning_llm.precision.native.transformer_engine import engine

SHAPES = ((512, 1024, 768), (2048, 4096, 2048))  # tokens, inputs, outputs
LIMITS = {"e4m3": 0.05, "e5m2": 0.09, "e2m1": 0.35}
"""Tolerance of a product's relative error, by its coarsest format: rounding to m mantissa bits gives an error of
2^-m / sqrt(12) of the binade per element on average; both operands contribute, and half as much is added as margin."""
ASKS: dict[Kind, str] = {
    "delayed": "is_fp8_available",
    "current": "is_fp8_available",
    "subchannel": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}


def admitted() -> Iterator[Row]:
    """Yield rows on Transformer Engine: its version, the recipes that it supports, and bf16 products against fp32."""
    here = setting.here()
    if here.library_problem is not None:
        yield missing("Transformer Engine", here.library_problem)
        return
    yield Row("Transformer Engine", None, "", "ok", f"{here.library}, CUDA {here.cuda}, {here.device}")
    yield from guarded("what it admits", admits)
    yield from guarded("bf16: exactness", exactness, "bf16", recipes()["bf16"])


def admits() -> Iterator[Row]:
    """Yield a row per kind of native recipe: whether Transformer Engine and `device_problems` agree that it runs here.

    Theirs depend only on the kind of recipe; ours also on NVFP4's rotation and stochastic rounding, excluded here.
    """
    here = setting.here()
    seen = set()
    for recipe in recipes().values():
        native, _ = native_recipe(recipe)
        if native is None or native.kind in seen:
            continue
        seen.add(native.kind)
        theirs, why = getattr(engine().pytorch, ASKS[native.kind])(return_reason=True)
        ours = not device_problems(replace(native, rotated=False, stochastic=False), here)
        yield judged(f"{native.name}: both say {'yes' if ours else 'no'}", float(theirs), "", theirs == ours, why)


def layer_of(recipe: PrecisionConfig, inputs: int, outputs: int) -> Any:
    """Return a linear layer with fp32 master weights, quantized by `recipe` as on this machine."""
    from lightning_llm.model.linear import Linear
    from lightning_llm.precision.linear.swap import swap_linears

    linear = Linear(inputs, outputs, bias=False, device=setting.DEVICE)
    model = nn.ModuleDict({"layers": nn.ModuleDict({"1": nn.ModuleDict({"up_proj": linear})})})
    if recipe.quantizes:
        swap_linears(model, recipe, 3, setting.DEVICE, decision=decide(recipe, setting.here()))
    layer: Any = model["layers"]["1"]["up_proj"]  # type: ignore[index]
    if recipe.quantizes:
        layer.keys = torch.arange(KEY_COUNT, device=layer.keys_device)
    return layer


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return |found - wanted| / |wanted|, by norms in fp64."""
    return float((found.detach().double() - wanted.double()).norm() / wanted.double().norm())


def exactness(name: str, recipe: PrecisionConfig) -> Iterator[Row]:
    """Yield the largest relative error of y, dx and dw against products in fp32 of the same bf16 operands."""
    formats = [cast.format for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad) for _, cast in gemm]
    limit = max((LIMITS[each] for each in formats if each in LIMITS), default=0.01)
    for tokens, inputs, outputs in SHAPES:
        generator = torch.Generator(setting.DEVICE).manual_seed(1)
        x, dy = (
            torch.randn(tokens, n, device=setting.DEVICE, generator=generator).bfloat16() for n in (inputs, outputs)
        )
        layer = layer_of(recipe, inputs, outputs)
        with torch.no_grad():
            layer.weight.normal_(std=inputs**-0.5, generator=generator)
        for _ in range(3):  # delayed scaling computes scales from previous steps
            operand = x.clone().requires_grad_()
            layer.weight.grad = None
            y = layer(operand)
            y.backward(dy)
            if recipe.quantizes:
                from lightning_llm.precision.linear.delayed import update_delayed

                update_delayed(layer)
        w = layer.weight.detach().bfloat16().float()
        wanted = (x.float() @ w.T, dy.float() @ w, dy.float().T @ x.float())
        errors = [relative(a, b) for a, b in zip((y, operand.grad, layer.weight.grad), wanted, strict=True)]
        what = f"{name}, {tokens} x {inputs} x {outputs}: largest error of y, dx, dw"
        yield judged(what, max(errors), "", max(errors) < limit, f"< {limit}")


TOKENS = 8192
LAYERS = {"o_proj": (4096, 4096), "up_proj": (4096, 14336), "down_proj": (14336, 4096)}
NATIVE_TARGET, EMULATED_TARGET = 1.0, 1.5
Work = Callable[[], None]


class Baseline:
    """Compiled bf16 layers that recipes are timed against, in alternation; created on first use."""

    def __init__(self) -> None:
        self._made: dict[str, Work] = {}

    def work(self, shape: str) -> Work:
        """Return a function that runs one forward and backward pass of the layer named `shape`."""
        if shape not in self._made:
            inputs, outputs = LAYERS[shape]
            layer = layer_of(recipes()["bf16"], inputs, outputs)
            self._made[shape] = step_of(torch.compile(layer, dynamic=False), layer, inputs, outputs)
        return self._made[shape]


def native_rows(recipe: PrecisionConfig, baseline: Baseline) -> Iterator[Row]:
    """Yield compiled bf16's time over the native recipe's, for each layer."""
    for shape, (inputs, outputs) in LAYERS.items():
        taken = times(recipe, shape, baseline)
        what = f"{shape} {TOKENS} x {inputs} x {outputs}, {recipe.name}, native: bf16's time over it"
        ratio = taken["bf16"] / taken[recipe.name]
        yield judged(what, ratio, "", ratio >= NATIVE_TARGET, f">= {NATIVE_TARGET}; {_rates(shape, taken)}")


def emulated_rows(recipe: PrecisionConfig, baseline: Baseline) -> Iterator[Row]:
    """Yield the emulated recipe's time over compiled bf16's, for all layers together."""
    sums, said = {"bf16": 0.0, recipe.name: 0.0}, []
    for shape in LAYERS:
        taken = times(recipe, shape, baseline)
        said.append(f"{shape} {taken[recipe.name] / taken['bf16']:.2f}")
        for name, each in taken.items():
            sums[name] += each
    ratio = sums[recipe.name] / sums["bf16"]
    note = f"<= {EMULATED_TARGET}; {', '.join(said)}; {sums[recipe.name]:.3f} and {sums['bf16']:.3f} ms"
    what = f"8b-class layers, {recipe.name}, emulated: time over bf16's"
    yield judged(what, ratio, "times", ratio <= EMULATED_TARGET, note)


def times(recipe: PrecisionConfig, shape: str, baseline: Baseline) -> dict[str, float]:
    """Return {"bf16" or recipe name: milliseconds} of a pass of layer `shape`, timed in alternation."""
    inputs, outputs = LAYERS[shape]
    layer = layer_of(recipe, inputs, outputs)
    return milliseconds({"bf16": baseline.work(shape), recipe.name: step_of(layer, layer, inputs, outputs)})


def step_of(call: Callable[[torch.Tensor], torch.Tensor], layer: nn.Module, inputs: int, outputs: int) -> Work:
    """Return a function that runs forward and backward of one layer once."""
    x = torch.randn(TOKENS, inputs, device=setting.DEVICE).bfloat16().requires_grad_()
    dy = torch.randn(TOKENS, outputs, device=setting.DEVICE).bfloat16()

    def step() -> None:
        x.grad = None
        for parameter in layer.parameters():
            parameter.grad = None
        call(x).backward(dy)

    return step


def _rates(shape: str, taken: dict[str, float]) -> str:
    flops = 6 * TOKENS * LAYERS[shape][0] * LAYERS[shape][1]
    return ", ".join(
        f"{name} {each:.3f} ms, {flops / (each * 1e-3) / 1e12:.0f} TFLOP/s" for name, each in taken.items()
    )
