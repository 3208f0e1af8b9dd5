"""Transformer Engine by itself: it loads, agrees with us about the device's formats, and its products match fp32."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gpu_check import setting
from gpu_check.rows import Row, guarded, judged, missing
from gpu_check.setting import recipes
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
    """Yield the library's version and the recipes that it supports."""
    here = setting.here()
    if here.library_problem is not None:
        yield missing("Transformer Engine", here.library_problem)
        return
    yield Row("Transformer Engine", None, "", "ok", f"{here.library}, CUDA {here.cuda}, {here.device}")
    yield from guarded("what it admits", admits)
    yield from guarded("bf16: exactness", exactness, "bf16", recipes()["bf16"])


def admits() -> Iterator[Row]:
    """Yield whether the library's own checks agree with ours.

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
    """Return a linear of a block, with fp32 masters, as `recipe` runs natively on this machine."""
    from lightning_llm.model.linear import Linear
    from lightning_llm.precision.linear.swap import swap_linears

    linear = Linear(inputs, outputs, bias=False, device=setting.DEVICE)
    model = nn.ModuleDict({"layers": nn.ModuleDict({"1": nn.ModuleDict({"up_proj": linear})})})
    if recipe.quantises:
        swap_linears(model, recipe, 3, setting.DEVICE, decision=decide(recipe, setting.here()))
    layer: Any = model["layers"]["1"]["up_proj"]  # type: ignore[index]
    if recipe.quantises:
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
            if recipe.quantises:
                from lightning_llm.precision.linear.delayed import update_delayed

                update_delayed(layer)
        w = layer.weight.detach().bfloat16().float()
        wanted = (x.float() @ w.T, dy.float() @ w, dy.float().T @ x.float())
        errors = [relative(a, b) for a, b in zip((y, operand.grad, layer.weight.grad), wanted, strict=True)]
        what = f"{name}, {tokens} x {inputs} x {outputs}: largest error of y, dx, dw"
        yield judged(what, max(errors), "", max(errors) < limit, f"< {limit}")
