"""The loss of hidden states, without all of their logits: rows are projected, and taken the gradient of, by chunks.

Logits of a micro-batch over a large vocabulary are its largest tensor: 8,192 tokens x 128,256 ids take 2.1 GB in bf16,
and their gradient as much again. The gradients of the hidden states and of the projection's weight are taken as each
chunk's logits are there, in the forward pass, so that nothing is computed twice (Hsu et al. 2024, arXiv 2410.10989,
section 3.2). Where that saves nothing, nothing is cut (`loss_spec.rows_at_once`): the bits of a whole projection.

torch 2.13 has `F.linear_cross_entropy` for a plain head over all ids. Here logits may be capped, without ids of
padding, and cut over the ranks of a vocabulary, and torch 2.11 is enough.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_llm.model.loss import device_kind
from lightning_llm.model.loss_spec import rows_at_once

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class LossOf:
    """What a decoder's forward pass is to return in place of logits: the sum of their losses over labels, fp32 [].

    `labels`: int64 `[B, T]`, -100 where there is none. `loss_sum`: of logits and labels, also of a part of the rows.
    `scale` []: what the gradient of the sum will be, which logits' gradients are multiplied by before they are rounded.
    `finish`: what is done to a projection's logits before the loss.
    """

    labels: Tensor
    loss_sum: Callable[[Tensor, Tensor], Tensor]
    scale: Tensor
    finish: Callable[[Tensor], Tensor] | None = None

    def after(self, finish: Callable[[Tensor], Tensor]) -> "LossOf":
        """Return the loss of logits that `finish` is done to."""
        return replace(self, finish=finish)

    def __call__(self, multiply: Multiply, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the loss of `multiply(x, weight, bias)` for `x` `[B, T, D]` and `weight` `[V, D]`, of this rank's."""
        count = x.shape[:-1].numel()
        rows = rows_at_once(count, x.shape[-1], len(weight), device_kind(x))
        if rows >= count:
            return self.of(multiply(x, weight, bias), self.labels)
        if bias is not None:
            raise ValueError("a projection to logits has no bias here")
        total: Tensor = _ChunkedLoss.apply(x, weight, multiply, self, rows)
        return total

    def of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the `logits` `[.., V]` of a projection over their `labels` `[..]`."""
        return self.loss_sum(logits if self.finish is None else self.finish(logits), labels)


class _ChunkedLoss(torch.autograd.Function):
    """Keeps the gradients of x, in its dtype, and of the weight, summed over chunks in fp32 and then rounded to its."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, multiply: Multiply, loss: LossOf, rows: int) -> Tensor:
        of_x, of_weight = ctx.needs_input_grad[:2]
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if of_x else None  # [B, T, D]
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if of_weight else None  # [V, D]
        matrix = weight.detach().requires_grad_(of_weight)
        total = torch.zeros((), dtype=wide, device=x.device)
        parts, labels = x.detach().flatten(0, -2).split(rows), loss.labels.flatten().split(rows)
        for number, (part, label) in enumerate(zip(parts, labels, strict=True)):  # [R, D], [R]
            part = part.detach().requires_grad_(of_x)
            with torch.set_grad_enabled(of_x or of_weight):
                each = loss.of(multiply(part, matrix, None), label)
            total += each.detach()
            wanted = [tensor for tensor in (part, matrix) if tensor.requires_grad]
            made = iter(torch.autograd.grad(each, wanted, loss.scale.to(each.dtype)) if wanted else ())
            if grad_x is not None:
                grad_x.view(-1, x.shape[-1])[number * rows :][: len(part)] = next(made)
            if grad_weight is not None:
                grad_weight.add_(next(made))
        ctx.scale = loss.scale
        ctx.gradients = grad_x, None if grad_weight is None else grad_weight.to(weight.dtype)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of a loss by chunks are given once: take the forward pass again")
        made, ctx.gradients = ctx.gradients, None
        factor = grad_output / ctx.scale  # 1 where the gradient is what was said
        return *(None if each is None else each.mul_(factor.to(each.dtype)) for each in made), None, None, None
