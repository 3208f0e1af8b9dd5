"""Matrix products of 16-bit operands; CPUs without a unit for them use the fp32 GEMM.

Torch multiplies bf16 and fp16 on any CPU. Where the CPU cannot (x86 without AVX512-BF16 or AMX: most laptops; without
AVX512-FP16 or AMX-FP16: nearly all), oneDNN widens bf16 inside its kernel at about a third of the fp32 GEMM's rate, and
fp16 is multiplied by loops. The product of two such numbers is exact in fp32, so widening first, summing in fp32 and
rounding once equals a 16-bit GEMM, except for the order of sums.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

UNITS = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}
"""Instructions of x86 that multiply numbers of a dtype, as torch names them."""


def _without_units() -> frozenset[torch.dtype]:
    """Return the dtypes that this CPU is known to have no instructions for products of."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch >= 2.12
    if capabilities.get("architecture") != "x86_64":
        return frozenset()
    return frozenset(dtype for dtype, units in UNITS.items() if not any(capabilities.get(unit) for unit in units))


widened = _without_units()
"""The dtypes that the CPU multiplies in fp32 here."""
CHUNK_ELEMENTS = 1 << 22
"""Of an fp32 copy of activations, 16 MB: logits over a large vocabulary are never there whole in fp32. Weights are."""


@contextmanager
def unwidened() -> Iterator[None]:
    """Run the block without fp32 copies of operands, as on a device with native 16-bit GEMMs."""
    global widened
    before, widened = widened, frozenset()
    try:
        yield
    finally:
        widened = before


def operand(x: Tensor) -> Tensor:
    """Return the operand that `product` uses in place of `x`, to convert it once for several products by `torch.bmm`.

    The caller rounds the result to the dtype of `x`.
    """
    return x.float() if _is_widened(x) else x


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a b` of matrices, or batches of them, of one dtype; sums are fp32 or wider, the result in that dtype.

    Without gradients where numbers are widened.
    """
    return _wide_product(a, b) if _is_widened(a) else torch.matmul(a, b)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x weight^T + bias` `[..., N]` of `x` `[..., K]`, `weight` `[N, K]` and `bias` `[N]`, all of one dtype."""
    return _wide_linear(x, weight, bias) if _is_widened(x) else F.linear(x, weight, bias)


def returns_fp32(device: torch.device) -> bool:
    """Whether `torch.mm` of 16-bit operands can return its fp32 sums on this device (`out_dtype`, torch >= 2.8)."""
    return device.type == "cuda"


def fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the fp32 sums of `a b` `[M, N]`, not rounded, of `a` `[M, K]` and `b` `[K, N]` of one dtype.

    No gradients. If the device's kernels round their results, operands are widened first, which is exact.
    """
    if a.dtype != torch.float32 and returns_fp32(a.device):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def _is_widened(x: Tensor) -> bool:
    return x.dtype in widened and x.device.type == "cpu"


# Custom operators: checkpointing keeps their 16-bit results, and compilers see no fp32 copies.
@torch.library.custom_op("lightning_llm::wide_product", mutates_args=())
def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a.float(), b.float()).to(a.dtype)


@_wide_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


@torch.library.custom_op("lightning_llm::wide_linear", mutates_args=())
def _wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide, wide_bias = weight.float(), None if bias is None else bias.float()
    parts = [F.linear(rows.float(), wide, wide_bias).to(x.dtype) for rows in _chunks(x, len(weight))]
    return _joined(parts).view(*x.shape[:-1], len(weight))  # not -1: an expert may have no rows


@_wide_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


@torch.library.custom_op("lightning_llm::wide_linear_backward", mutates_args=())
def _wide_linear_backward(grad_output: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    wide, parts, grad_weight = weight.float(), [], torch.zeros(weight.shape)
    for rows, grads in zip(_chunks(x, len(weight)), _chunks(grad_output, x.shape[-1]), strict=True):
        wide_grads = grads.float()  # [m, N]
        parts.append(torch.mm(wide_grads, wide).to(x.dtype))  # [m, K]
        grad_weight.addmm_(wide_grads.t(), rows.float())  # [N, K]
    return _joined(parts).view_as(x), grad_weight.to(weight.dtype)


@_wide_linear_backward.register_fake
def _(grad_output: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None


def _differentiate(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:  # type: ignore[no-untyped-def]
    x, weight = ctx.saved_tensors
    grad_x, grad_weight = _wide_linear_backward(grad_output, x, weight)
    return grad_x, grad_weight, grad_output.sum_to_size(len(weight)) if ctx.has_bias else None


_wide_linear.register_autograd(_differentiate, setup_context=_keep)

PRODUCTS = (torch.ops.lightning_llm.wide_product.default, torch.ops.lightning_llm.wide_linear.default)
"""Operators with results that selective checkpointing keeps, as those of torch's own products."""


def _chunks(x: Tensor, other_width: int) -> tuple[Tensor, ...]:
    """Return the rows of `x` `[..., K]`, so many at once that they, and as many of `other_width`, are not too many."""
    rows = x.reshape(-1, x.shape[-1])
    return rows.split(max(1, CHUNK_ELEMENTS // max(x.shape[-1], other_width)))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
