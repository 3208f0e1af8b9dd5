"""RMSNorm, LayerNorm and RMSNorm by 1 + weight, in the dtype of their input with statistics in fp32; a scale."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., D]` in the dtype of `x` `[..., D]`; the mean of squares is taken in fp32."""
        return self.normalise(x, self.weight)

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the result of `forward` for another `weight`, such as a gathered one; `bias` is ignored."""
        return rms_norm(x, weight.to(x.dtype), self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` `[..., D]` in the dtype of `x` `[..., D]`, as `F.rms_norm` does.

    On a CPU torch computes it by a dozen operators forward and as many backward; `_RMSNorm` needs fewer.
    """
    by_operators = x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if by_operators and not torch.compiler.is_compiling():
        normed: Tensor = _RMSNorm.apply(x, x if x.dtype == torch.float32 else None, weight, eps)
        return normed
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm with torch's operators in torch's order, so with its bits; saves the input and recomputes the rest.

    The gradient of `x` has two terms, that of the product and that of the root. In fp32 torch adds them one by one to
    the other gradients of `x`; so `again` is `x` and receives the second. In other dtypes both are summed before
    rounding.
    """

    @staticmethod
    def forward(ctx, x: Tensor, again: Tensor | None, weight: Tensor, eps: float) -> Tensor:  # type: ignore[no-untyped-def]
        wide = x.float()  # [..., D]
        root = wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, root, weight)
        ctx.one_by_one = again is not None
        return (wide * root).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None]:  # type: ignore[no-untyped-def]
        x, root, weight = ctx.saved_tensors
        wide, grad = x.float(), grad_output.float()  # 2 x [..., D]
        grad_weight = (wide * root).mul_(grad).sum_to_size(weight.shape).to(weight.dtype)  # [D]
        grad_normed = grad * weight  # [..., D]
        grad_root = (grad_normed * wide).sum(-1, keepdim=True)  # [..., 1]
        grad_square = root.pow(3).mul_(-0.5).mul_(grad_root).div_(x.shape[-1])  # [..., 1] of each squared element
        of_product, of_root = grad_normed.mul_(root), wide * grad_square.mul_(2)  # 2 x [..., D]
        if ctx.one_by_one:
            return of_product, of_root, grad_weight, None
        return of_product.add_(of_root).to(x.dtype), None, grad_weight, None


class LayerNorm(nn.Module):
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the last dimension (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, size: int, eps: float, bias: bool):
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., D]` in the dtype of `x` `[..., D]`; mean and variance are taken in fp32."""
        return self.normalise(x, self.weight, self.bias)

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the result of `forward` for another `weight` and `bias`, such as gathered ones."""
        return F.layer_norm(x, (self.size,), weight.to(x.dtype), None if bias is None else bias.to(x.dtype), self.eps)


class RMSNormZeroCentered(RMSNorm):
    """`x / sqrt(mean(x^2) + eps) * (1 + weight)` over the last dimension."""

    def __init__(self, size: int, eps: float):
        super().__init__(size, eps)
        self.weight = nn.Parameter(torch.zeros(size))

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the result of `forward` with this weight; there is no bias.

        In fp32, rounded once, as in Gemma: in bf16, 1 + weight has steps of 2^-7 and would lose small weights.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        return rms_norm(x.to(wide), 1 + weight.to(x.dtype).to(wide), self.eps).to(x.dtype)


class Affine(nn.Module):
    """`(x + bias) * weight` over the last dimension, without a norm: the residual scaling of ZAYA1."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., D]` in the dtype of `x` `[..., D]`."""
        return self.normalise(x, self.weight, self.bias)

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the result of `forward` for another `weight` and `bias`, such as gathered ones."""
        return (x + bias.to(x.dtype)) * weight.to(x.dtype)
