"""A training step of one linear layer under each recipe's emulation, against bf16, at 2048 tokens."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.rotation import Row, interleaved_minima, stepping
from lightning_llm.config.compose import compose_config
from lightning_llm.keyed_hash import StepKey
from lightning_llm.model.linear import Linear
from lightning_llm.precision.module import set_step_key
from lightning_llm.precision.swap import swap_linears

TOKENS, SHAPES = 2048, ((1024, 1024), (1024, 2816))
TARGETS = {
    "fp8_delayed": 1.5, "fp8_current": 1.5, "fp8_subchannel": 1.5, "mxfp8": 1.5, "mxfp4_sr": 1.6,
    "nvfp4_all_blocks": 1.6,
}  # fmt: skip


def one_step(recipe: str, inputs: int, outputs: int) -> Callable[[], None]:
    """Return a function that runs forward, backward and a plain SGD update of one layer under `recipe`."""
    block = nn.ModuleDict({"linear": Linear(inputs, outputs, bias=False)})
    model = nn.ModuleDict({"layers": nn.ModuleDict({"1": block})})
    config = compose_config([f"precision={recipe}"]).precision
    if config.quantises:
        swap_linears(model, config, num_layers=3, device_type="cpu")
    set_step_key(model, StepKey(0, 0, 0))
    weight: Any = block["linear"].weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, inputs, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(TOKENS, outputs, generator=generator).bfloat16()

    def step() -> None:
        block["linear"](x).backward(dy)
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=1e-6)
        weight.grad = x.grad = None

    return step


def measure() -> Iterator[Row]:
    """Yield each recipe's step over bf16's."""
    for inputs, outputs in SHAPES:
        contenders = {name: stepping(one_step(name, inputs, outputs)) for name in ("bf16", *TARGETS)}
        best = interleaved_minima(contenders, rounds=6, steps=3)
        yield f"bf16 linear {TOKENS} x {inputs} x {outputs}, ms per step", best["bf16"] * 1e3, ""
        for name, target in TARGETS.items():
            yield f"  {name}, ratio to bf16", best[name] / best["bf16"], f"<= {target}"
