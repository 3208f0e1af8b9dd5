"""GEMMs in each number format that a device has: their speed, and whether their numbers are right.

Operands are small whole numbers, whose products every format holds and every order of summing adds up exactly: there is
one right result, rounded once. An fp32 product is checked by Freivalds' test in fp64, the others against it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from lightning_llm.base.hardware import device_name, peak_flops_per_second
from lightning_llm.linalg.gemm import product
from lightning_llm.parallel.torch_private import scaled_product

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = (*DTYPES, "fp8")
"""In which speed is measured. fp4 takes scales by block that torch has no documented way to hand in."""
LARGEST_OPERAND = 2


def formats_of(device: torch.device) -> tuple[str, ...]:
    """Return the formats that `device` multiplies: a GPU's by its compute capability; a CPU's as models use them."""
    if device.type != "cuda":
        return "fp32", "bf16"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return "fp32", "fp16"
    return FORMATS if capability >= (8, 9) else ("fp32", "tf32", "bf16", "fp16")


def peak_tflops(device: torch.device, number_format: str) -> float | None:
    """Return the data sheet's dense peak, 10^12 FLOP/s; None where no table has it, as of any CPU."""
    peak = peak_flops_per_second(device_name(device), number_format)
    return None if peak is None else peak / 1e12


class SquareProduct:
    """The product of two square matrices of `side` in one format, with the same operands on every rank."""

    def __init__(self, number_format: str, side: int, device: torch.device):
        self.number_format, self.side = number_format, side
        generator = torch.Generator().manual_seed(0)
        draw = partial(torch.randint, -LARGEST_OPERAND, LARGEST_OPERAND + 1, (side, side), generator=generator)
        self.a, self.b = (draw(dtype=torch.int8).to(device).float() for _ in range(2))
        if number_format == "fp8":
            self.left, self.right = (each.to(torch.float8_e4m3fn) for each in (self.a, self.b.t().contiguous().t()))
        else:
            self.left, self.right = (each.to(DTYPES[number_format]) for each in (self.a, self.b))

    @property
    def flops(self) -> int:
        """FLOPs of one product."""
        return 2 * self.side**3

    def run(self) -> Tensor:
        """Return the product, [side, side]."""
        if self.number_format == "fp8":
            return scaled_product(self.left, self.right)
        with _fp32_as(self.number_format):
            return product(self.left, self.right)

    def wrong_elements(self) -> int:
        """Return how many elements of the product are wrong; of an fp32 one, rows."""
        with _fp32_as("fp32"):
            exact = self.a @ self.b
        ones = torch.ones(self.side, dtype=torch.float64, device=exact.device)
        wrong = (exact.double() @ ones) != (self.a.double() @ (self.b.double() @ ones))
        if bool(wrong.any()):
            return int(wrong.sum())
        found = self.run()
        return int((found != exact.to(found.dtype)).sum())


@contextmanager
def _fp32_as(number_format: str) -> Iterator[None]:
    """Have products of fp32 matrices run as tf32, or as what they are."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if number_format == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
