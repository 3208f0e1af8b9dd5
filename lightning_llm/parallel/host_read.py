"""Numbers that the host needs of a step, read at once: each read waits for all that the device has been given to do."""

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
"""An operator, so that who counts what a step does sees it as one: `dry_run.counting`."""


def read_numbers(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Return scalars of one device by name, as exactly as fp64 has them; the host waits for the device once."""
    return dict(zip(values, READ_NUMBERS(list(values.values())), strict=True)) if values else {}
