"""One compiled cast of a newer kind over its nearest relative, by CPU time of one thread."""

import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.rotation import Row, interleaved_minima, stepping
from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.precision.cast.inductor import operand

SHAPE = (2048, 1024)
MX = {"block": "1x32", "scale": "e8m0_floor"}
NVFP4 = {"format": "e2m1", "block": "1x16", "scale": "two_level_e4m3"}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "e4m3 row, over 1x128": (
        {"format": "e4m3", "block": "row", "scale": "power_of_two"},
        {"format": "e4m3", "block": "1x128", "scale": "power_of_two"},
    ),
    "int8 row, over e4m3 row": (
        {"format": "int8", "block": "row", "scale": "fp32"},
        {"format": "e4m3", "block": "row", "scale": "fp32"},
    ),
    "e8m0_even, over e8m0_floor": ({"format": "e4m3", **MX, "scale": "e8m0_even"}, {"format": "e4m3", **MX}),
    "e2m3, over e4m3": ({"format": "e2m3", **MX}, {"format": "e4m3", **MX}),
    "e3m2, over e5m2": ({"format": "e3m2", **MX}, {"format": "e5m2", **MX}),
    "int4, over e2m1": ({"format": "int4", **MX}, {"format": "e2m1", **MX}),
    "unit, over fp32 per tensor": (
        {"format": "e4m3", "block": "tensor", "scale": "unit"},
        {"format": "e4m3", "block": "tensor", "scale": "fp32"},
    ),
    "headroom, over none": ({**NVFP4, "headroom": 16 / 17}, NVFP4),
    "amax: row, over tensor": ({**NVFP4, "amax": "row"}, NVFP4),
    "two candidates, over one": ({**NVFP4, "scale_max": 256.0, "candidates": {}}, NVFP4),
    "eden, over stochastic": (
        {**NVFP4, "scale": "eden", "hadamard": {"size": 128}},
        {**NVFP4, "rounding": "stochastic"},
    ),
}
"""{row: (newer cast, nearest relative)}."""
TARGET = 1.3


def measure() -> Iterator[Row]:
    """Yield, per pair, the relative's milliseconds and the newer cast's time over it. Compiling is not measured."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    key = torch.tensor(1234)

    def cast_of(keys: dict[str, Any]) -> Iterator[None]:
        cast = CastConfig.model_validate(keys)
        return stepping(lambda: operand(x, cast, 1, "compiled", key=key))

    for name, (newer, relative) in PAIRS.items():
        contenders = {"newer": cast_of(newer), "relative": cast_of(relative)}
        best = interleaved_minima(contenders, rounds=10, steps=2, warmup=2, clock=time.process_time)
        target = f"<= {TARGET}"
        yield f"{name}: CPU time ({best['relative'] * 1e3:.1f} ms)", best["newer"] / best["relative"], target
