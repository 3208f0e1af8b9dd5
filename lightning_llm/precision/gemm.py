"""One GEMM of quantised operands: exact numbers in, fp32 accumulation, one cast at the end.

Codes times block scales are exact in bf16 (but for fp32 block scales, which come as fp32), so a bf16 GEMM multiplies
what the low-precision hardware would. Tensor-level factors multiply the product. On CPU `mm` has no fp32 output from
bf16 operands, so a factor that is no power of two rounds a second time, by half a unit in the last place at most.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_llm.precision.inductor import Backend, Operand, compiled


def multiply(a: Operand, b: Operand, dtype: torch.dtype, backend: Backend, bias: Tensor | None = None) -> Tensor:
    """Return a b [m, n] in `dtype` for a [m, k], b [k, n], times both factors, plus `bias` [n] (never quantised)."""
    left, right = a.tensor, b.tensor
    if not (left.dtype == right.dtype == dtype) or (dtype == torch.float16 and left.device.type == "cpu"):
        # fp16 on a CPU is a format, not a speed: its GEMM is some hundred times slower than fp32's.
        left, right = left.float(), right.float()
    factor = b.factor if a.factor is None else a.factor if b.factor is None else a.factor * b.factor
    if factor is not None:
        return _finish(backend)(left @ right, factor, bias, dtype)
    if bias is None:
        return (left @ right).to(dtype)
    return torch.addmm(bias.to(left.dtype), left, right).to(dtype)


def _scale_and_cast(product: Tensor, factor: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    scaled = product.float() * factor
    return (scaled if bias is None else scaled + bias.float()).to(dtype)


@functools.cache
def _finish(backend: Backend) -> Callable[[Tensor, Tensor, Tensor | None, torch.dtype], Tensor]:
    return compiled(_scale_and_cast) if backend == "compiled" else _scale_and_cast
