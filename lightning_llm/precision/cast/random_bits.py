"""Keyed random bits as tensors: the counterpart of `lightning_llm.base.keyed_hash`, and per-element noise from a key.

Keys are hashed in int64 masked to 32 bits. A constant c >= 2^31 is used as c - 2^32, which is the same modulo 2^32, so
that no product leaves the signed 64-bit range: |h * c| < 2^32 * 2^31. Elements are hashed in int32: torch's kernels,
also compiled ones, compute its sums and products modulo 2^32, with twice the vector width and without 64-bit products.

`keyed_noise` indexes elements by their place in the whole tensor, so that a shard draws the bits of the whole.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_llm.base.keyed_hash import MASK_32
from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.precision.cast.scales import BlockShape


def _signed(constant: int) -> int:
    return constant - (1 << 32) if constant >= 1 << 31 else constant


_FINAL_1, _FINAL_2 = _signed(0x85EBCA6B), _signed(0xC2B2AE35)
_BODY_1, _BODY_2 = _signed(0xCC9E2D51), _signed(0x1B873593)
_LOW_1, _LOW_2 = _signed(0x7FEB352D), _signed(0x846CA68B)
_WEYL = _signed(0x9E3779B9)


def _rotate_left(x: Tensor, bits: int) -> Tensor:
    return ((x << bits) | (x >> (32 - bits))) & MASK_32


def mix(h: Tensor) -> Tensor:
    """Return `base.keyed_hash.mix` elementwise, of int64 words in [0, 2^32)."""
    h = h ^ (h >> 16)
    h = h * _FINAL_1 & MASK_32
    h = h ^ (h >> 13)
    h = h * _FINAL_2 & MASK_32
    return h ^ (h >> 16)


def hash_words(*words: Tensor | int, seed: int = 0) -> Tensor:
    """Return `keyed_hash.hash_words` elementwise over broadcast int64 tensors (or ints): int64 words in [0, 2^32)."""
    h: Tensor = torch.tensor(seed & MASK_32, dtype=torch.int64)
    for word in words:
        k = torch.as_tensor(word, dtype=torch.int64) & MASK_32
        k = _rotate_left(k * _BODY_1 & MASK_32, 15) * _BODY_2 & MASK_32
        h = _rotate_left(h.to(k.device) ^ k, 13) * 5 + 0xE6546B64 & MASK_32
    return mix(h ^ (4 * len(words)))


def word(x: Tensor) -> Tensor:
    """Return `x` modulo 2^32 as int32 with the same bits (words from 2^31 on become negative)."""
    return x.to(torch.int32)


def element_words(key: Tensor, index: Tensor) -> Tensor:
    """Return 32 random bits per element (int32, see `word`) from one `key` word and global element `index` words.

    C. Wellons' `lowbias32` of `index`, into which the key enters twice: by exclusive or at the start, and as a sum
    after the first multiplication. Another key `k ^ d` undoes the first at the index `i ^ d`; the sum then differs by a
    constant, which must still pass a shift and a multiplication. Two multiplications per element.
    """
    h = index ^ word(key)
    h = h ^ _shift_right(h, 16)
    h = h * _LOW_1 + word(key * _WEYL & MASK_32)
    h = h ^ _shift_right(h, 15)
    h = h * _LOW_2
    return h ^ _shift_right(h, 16)


def uniform_noise(key: Tensor, index: Tensor, bits: int) -> Tensor:
    """Return fp32 uniform on {0, ..., 2^bits - 1} / 2^bits, one per element of `index` (int64, or int32 words).

    20 bits keep `steps + noise` exact for formats of up to 3 mantissa bits (steps < 16), so values on the grid never
    move; wider formats add the noise to the fraction of a step alone (`rounding.py`).
    """
    return _shift_right(element_words(key, word(index)), 32 - bits).float() * 2.0**-bits


def _shift_right(words: Tensor, count: int) -> Tensor:
    """Return int32 `words` shifted by `count` > 0 bits, zeros from the left: torch's shift repeats the sign there."""
    return (words >> count) & ((1 << (32 - count)) - 1)


def random_signs(key: Tensor, size: int) -> Tensor:
    """Return random signs from one `key` word: fp32 [size] of +1 and -1."""
    words = element_words(key, torch.arange(size, device=key.device, dtype=torch.int32))
    return torch.where(words < 0, -1.0, 1.0)


class Origin(NamedTuple):
    """Position of a shard in the whole tensor, so that its elements have the same random bits as in one process.

    `row`, `column`: first row and column. `row_stride`: columns of the whole tensor; 0: those of the shard.

    If rows are tokens of sequences that ranks share, `positions` (int64) are the positions of the shard's tokens in a
    sequence of `length` tokens.
    """

    row: int = 0
    column: int = 0
    row_stride: int = 0
    positions: Tensor | None = None
    length: int = 0

    def rows(self, count: int, device: torch.device) -> Tensor:
        """Return the index in the whole tensor of each of the shard's `count` rows, int64 [count]."""
        rows = torch.arange(count, device=device, dtype=torch.int64)
        if self.positions is not None:
            own = self.positions.shape[0]
            rows = rows // own * self.length + self.positions[rows % own]
        return rows + self.row


def keyed_noise(
    x: Tensor, cast: CastConfig, key: Tensor | None, origin: Origin, shape: BlockShape = None
) -> Tensor | None:
    """Return uniform noise in [0, 1), fp32, for rounding `x` [R, C], or a tensor `blocked` to `shape`, in its shape.

    It is a function of `key` (int64 scalar) and each element's place in the whole tensor. None if `cast` draws no
    random bits. Raises ValueError if it does and there is no key.
    """
    return _noise(x, cast, key, origin, shape) if cast.rounding_kind.draws else None


SCALES_SALT = 0x51ED270B
"""Changes the key of a cast for the random bits of its scales."""


def scale_noise(
    x: Tensor, cast: CastConfig, key: Tensor | None, origin: Origin, shape: BlockShape = None
) -> Tensor | None:
    """Return noise as `keyed_noise`, but for rounding block scales (other bits); None if the scale kind draws none."""
    if not cast.scale_kind.draws:
        return None
    return _noise(x, cast, None if key is None else key ^ SCALES_SALT, origin, shape)


def _noise(x: Tensor, cast: CastConfig, key: Tensor | None, origin: Origin, shape: BlockShape) -> Tensor:
    if key is None:
        which = f"rounding '{cast.rounding}'" if cast.rounding_kind.draws else f"scale '{cast.scale}'"
        raise ValueError(f"{which} draws random bits and needs a key; none was set for this step")
    height, width = shape or (1, 1)
    split_rows, split_columns = height != 1, width != 1  # into two axes each
    count = x.shape[0] * x.shape[1] if split_rows else x.shape[0]
    length = x.shape[-2] * x.shape[-1] if split_columns else x.shape[-1]
    first = word(origin.rows(count, x.device) * (origin.row_stride or length) + origin.column)  # of each row, int32
    columns = torch.arange(length, device=x.device, dtype=torch.int32)
    first = first.view(-1, x.shape[1]) if split_rows else first
    columns = columns.view(-1, x.shape[-1]) if split_columns else columns
    index = first.view(*first.shape, *[1] * columns.dim()) + columns
    return uniform_noise(key, index, cast.noise_bits)
