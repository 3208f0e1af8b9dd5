"""Weight gradients in fp32, written by Transformer Engine's GEMM and passed to autograd."""

from typing import Any

import torch
from torch import Tensor


class MainGrad:
    """Holder of the fp32 gradient of one use of a weight: the GEMM writes it, autograd reads it.

    `fuse_wgrad_accumulation` lets the GEMM add up a master's gradients in fp32. Here each backward pass gets a new
    tensor when the GEMM asks for it, because the layout sums over micro-batches and ranks, in its order.
    """

    def __init__(self) -> None:
        self._weight: Tensor | None = None
        self._made: Tensor | None = None

    @classmethod
    def cast(cls, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the master `weight` [N, K] in `dtype` for a kernel that writes the weight's gradient to `main_grad`.

        If Transformer Engine finds `__fsdp_param__`, it calls `get_main_grad` once in the backward pass;
        `overwrite_main_grad` makes it write instead of add. It keeps a weak reference to the tensor: this object, which
        the call keeps alive, has the strong one.
        """
        main_grad = cls()
        cast: Any = _Cast.apply(weight, dtype, main_grad)
        main_grad._weight = cast
        cast.__fsdp_param__ = cast.overwrite_main_grad = True
        cast.get_main_grad = main_grad.make
        return cast

    @staticmethod
    def let_go(cast: Any) -> None:
        """Break the reference cycle of a weight and its gradient's producer, once the call refers to the producer."""
        if "get_main_grad" in vars(cast):
            del cast.get_main_grad

    def make(self) -> Tensor:
        """Return the uninitialized fp32 tensor [N, K] that the GEMM writes to. Raises RuntimeError at a second call."""
        if self._weight is None:
            raise RuntimeError("the gradient of a weight can be computed only once per forward pass")
        made = torch.empty(self._weight.shape, dtype=torch.float32, device=self._weight.device)
        self._made, self._weight = made, None
        return made

    def take(self) -> Tensor | None:
        """Return the written gradient [N, K] and forget it; None if there is none."""
        made, self._made = self._made, None
        return made


class _Cast(torch.autograd.Function):
    """A cast that gets its gradient from `MainGrad` instead of autograd, which passes None."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype, main_grad: MainGrad) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.main_grad = main_grad
        return weight.to(dtype)  # another tensor: masters are fp32, and kernels take 16 bits

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, None, None]:
        return ctx.main_grad.take(), None, None
