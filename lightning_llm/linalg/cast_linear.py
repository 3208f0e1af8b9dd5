"""Products with an fp32 master weight that is cast on use; its gradient is rounded to the operands' dtype or not.

The GEMM sums dW = dY^T X in fp32. Autograd rounds it to the dtype of X, which is that of the cast weight, before adding
it to the fp32 master's gradient. Megatron-LM's `gradient_accumulation_fusion` and Transformer Engine's
`fuse_wgrad_accumulation` add the sums unrounded to the fp32 gradient; so does `linear_with_unrounded_wgrad`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_llm.linalg.gemm import fp32_product, linear, product


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
    """Return `x weight^T + bias` like `linear` for an fp32 `weight`; its gradient is the GEMM's unrounded fp32 sum."""
    y: Tensor = _UnroundedWgrad.apply(x, weight, bias)
    return y


Reduce = Callable[..., Tensor]
"""Function of (multiply, x, weight, bias) that replaces a product, such as `model.loss.LossReduction`."""


class CastOnUse(nn.Module):
    """Module that casts its fp32 master weight to the dtype of the input in each product.

    `rounds_wgrad`: whether the weight's gradient, summed in fp32, is rounded to that dtype before it is accumulated.
    """

    rounds_wgrad = True

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x weight^T + bias` `[..., N]` as this module computes it, for a shard of its weight `[N, K]`."""
        bias = None if bias is None else bias.to(x.dtype)
        if not self.rounds_wgrad:
            return linear_with_unrounded_wgrad(x, weight, bias)
        return linear(x, weight.to(x.dtype), bias)

    def reduced(self, x: Tensor, weight: Tensor, bias: Tensor | None, reduce: Reduce | None) -> Tensor:
        """Return `reduce` of the product, with the weight cast once; None: the product."""
        if reduce is None:
            return self.multiply(x, weight, bias)
        return reduce(self.multiply, x, weight.to(x.dtype) if self.rounds_wgrad else weight, bias)
