"""GEMM of quantized operands: exact inputs, fp32 accumulation, one cast at the end.

Codes, and codes times block scales, are exact in bf16, so a bf16 GEMM multiplies the numbers of the low-precision
hardware. Two kinds of scale follow: tensor-level factors multiply the product, and fp32 block scales (times a code they
fit no 16-bit format) multiply partial sums over one block each, as block-scaled FP8 kernels do.

On CUDA, factors multiply the fp32 sums, which 16-bit `mm` can return. On a CPU it cannot, so a factor that is no power
of two rounds a second time, by at most half a unit in the last place: the same on every CPU, see `gemm`. Partial sums
need fp32 output, so there the codes go through an fp32 GEMM on either.
"""

import functools
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.linalg.gemm import fp32_product, linear, product, returns_fp32
from lightning_llm.precision.cast.inductor import Backend, run_by
from lightning_llm.precision.cast.quantize import Operand


def multiply(a: Operand, b: Operand, dtype: torch.dtype, backend: Backend, bias: Tensor | None = None) -> Tensor:
    """Return a b [m, n] in `dtype` for a [m, k], b [k, n], times all scales, plus `bias` [n] (never quantised)."""
    left, right = a.tensor, b.tensor
    partial = a.blocks is not None or b.blocks is not None
    unrounded = dtype == torch.float32 and left.dtype == right.dtype and not _crawls(left.dtype, left.device)
    if partial or not (left.dtype == right.dtype == dtype or unrounded) or _crawls(dtype, left.device):
        left, right = left.float(), right.float()
    factor = b.factor if a.factor is None else a.factor if b.factor is None else a.factor * b.factor
    if factor is None and bias is not None and not partial:
        return linear(left, right.t(), bias.to(left.dtype)).to(dtype)
    if partial:
        sums = _sum_of_partials(a, b, left, right)
    else:
        sums = fp32_product(left, right) if unrounded or _keeps_sums(factor, left) else product(left, right)
    if factor is not None:
        return _finish(backend)(sums, factor, bias, dtype)
    return (sums if bias is None else sums + bias.float()).to(dtype)


def _crawls(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a GEMM in `dtype` does: fp16 on a CPU is a format, some hundred times slower than fp32."""
    return dtype == torch.float16 and device.type == "cpu"


def multiplied_in_fp32(x: Tensor, cast: CastConfig) -> bool:
    """Return whether `multiply` needs the operand that `cast` makes of `x` in fp32, for any other operand."""
    return cast.scales_partial_sums or _crawls(x.dtype, x.device)


def _keeps_sums(factor: Tensor | None, left: Tensor) -> bool:
    """Return whether a `factor` is to multiply fp32 sums: where the device's kernels return them."""
    return factor is not None and returns_fp32(left.device)


def _sum_of_partials(a: Operand, b: Operand, left: Tensor, right: Tensor) -> Tensor:
    """Return the fp32 sum over blocks of k of (left right)_block times both block scales.

    acc = fma(partial * a's scale, b's scale, acc), in the order of the blocks: Transformer Engine's
    `blockwise_fp8_gemm_reference.py` and DeepSeek-V3's promotion every 128 (arXiv 2412.19437, section 3.3.2).
    """
    depth = left.shape[1]
    widths = [each.blocks.width for each in (a, b) if each.blocks is not None]
    starts = sorted({start for width in widths for start in range(0, depth, width)})
    total = left.new_zeros(left.shape[0], right.shape[1])
    partial = torch.empty_like(total)
    one = left.new_ones(1, 1)
    for start, end in pairwise([*starts, depth]):
        length = end - start
        torch.mm(left.narrow(1, start, length), right.narrow(0, start, length), out=partial)
        if a.blocks is not None:
            partial.mul_(a.blocks.at(start))
        total.addcmul_(partial, one if b.blocks is None else b.blocks.at(start))
    return total


def _scale_and_cast(product: Tensor, factor: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    scaled = product.float() * factor
    return (scaled if bias is None else scaled + bias.float()).to(dtype)


@functools.cache
def _finish(backend: Backend) -> Callable[[Tensor, Tensor, Tensor | None, torch.dtype], Tensor]:
    return run_by(backend, _scale_and_cast, "scale_and_cast")
