"""Layers of an 8B model, forward and backward with fp32 masters: a recipe's time against compiled bf16's."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from gpu_check import setting
from gpu_check.library import layer_of
from gpu_check.rows import Row, judged
from gpu_check.setting import milliseconds, recipes
from lightning_llm.config.schema.precision import PrecisionConfig

TOKENS = 8192
LAYERS = {"o_proj": (4096, 4096), "up_proj": (4096, 14336), "down_proj": (14336, 4096)}
NATIVE_TARGET, EMULATED_TARGET = 1.0, 1.5
Work = Callable[[], None]


class Baseline:
    """Compiled bf16's pass of each layer, created on first use; recipes are timed in alternation with it."""

    def __init__(self) -> None:
        self._made: dict[str, Work] = {}

    def work(self, shape: str) -> Work:
        """Return one forward and backward pass of the layer named `shape`."""
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
    """Return the milliseconds of bf16 and of the recipe, timed in alternation."""
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
