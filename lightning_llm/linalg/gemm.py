"""Matrix products of 16-bit operands, and linear layers that cast an fp32 master weight in each product.

A CPU without instructions for a 16-bit dtype uses the fp32 GEMM. Torch multiplies bf16 and fp16 on any CPU. Where the
CPU cannot (x86 without AVX512-BF16 or AMX: most laptops; without AVX512-FP16 or AMX-FP16: nearly all), oneDNN widens
bf16 inside its kernel at about a third of the fp32 GEMM's rate, and fp16 is multiplied by loops. The product of two
such numbers is exact in fp32, so widening first, summing in fp32 and rounding once equals a 16-bit GEMM, except for the
order of sums.

Of the gradient of a weight that is cast on use, autograd rounds the GEMM's fp32 sum dW = dY^T X to the dtype of X
before adding it to the fp32 master's gradient. Megatron-LM's `gradient_accumulation_fusion` and Transformer Engine's
`fuse_wgrad_accumulation` add the sums unrounded; so does `linear_with_unrounded_wgrad`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

UNITS = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}
"""Instructions of x86 that multiply numbers of a dtype, as torch names them."""


def _without_units() -> frozenset[torch.dtype]:
    """Return the dtypes that this CPU is known to have no instructions for products of."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch >= 2.12
    if capabilities.get("architecture") != "x86_64":
        return frozenset()
    return frozenset(dtype for dtype, units in UNITS.items() if not any(capabilities.get(unit) for unit in units))


widened = _without_units()
"""The dtypes that `product` and `linear` convert to fp32 on this CPU before they multiply."""
CHUNK_ELEMENTS = 1 << 22
"""Largest number of elements of activations that are copied to fp32 at once (16 MB), so that logits over a large
vocabulary are never in memory whole in fp32. A weight is copied whole."""


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
    """Return `x` as `product` multiplies it on its device: in fp32 if its dtype is in `widened`, else unchanged.

    For callers that convert an operand once for several products by `torch.bmm`; they round results to the dtype of
    `x`.
    """
    return x.float() if _is_widened(x) else x


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the matrix product `a b` (or a batch of them) in the common dtype of `a` and `b`; sums are fp32 or wider.

    Has no backward pass if the dtype is in `widened`; use `linear` where a gradient is needed. `out`: contiguous tensor
    of that dtype to write it to.
    """
    if out is None:
        return _wide_product(a, b) if _is_widened(a) else torch.matmul(a, b)
    return out.copy_(_wide_product(a, b)) if _is_widened(a) else torch.matmul(a, b, out=out)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x weight^T + bias` `[..., N]` of `x` `[..., K]`, `weight` `[N, K]` and `bias` `[N]`, all of one dtype.

    As `F.linear`, with gradients; multiplied in fp32 and rounded once if the dtype is in `widened`.
    """
    return _wide_linear(x, weight, bias) if _is_widened(x) else F.linear(x, weight, bias)


def returns_fp32(device: torch.device) -> bool:
    """Return whether `torch.mm` can return unrounded fp32 sums of 16-bit operands on `device`: only on CUDA.

    By its argument `out_dtype`, which needs torch >= 2.8.
    """
    return device.type == "cuda"


def fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product of `a` `[M, K]` and `b` `[K, N]`, of one dtype, as unrounded fp32 sums `[M, N]`.

    Has no backward pass. If the device's kernels round their results, operands are converted to fp32 first; that is
    exact.
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
"""The operators defined here. Selective activation checkpointing keeps their results, as those of torch's products."""


def _chunks(x: Tensor, other_width: int) -> tuple[Tensor, ...]:
    """Return the rows of `x` `[..., K]`, so many at once that they, and as many of `other_width`, are not too many."""
    rows = x.reshape(-1, x.shape[-1])
    return rows.split(max(1, CHUNK_ELEMENTS // max(x.shape[-1], other_width)))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _UnroundedWgrad(torch.autograd.Function):
    """`linear` with dW = dY^T X as the GEMM sums it, in the dtype of the weight (fp32), not rounded to that of X."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return linear(x, weight.to(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        rows = grad_output.reshape(-1, grad_output.shape[-1])  # [M, N]
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = product(rows, weight.to(x.dtype)).view_as(x)
        if ctx.needs_input_grad[1]:
            grad_weight = fp32_product(rows.t(), x.reshape(-1, x.shape[-1])).to(weight.dtype)  # [N, K]
        return grad_x, grad_weight, rows.sum(0) if ctx.has_bias else None


def linear_with_unrounded_wgrad(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `linear` of `x` and fp32 `weight` `[N, K]` cast to the dtype of `x`; the weight's gradient is not rounded.

    The gradient is the fp32 sum of the GEMM, instead of that sum rounded to the dtype of `x`.
    """
    y: Tensor = _UnroundedWgrad.apply(x, weight, bias)
    return y


Reduce = Callable[..., Tensor]
"""Called as `reduce(multiply, x, weight, bias)` in place of the product `multiply(x, weight, bias)`; returns any
tensor.

`model.loss.LossReduction` is one: it returns the loss without ever having all logits in memory."""


class CastOnUse(nn.Module):
    """Base class of linear layers that cast their fp32 master weight to the dtype of the input in each product."""

    rounds_wgrad = True
    """Whether the weight's gradient, summed in fp32, is rounded to the input's dtype before it is accumulated."""

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x weight^T + bias` `[..., N]` as this module computes it, for a shard of its weight `[N, K]`."""
        bias = None if bias is None else bias.to(x.dtype)
        if not self.rounds_wgrad:
            return linear_with_unrounded_wgrad(x, weight, bias)
        return linear(x, weight.to(x.dtype), bias)

    def reduced(self, x: Tensor, weight: Tensor, bias: Tensor | None, reduce: Reduce | None) -> Tensor:
        """Return the result of `reduce` in place of the product; with `reduce=None`, the product `multiply` itself.

        `reduce` gets the weight already cast to the dtype of `x`, unless `rounds_wgrad` is false.
        """
        if reduce is None:
            return self.multiply(x, weight, bias)
        return reduce(self.multiply, x, weight.to(x.dtype) if self.rounds_wgrad else weight, bias)
