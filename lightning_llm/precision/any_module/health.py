"""Quantization health of any module: statistics of every cast while a block of code runs."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from lightning_llm.precision.linear.module import QuantisedLinear, quantised_layers
from lightning_llm.precision.linear.plan import CastRecord
from lightning_llm.precision.linear.statistics import SUMS, cast_sums, figures

Figures = dict[tuple[str, str], dict[str, float]]
"""{(layer, slot): figures of `precision.linear.statistics`}, of all casts together."""


@contextmanager
def observed(module: nn.Module) -> Iterator[Figures]:
    """Observe every cast of the quantized layers of `module` in the block; the mapping is filled at its end.

    Observing changes no bit. On several ranks, each sees its own casts.
    """
    layers, sums, found = quantised_layers(module), dict[tuple[str, str], tuple[Tensor, Tensor]](), Figures()
    before = [layer.observe for layer in layers]
    for layer in layers:
        layer.observe = partial(_add, sums, layer)
    try:
        yield found
    finally:
        for layer, observe in zip(layers, before, strict=True):
            layer.observe = observe
        for key, (total, span) in sums.items():
            found[key] = figures(dict(zip(SUMS, total.tolist(), strict=True)), span[0].item(), span[1].item())


@torch.no_grad()
def _add(sums: dict[tuple[str, str], tuple[Tensor, Tensor]], layer: QuantisedLinear, seen: CastRecord) -> None:
    its_sums, its_span = cast_sums(seen)
    nothing = its_sums.new_tensor([math.inf, -math.inf])
    total, span = sums.get((layer.name, seen.slot), (torch.zeros_like(its_sums), nothing))
    span = torch.stack([torch.minimum(span[0], its_span[0]), torch.maximum(span[1], its_span[1])])
    sums[layer.name, seen.slot] = total + its_sums, span
