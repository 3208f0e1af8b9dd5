"""Losses over the vocabulary, summed in fp32, without an fp32 copy of the logits: cross entropy, and the divergence of
a student from its teachers.

`LossReduction` is the loss of hidden states without all of their logits: rows are projected, and the gradient taken, by
chunks. Logits of a micro-batch over a large vocabulary are its largest tensor: 8,192 tokens x 128,256 ids take 2.1 GB
in bf16, and their gradient as much again. The gradients of the hidden states and of the projection's weight are taken
as each chunk's logits are there, in the forward pass, so that nothing is computed twice (Hsu et al. 2024,
arXiv 2410.10989, section 3.2). Where that saves nothing, nothing is cut (`logit_chunks.rows_at_once`): the bits of a
whole projection. torch 2.13 has `F.linear_cross_entropy` for a plain head over all ids. Here logits may be capped,
without ids of padding, and cut over the ranks of a vocabulary, and torch 2.11 is enough.

Auxiliary losses are those of a block's parts, such as a router's load-balancing loss. A pipeline schedule takes the
loss of the last stage only, so the auxiliary loss of an earlier stage cannot be added to it. Instead the block's output
passes through an autograd function that adds the gradient of the auxiliary loss in the backward pass (Megatron-LM's
`MoEAuxLossAutoScaler`, `moe_utils.py`), under every layout.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.model.flops import CHUNK_ELEMENTS, rows_at_once

IGNORED_LABEL = -100
_planned_for: str | None = None
"""Kind of device that decides the chunk size; None: the device of the logits."""


@contextmanager
def chunked_for(kind: str) -> Iterator[None]:
    """Context in which the loss uses the chunk size of a `kind` of device, "cpu" or "cuda", wherever it runs."""
    global _planned_for
    before, _planned_for = _planned_for, kind
    try:
        yield
    finally:
        _planned_for = before


def device_kind(tensor: Tensor) -> str:
    """Return the kind of device that decides the chunk size for `tensor`."""
    return _planned_for or tensor.device.type


def chunk_rows(logits: Tensor) -> int:
    """Return how many rows of `logits` [N, V] the loss converts to fp32 at once."""
    return max(1, CHUNK_ELEMENTS.get(device_kind(logits), CHUNK_ELEMENTS["cuda"]) // logits.shape[-1])


class _CrossEntropySum(torch.autograd.Function):
    """Rows are taken in chunks that stay in cache; only the logits themselves are kept for the backward pass.

    The gradient of a row's loss is `softmax(logits) - onehot(label)`, taken in fp32 and rounded once. With `z_loss` it
    is also that of `z_loss log(sum(exp(logits)))^2`: the softmax is multiplied by `1 + 2 z_loss log(sum(exp(logits)))`.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, z_loss: float) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(logits, labels)
        ctx.z_loss = z_loss
        wide = torch.promote_types(logits.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=logits.device)
        rows = chunk_rows(logits)
        for row, label in zip(logits.split(rows), labels.split(rows), strict=True):  # [R, V], [R]
            total += F.cross_entropy(row.to(wide), label, ignore_index=IGNORED_LABEL, reduction="sum")
        return total

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        logits, labels = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)  # [N, V]
        rows = chunk_rows(logits)
        for row, label, out in zip(logits.split(rows), labels.split(rows), grad_logits.split(rows), strict=True):
            counted = (label != IGNORED_LABEL)[:, None]  # [R, 1]
            in_place = out if out.dtype == grad_output.dtype else None
            grad = torch.softmax(row, dim=-1, dtype=grad_output.dtype, out=in_place)  # [R, V]
            if ctx.z_loss:
                grad.mul_(1 + 2 * ctx.z_loss * torch.logsumexp(row.to(grad.dtype), -1, keepdim=True))
            grad.scatter_add_(-1, label.clamp(min=0)[:, None], -torch.ones_like(counted, dtype=grad.dtype))
            grad.mul_(counted * grad_output)
            if in_place is None:
                out.copy_(grad)
            del grad  # otherwise it is still allocated while the next chunk's is computed
        return grad_logits, None, None


def next_token_loss_sum(logits: Tensor, labels: Tensor, z_loss: float = 0.0) -> Tensor:
    """Return the sum of `-log softmax(logits)[label]` over all labels that are not -100, an fp32 scalar.

    `logits` is `[B, T, V]` of any float dtype (fp64 sums in fp64), `labels` int64 `[B, T]`, already shifted: the label
    at t is the token at t + 1. The caller divides by the global count of labels. `z_loss`: the gradient, not the value,
    is also that of `z_loss log(sum(exp(logits)))^2` of each label (`model.output_z_loss`).
    """
    return _CrossEntropySum.apply(logits.flatten(0, -2), labels.flatten(), z_loss)


