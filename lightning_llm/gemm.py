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


CHUNK_ELEMENTS = 1 << 22
"""Of an fp32 copy, 16 MB: logits over a large vocabulary are never there whole in fp32."""


@contextmanager
def unwidened() -> Iterator[None]:
    """Run the block as on a device that multiplies bf16 numbers: no fp32 copies of operands are made."""
    global widens
    before, widens = widens, False
    try:
        yield
    finally:
        widens = before


def operand(x: Tensor) -> Tensor:
    """Return what `product` multiplies in place of `x`: made once for several products, it is theirs with `torch.bmm`.

    The caller rounds the result to the dtype of `x`.
    """
    return x.float() if widens and x.dtype == torch.bfloat16 and x.device.type == "cpu" else x


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
    """Keeps what `F.linear` keeps for the backward pass, and of fp32 copies no more than `CHUNK_ELEMENTS` at once."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        wide, wide_bias = weight.float(), None if bias is None else bias.float()
        parts = [F.linear(rows.float(), wide, wide_bias).to(x.dtype) for rows in _chunks(x, len(weight))]
        return _joined(parts).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        wide, parts, grad_weight = weight.float(), [], None
        for rows, grads in zip(_chunks(x, len(weight)), _chunks(grad_output, x.shape[-1]), strict=True):
            wide_grads = grads.float()  # [m, N]
            if needs_x:
                parts.append(torch.mm(wide_grads, wide).to(x.dtype))  # [m, K]
            if needs_weight:
                product = torch.mm(wide_grads.t(), rows.float())  # [N, K]
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
        return (
            _joined(parts).view_as(x) if needs_x else None,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            grad_output.sum_to_size(len(weight)) if needs_bias else None,
        )


def _chunks(x: Tensor, other_width: int) -> tuple[Tensor, ...]:
    """Return the rows of `x` `[..., K]`, so many at once that they, and as many of `other_width`, are not too many."""
    rows = x.reshape(-1, x.shape[-1])
    return rows.split(max(1, CHUNK_ELEMENTS // max(x.shape[-1], other_width)))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
