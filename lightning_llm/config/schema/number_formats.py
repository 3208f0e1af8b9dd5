"""Number formats of quantized operands, one row each. Imports no torch.

Representable magnitudes in [2^e, 2^(e+1)) are the multiples of 2^(max(e, min_exponent) - mantissa_bits), up to `max`;
subnormals are kept. An integer of b bits is a format with one exponent bit and b - 2 mantissa bits: its step is always
1.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class NumberFormat:
    """A number format of quantized operands: its fields in bits, largest number, source, and hardware names.

    `specials`: codes that are not numbers. "none": NaN is cast to `max`. "nan": all ones is NaN (the FN formats of
    arXiv 2209.05433). "ieee": the highest exponent is Inf or NaN. `integer`: codes are two's complement, not sign and
    magnitude. `torch_dtype`: torch dtype with the same codes. `unit`: device unit that multiplies it, for times in
    `plan`. `engine_dtype`: Transformer Engine's name; formats without one are always emulated.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    source: str
    specials: Literal["none", "nan", "ieee"] = "none"
    integer: bool = False
    torch_dtype: str | None = None
    unit: str | None = None
    engine_dtype: str | None = None

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest number."""
        return math.frexp(self.max)[1] - 1

    @property
    def code_bits(self) -> int:
        """Bits of a code: sign, exponent, mantissa."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def has_nan(self) -> bool:
        """Whether some code is NaN."""
        return self.specials != "none"

    @property
    def largest_fraction(self) -> float:
        """`max` divided by the next power of two above it.

        If a scale takes the largest element to at most that power of two, elements above this fraction of it clip.
        """
        return self.max / 2.0 ** (self.max_exponent + 1)

    def value(self, code: int) -> float:
        """Return the number encoded by `code`, an integer of `code_bits` bits."""
        sign = code >> (self.code_bits - 1)
        if self.integer:
            return float(code - (sign << self.code_bits))
        magnitude = code & (2 ** (self.code_bits - 1) - 1)
        exponent, mantissa = divmod(magnitude, 2**self.mantissa_bits)
        if self.specials == "nan" and magnitude == 2 ** (self.code_bits - 1) - 1:
            number = math.nan
        elif self.specials == "ieee" and exponent == 2**self.exponent_bits - 1:
            number = math.nan if mantissa else math.inf
        else:
            significand = mantissa + (2**self.mantissa_bits if exponent else 0)
            number = math.ldexp(significand, max(exponent, 1) - self.bias - self.mantissa_bits)
        return -number if sign else number


_FP8, _MX, _NVIDIA = "arXiv 2209.05433", "OCP Microscaling v1.0", "arXiv 2509.25149"
NUMBER_FORMATS = {
    row.name: row
    for row in (
        NumberFormat("e4m3", 4, 3, 7, 448.0, _FP8, "nan", False, "float8_e4m3fn", "fp8", "kFloat8E4M3"),
        NumberFormat("e5m2", 5, 2, 15, 57344.0, _FP8, "ieee", False, "float8_e5m2", "fp8", "kFloat8E5M2"),
        NumberFormat("e2m1", 2, 1, 1, 6.0, f"{_MX}; {_NVIDIA}", unit="fp4", engine_dtype="kFloat4E2M1"),
        NumberFormat("e2m3", 2, 3, 1, 7.5, _MX),
        NumberFormat("e3m2", 3, 2, 3, 28.0, _MX),
        NumberFormat("e1m2", 1, 2, 1, 1.75, "UFP4, arXiv 2606.20381"),
        NumberFormat("e5m6", 5, 6, 15, 65024.0, "DeepSeek-V3, arXiv 2412.19437; special codes as in IEEE 754", "ieee"),
        NumberFormat("int8", 1, 6, -5, 127.0, f"symmetric: -128 is not used; {_MX} (MXINT8)", "none", True, "int8"),
        NumberFormat("int4", 1, 2, -1, 7.0, "symmetric: -8 is not used", "none", True),
        NumberFormat("ternary", 1, 0, 1, 1.0, "-1, 0 and 1: BitNet b1.58, arXiv 2402.17764", "none", True),
    )
}
"""{name: format}; the names are the values of `format`."""

