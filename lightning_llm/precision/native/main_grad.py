"""Transformer Engine's `main_grad`: its wgrad GEMM writes fp32 sums into a tensor that it is given, not rounded.

That is `fuse_wgrad_accumulation`, made for masters whose gradients it adds up. Here each backward pass gets a tensor of
its own, made when the GEMM asks for it, and autograd takes it on to the fp32 master: what adds up, and in which order
over micro-batches and ranks, is the layout's business (`parallel.gradient_sync`).
"""

from typing import Any

import torch
from torch import Tensor


class MainGrad:
    """The fp32 gradient of one use of a weight, from the GEMM that writes it to autograd, which takes it on."""

    def __init__(self) -> None:
        self._weight: Tensor | None = None
        self._made: Tensor | None = None

    @classmethod
    def cast(cls, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `weight` [N, K], a master, in `dtype` for a kernel, whose gradient is what it writes to `main_grad`.

        Transformer Engine looks for `get_main_grad` where it finds `__fsdp_param__`, and calls it once in the backward
        pass; `overwrite_main_grad` has it write, not add. It keeps a weak reference to the tensor: this object, which
        the call keeps, has the strong one.
        """
        main_grad = cls()
        cast: Any = _Cast.apply(weight, dtype, main_grad)
        main_grad._weight = cast
        cast.__fsdp_param__ = cast.overwrite_main_grad = True
        cast.get_main_grad = main_grad.make
        return cast

    @staticmethod
    def let_go(cast: Any) -> None:
        """Break the circle of a weight and what makes its gradient, once the call has taken hold of the latter."""
        if "get_main_grad" in vars(cast):
            del cast.get_main_grad

    def make(self) -> Tensor:
        """Return the tensor [N, K] to write to, fp32."""
        if self._weight is None:
            raise RuntimeError("a weight's gradient is made once, in the one backward pass of its use")
        made = torch.empty(self._weight.shape, dtype=torch.float32, device=self._weight.device)
        self._made, self._weight = made, None
        return made

    def take(self) -> Tensor | None:
        """Return what was written, None where nothing was."""
        made, self._made = self._made, None
        return made


class _Cast(torch.autograd.Function):
    """A cast whose gradient comes beside autograd, in `MainGrad`: what autograd hands it is none."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype, main_grad: MainGrad) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.main_grad = main_grad
        return weight.to(dtype)  # another tensor: masters are fp32, and kernels take 16 bits

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, None, None]:
        return ctx.main_grad.take(), None, None
