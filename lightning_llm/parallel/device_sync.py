"""Copy all numbers of a step to the host in one read, because each read waits for all work queued on the device."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("lightning_llm", "FRAGMENT")
_library.define("read_numbers(Tensor[] values) -> float[]")


def _read_numbers(values: Sequence[Tensor]) -> list[float]:
    numbers: list[float] = torch.stack([value.detach().double() for value in values]).tolist()
    return numbers


_library.impl("read_numbers", _read_numbers, "CompositeExplicitAutograd")
READ_NUMBERS: Any = torch.ops.lightning_llm.read_numbers.default
"""A custom operator, so that `dry_run.counting` counts it as one operation of a step."""


def read_numbers(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Return scalar tensors of one device as {name: float}, converted to fp64; the host waits for the device once."""
    return dict(zip(values, READ_NUMBERS(list(values.values())), strict=True)) if values else {}