@functools.cache
def compiled_loss_sum(z_loss: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `next_token_loss_sum` as compiled for a GPU: two kernels without fp32 copies, with the same rounding.

    Of 16,384 tokens x 128,256 ids it takes an H200 6 ms; by torch's operators a step takes 29 ms more.
    """
    return torch.compile(fp32_loss_sum(z_loss))


def fp32_loss_sum(z_loss: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function like `next_token_loss_sum` that works on an fp32 copy of the logits, to be compiled.

    Only a compiler avoids that copy."""

    def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        rows = logits.flatten(0, -2).to(wide)
        loss = F.cross_entropy(rows, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
        if not z_loss:
            return loss
        z = (torch.logsumexp(rows, -1).square() * (labels.flatten() != IGNORED_LABEL)).sum() * z_loss
        return loss + (z - z.detach())  # the gradient alone

    return loss_sum


class _DivergenceSum(torch.autograd.Function):
    """Rows in chunks, as in `_CrossEntropySum`. The gradient of a row by its logits z is
    `t (softmax(z / t) - softmax(e / t))` for teachers' logits e, temperature t and the loss `t^2 KL` (Hinton et al.
    2015, arXiv 1503.02531, section 2)."""

    @staticmethod
    def forward(ctx, logits: Tensor, teachers: Tensor, labels: Tensor, temperature: float) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(logits, teachers, labels)
        ctx.temperature = temperature
        wide = torch.promote_types(logits.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=logits.device)
        rows, real = chunk_rows(logits), teachers.shape[-1]
        for row, teacher, label in zip(logits.split(rows), teachers.split(rows), labels.split(rows), strict=True):
            log_q = F.log_softmax(row.to(wide) / temperature, dim=-1)[:, :real]  # [R, V]
            log_p = F.log_softmax(teacher.to(wide) / temperature, dim=-1)  # [R, V]
            divergence = (log_p.exp() * (log_p - log_q)).sum(-1)  # [R]
            total += divergence.masked_fill(label == IGNORED_LABEL, 0.0).sum() * temperature**2
        return total

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        logits, teachers, labels = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)  # [N, V]
        rows, real, wide = chunk_rows(logits), teachers.shape[-1], grad_output.dtype
        chunks = (each.split(rows) for each in (logits, teachers, labels, grad_logits))
        for row, teacher, label, out in zip(*chunks, strict=True):
            grad = torch.softmax(row.to(wide) / ctx.temperature, dim=-1)  # [R, V]
            grad[:, :real] -= torch.softmax(teacher.to(wide) / ctx.temperature, dim=-1)
            out.copy_(grad.mul_((label != IGNORED_LABEL)[:, None] * (grad_output * ctx.temperature)))
        return grad_logits, None, None, None


def divergence_sum(logits: Tensor, teachers: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the sum of `temperature^2 KL(teachers || student)` over all labels that are not -100, an fp32 scalar.

    `logits` of the student are `[B, T, V]` of any float dtype (fp64 sums in fp64), including padding; `teachers`
    `[B, T, vocab_size]` are the logits of the teachers; `labels` int64 `[B, T]`. Teachers get no gradient.
    """
    real = teachers.shape[-1]
    return _DivergenceSum.apply(logits.flatten(0, -2), teachers.reshape(-1, real), labels.flatten(), temperature)


Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class LossReduction:
    """Loss that a decoder's forward pass returns instead of logits: the sum over labels, fp32 [].

    `labels`: int64 `[B, T]`, -100 to ignore. `loss_sum`: function of logits and labels, also of some of the rows.
    `scale` []: the expected gradient of the sum; logits' gradients are multiplied by it before they are rounded.
    `finish`: function applied to a projection's logits before the loss.
    """

    labels: Tensor
    loss_sum: Callable[[Tensor, Tensor], Tensor]
    scale: Tensor
    finish: Callable[[Tensor], Tensor] | None = None

    def after(self, finish: Callable[[Tensor], Tensor]) -> "LossReduction":
        """Return this reduction with `finish`, a function that is applied to the logits before the loss."""
        return replace(self, finish=finish)

    def __call__(self, multiply: Multiply, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the loss of the logits `multiply(x, weight, bias)`, for `x` `[B, T, D]` and this rank's `weight` `[V,
        D]`."""
        count = x.shape[:-1].numel()
        rows = rows_at_once(count, x.shape[-1], len(weight), device_kind(x))
        if rows >= count:
            return self.of(multiply(x, weight, bias), self.labels)
        if bias is not None:
            raise ValueError("a bias in the projection to logits is not supported")
        total: Tensor = _ChunkedLoss.apply(x, weight, multiply, self, rows)
        return total

    def of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the `logits` `[.., V]` of a projection over their `labels` `[..]`."""
        return self.loss_sum(logits if self.finish is None else self.finish(logits), labels)


class _ChunkedLoss(torch.autograd.Function):
    """Keeps the gradients of x, in its dtype, and of the weight, summed over chunks in fp32 and then rounded to its."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, multiply: Multiply, loss: LossReduction, rows: int) -> Tensor:
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
            raise RuntimeError("the gradients of a chunked loss can be taken only once: run the forward pass again")
        made, ctx.gradients = ctx.gradients, None
        factor = grad_output / ctx.scale  # 1 if the gradient is `scale`, as expected
        return *(None if each is None else each.mul_(factor.to(each.dtype)) for each in made), None, None, None


ATTRIBUTE = "auxiliary_losses"
"""Attribute that a part sets in its forward pass: weighted scalars by name, each a mean over its tokens."""


@runtime_checkable
class Counts(Protocol):
    """Protocol of block parts that count over the micro-batches of a step, such as routers."""

    def begin_step(self) -> None:
        """Reset the counts before a step."""

    def count(self) -> None:
        """Add the counts of the last forward pass to those of the step."""


class AuxiliaryLosses:
    """Auxiliary losses of a decoder's blocks: attaches their gradients and sums their values over a step."""

    def __init__(self, names: Iterable[str]):
        """`names`: names of all losses that parts of the whole decoder declare, on any pipeline stage."""
        self.names = sorted(set(names))
        self.factors: dict[str, int] = {}
        """Number of ranks over which the values of a loss are summed instead of averaged, by name; 1 if absent."""
        self.sums: dict[str, Tensor] = {}
        """This rank's contribution to each loss of the step in progress, by name."""
        self._share, self._gradient = 1.0, 1.0

    def begin_step(self, share: float, loss_scale: float) -> None:
        """Start a step. `share`: weight of the loss of one micro-batch on one rank in the mean over the step."""
        self.sums.clear()
        self._share, self._gradient = share, share * loss_scale

    def attach(self, x: Tensor, y: Tensor, block: nn.Module) -> Tensor:
        """Return `y`, the output of `block` for `x`, with the gradients of the losses that its parts have set.

        A part that counts something (`count`, such as a router) does so here, once even if the block is recomputed.

        Raises:
            ConfigError: a part sets a loss that its config class does not declare.
        """
        for part in block.children():
            losses = part.__dict__.pop(ATTRIBUTE, {})
            if isinstance(part, Counts) and torch.is_grad_enabled():
                part.count()
            if unknown := losses.keys() - set(self.names):
                raise ConfigError(undeclared(type(part).__name__, unknown))
            if losses and torch.is_grad_enabled():
                for name, loss in losses.items():
                    factor = self.factors.get(name, 1)
                    share = factor * self._share * loss.detach()
                    self.sums[name] = self.sums[name] + share if name in self.sums else share
                    y = _Attached.apply(y, loss, factor * self._gradient)
                if x.requires_grad:  # recomputing the block sets them again: drop them at the end of its backward pass
                    x.register_hook(partial(_forget, part))
        return y


def check_declared(module: nn.Module, declared: Iterable[str]) -> None:
    """Check that a part's torch class sets only auxiliary losses that its config class declares.

    Raises:
        ConfigError: the torch class lists a loss in `auxiliary_losses` that is not in `declared`.
    """
    if missing := set(getattr(type(module), ATTRIBUTE, ())) - set(declared):
        raise ConfigError(undeclared(type(module).__name__, missing))


def undeclared(module: str, names: Iterable[str]) -> Problem:
    """Return the problem that the torch class `module` sets the losses `names` without a declaration in its config."""
    text = f"sets the auxiliary loss {', '.join(sorted(names))}, which its config class does not declare."
    remedy = (
        'Add `auxiliary_losses: ClassVar = {"NAME": "mean"}` (or "sum") to the config class (docs/howto/extend.md).'
    )
    return Problem(module, f"{text} {remedy}")


def _forget(part: nn.Module, gradient: Tensor) -> None:
    part.__dict__.pop(ATTRIBUTE, None)


class _Attached(torch.autograd.Function):
    """Identity of an activation; the backward pass gives the loss a constant gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, gradient: float) -> Tensor:
        ctx.gradient, ctx.dtype, ctx.device = gradient, loss.dtype, loss.device
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, torch.full((), ctx.gradient, dtype=ctx.dtype, device=ctx.device), None
