"""Number formats of quantized operands, one row each. Imports no torch.

Representable magnitudes in [2^e, 2^(e+1)) are the multiples of 2^(max(e, min_exponent) - mantissa_bits), up to `max`;
subnormals are kept. An integer of b bits is a format with one exponent bit and b - 2 mantissa bits: its step is always
1.
"""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class NumberFormat:
    """One number format: fields in bits, largest number, source, and hardware names.

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
        return 2**self.exponent_bits - 1 - self.bias - (self.specials == "ieee")

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
        """`max` over the next power of two: after scaling to that power, larger magnitudes are clipped."""
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
    )
}
"""{name: format}; the names are the values of `format`."""
