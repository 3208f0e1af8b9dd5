"""Random bits of an element by its place in the whole tensor, so that a shard draws what the whole would."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.precision.cast.blocks import BlockShape
from lightning_llm.precision.cast.random_bits import uniform_noise, word


class Origin(NamedTuple):
    """Where a shard lies in the whole tensor, so that its elements keep their random bits; stride 0: all columns.

    Where rows are tokens of sequences that ranks share, `positions` (int64) are those of a sequence's tokens that the
    shard has, of `length` in all.
    """

    row: int = 0
    column: int = 0
    row_stride: int = 0
    positions: Tensor | None = None
    length: int = 0

    def rows(self, count: int, device: torch.device) -> Tensor:
        """Return the row in the whole tensor, int64 [count], of each of the shard's `count` rows."""
        rows = torch.arange(count, device=device, dtype=torch.int64)
        if self.positions is not None:
            own = self.positions.shape[0]
            rows = rows // own * self.length + self.positions[rows % own]
        return rows + self.row


def keyed_noise(
    x: Tensor, cast: CastConfig, key: Tensor | None, origin: Origin, shape: BlockShape = None
) -> Tensor | None:
    """Return noise for `x` [R, C], or for what is `blocked` to `shape`, in its shape.

    It is a function of `key` (int64 scalar) and each element's place in the whole tensor. None where `cast` draws no
    random bits. Raises ValueError where it does and there is no key.
    """
    if not cast.stochastic:
        return None
    if key is None:
        raise ValueError(f"rounding '{cast.rounding}' draws random bits and needs a key; none was set for this step")
    height, width = shape or (1, 1)
    split_rows, split_columns = height > 1, width > 1  # into two axes each
    count = x.shape[0] * x.shape[1] if split_rows else x.shape[0]
    length = x.shape[-2] * x.shape[-1] if split_columns else x.shape[-1]
    first = word(origin.rows(count, x.device) * (origin.row_stride or length) + origin.column)  # of each row, int32
    columns = torch.arange(length, device=x.device, dtype=torch.int32)
    first = first.view(-1, height) if split_rows else first
    columns = columns.view(-1, width) if split_columns else columns
    index = first.view(*first.shape, *[1] * columns.dim()) + columns
    return uniform_noise(key, index, cast.noise_bits)