GRID_KEYS = ("mantissa", "min_exponent", "max_exponent", "max")
"""Keys of a format given as a mapping: mantissa bits, exponents of the smallest normal and of the largest number."""
MOST_MANTISSA_BITS, MOST_EXPONENT = 7, 60
"""Limits of such a format: its numbers are exact in bf16, also times a power of two."""
_GRID = re.compile(r"grid_m(\d+)_e(-?\d+)_(-?\d+)_max([0-9.e+-]+)")
_grids: dict[str, NumberFormat] = {}


def number_format(name: str) -> NumberFormat:
    """Return the format called `name`: one of `NUMBER_FORMATS`, or one named by `grid_name`.

    Raises KeyError for any other name, and ValueError for the name of a grid that cannot exist.
    """
    found = NUMBER_FORMATS.get(name) or _grids.get(name)
    return _grid(name) if found is None else found


def grid_name(values: Mapping[str, Any]) -> str:
    """Return the name of the format given by `GRID_KEYS` (`max` may be missing), e.g. "grid_m2_e-2_4_max28".

    Raises ValueError with the problem of the first wrong key.
    """
    unknown = [str(key) for key in values if key not in GRID_KEYS]
    missing = [key for key in GRID_KEYS[:3] if key not in values]
    if unknown or missing:
        text = f"unknown: {', '.join(unknown)}" if unknown else f"missing: {', '.join(missing)}"
        raise ValueError(f"format takes the keys {', '.join(GRID_KEYS)}; {text}")
    for key in GRID_KEYS[:3]:
        if isinstance(values[key], bool) or not isinstance(values[key], int):
            raise ValueError(f"format.{key}={values[key]!r}: must be an integer")
    mantissa, low, high = (int(values[key]) for key in GRID_KEYS[:3])
    if not 0 <= mantissa <= MOST_MANTISSA_BITS:
        raise ValueError(f"format.mantissa={mantissa}: must be 0 to {MOST_MANTISSA_BITS} bits, exact in bf16")
    if not -MOST_EXPONENT <= low <= high <= MOST_EXPONENT:
        limits = f"-{MOST_EXPONENT} <= min_exponent <= max_exponent <= {MOST_EXPONENT}"
        raise ValueError(f"format.min_exponent={low}, max_exponent={high}: must be {limits}")
    step, top = 2.0 ** (high - mantissa), 2.0 ** (high + 1)
    largest = values.get("max", top - step)
    if isinstance(largest, bool) or not isinstance(largest, int | float):
        raise ValueError(f"format.max={largest!r}: must be a number")
    if not top / 2 <= largest < top or largest % step:
        raise ValueError(
            f"format.max={largest:g}: must be a multiple of {step:g} from {top / 2:g} to {top - step:g}, the numbers "
            f"with exponent {high} and {mantissa} mantissa bits"
        )
    return f"grid_m{mantissa}_e{low}_{high}_max{float(largest)!r}"


def _grid(name: str) -> NumberFormat:
    """Return the format with a name from `grid_name`. Raises KeyError and ValueError as `number_format`."""
    found = _GRID.fullmatch(name)
    if found is None:
        raise KeyError(name)
    mantissa, low, high = (int(each) for each in found.groups()[:3])
    try:
        largest = float(found.group(4))
    except ValueError:
        raise KeyError(name) from None
    values = dict(zip(GRID_KEYS, (mantissa, low, high, largest), strict=True))
    if (own := grid_name(values)) != name:
        raise ValueError(f"format={name}: is another spelling of {own}. Use that")
    exponent_bits = (high - low + 1).bit_length()  # one code more for subnormals
    _grids[name] = NumberFormat(name, exponent_bits, mantissa, 1 - low, largest, "given by the recipe")
    return _grids[name]
