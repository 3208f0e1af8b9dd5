"""Element formats of low-precision training, and the bits of their codes.

E4M3 and E5M2 are those of Micikevicius et al., arXiv 2209.05433; E2M1 and E8M0 those of the OCP Microscaling Formats
specification v1.0. Tensors here hold *values* in fp32 that lie on a format's grid; codes are made where bits matter.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ElementFormat:
    """A small float. `min_exponent` is that of the smallest normal number; subnormals are always kept."""

    name: str
    mantissa_bits: int
    min_exponent: int
    max_exponent: int
    max: float
    has_nan: bool


FORMATS = {
    "e4m3": ElementFormat("e4m3", 3, -6, 8, 448.0, True),
    "e5m2": ElementFormat("e5m2", 2, -14, 15, 57344.0, True),
    "e2m1": ElementFormat("e2m1", 1, 0, 2, 6.0, False),
}
TORCH_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

FLOAT_MAX = torch.finfo(torch.float32).max
EXPONENT_MASK = 0x7F800000
SIGN_MASK = -0x80000000


def power_of_two_floor(magnitude: Tensor) -> Tensor:
    """Return 2^floor(log2 x) of fp32 `magnitude`, from its bits; 0 for zero and subnormals, Inf for Inf and NaN."""
    return (magnitude.view(torch.int32) & EXPONENT_MASK).view(torch.float32)


def reciprocal_power_of_two(power: Tensor) -> Tensor:
    """Return 1/p of fp32 powers of two in [2^-126, 2^126], exact: the exponent field is mirrored at 254."""
    return (0x7F000000 - power.view(torch.int32)).view(torch.float32)


def copy_sign(magnitude: Tensor, sign: Tensor) -> Tensor:
    """Return fp32 `magnitude` (>= 0 or NaN) with the sign bit of fp32 `sign`, also on zeros."""
    return (magnitude.view(torch.int32) | (sign.view(torch.int32) & SIGN_MASK)).view(torch.float32)


def encode(values: Tensor, name: str) -> Tensor:
    """Return the uint8 codes of fp32 `values` that lie on the grid of format `name` (E2M1: nibbles 0..15, unpacked)."""
    if name in TORCH_DTYPES:
        return values.to(TORCH_DTYPES[name]).view(torch.uint8)
    # On the grid, twice the value is one of 0 1 2 3 4 6 8 12, whose codes are 0 .. 7.
    doubled = (values.abs() * 2).to(torch.int32)
    code = torch.where(doubled < 4, doubled, torch.where(doubled < 8, 2 + (doubled >> 1), 4 + (doubled >> 2)))
    negative = (values.view(torch.int32) >> 28) & 8
    return (code | negative).to(torch.uint8)


def decode(codes: Tensor, name: str) -> Tensor:
    """Return the fp32 values of uint8 `codes` of format `name`."""
    if name in TORCH_DTYPES:
        return codes.view(TORCH_DTYPES[name]).float()
    magnitude = torch.tensor(E2M1_MAGNITUDES, device=codes.device)[(codes & 7).long()]
    return torch.where((codes & 8) != 0, -magnitude, magnitude)
