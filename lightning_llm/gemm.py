"""Matrix products of bf16 operands: on a CPU without a unit for them, by its fp32 GEMM.

Torch multiplies bf16 on any CPU. Where the CPU cannot (x86 without AVX512-BF16 or AMX: most laptops), oneDNN widens
numbers inside its kernel at about a third of the fp32 GEMM's rate. The product of two bf16 numbers is exact in fp32, so
widening first, summing in fp32 and rounding once gives what a bf16 GEMM gives, sums in another order.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor


def _cpu_multiplies_bf16() -> bool:
    """Return whether this CPU has instructions for bf16 products, or is none that is known to have none."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # torch >= 2.12
    if capabilities.get("architecture") != "x86_64":
        return True
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))


widens = not _cpu_multiplies_bf16()
"""Whether bf16 products on the CPU are fp32's here."""


@contextmanager
def unwidened() -> Iterator[None]:
    """Run the block as on a device that multiplies bf16 numbers: no fp32 copies of operands are made."""
    global widens
    before, widens = widens, False
    try:
        yield
    finally:
        widens = before


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a b` of matrices, or batches of them, of one dtype; sums are fp32 or wider, the result in that dtype."""
    if widens and a.dtype == torch.bfloat16 and a.device.type == "cpu":
        return torch.matmul(a.float(), b.float()).to(a.dtype)
    return torch.matmul(a, b)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x weight^T + bias` `[..., N]` of `x` `[..., K]`, `weight` `[N, K]` and `bias` `[N]`, all of one dtype."""
    if widens and x.dtype == torch.bfloat16 and x.device.type == "cpu":
        y: Tensor = _WideLinear.apply(x, weight, bias)
        return y
    return F.linear(x, weight, bias)


class _WideLinear(torch.autograd.Function):
    """Keeps what `F.linear` keeps for the backward pass, not its fp32 copies."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        wide = grad_output.float()  # [..., N]
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.matmul(wide, weight.float()).to(x.dtype)  # [..., K]
        if ctx.needs_input_grad[1]:
            rows = wide.flatten(0, -2).t()  # [N, M]
            grad_weight = torch.matmul(rows, x.flatten(0, -2).float()).to(weight.dtype)  # [N, K]
        if ctx.needs_input_grad[2]:
            grad_bias = grad_output.flatten(0, -2).sum(0)  # [N]
        return grad_x, grad_weight, grad_bias
