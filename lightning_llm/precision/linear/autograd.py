"""The quantised linear layer: one autograd function, three GEMMs, six casts (see `config.schema.precision`).

Every operand is quantised from the high-precision tensor along its own GEMM's contraction axis, in the layout it is
stored in. Nothing quantised is kept between forward and backward: casts are functions of (tensor, scale, key), so the
backward pass makes them again, which is cheaper than the memory. Those of a weight may be kept from one micro-batch to
the next (`weight_casts`). Random bits come from a tensor of keys, no counter.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_llm.precision.cast.hadamard import rotate
from lightning_llm.precision.cast.operand import Operand
from lightning_llm.precision.linear.call import LinearCall
from lightning_llm.precision.linear.gemm import multiply
from lightning_llm.precision.linear.plan import LinearPlan

Record = Callable[[str, Tensor], None]


@dataclass
class _Forward:
    """fprop's quantised operands, made again in the backward pass where a slot or a gradient needs them."""

    call: LinearCall
    dtype: torch.dtype
    tensors: Mapping[str, Callable[[], Tensor]]
    made: dict[str, Operand] = field(default_factory=dict)

    def operand(self, role: str) -> Operand:
        """Return fprop's operand of `role` (x or w)."""
        if role not in self.made:
            self.made[role] = self.call.operand(self.tensors[role], f"fprop.{role}", 1)
        return self.made[role]

    def source(self, slot: str, role: str) -> Tensor:
        """Return what `slot` quantises: the high-precision tensor, or its quantised form in the same dtype."""
        if self.call.plan.casts[slot].source == "high_precision":
            return self.tensors[role]()
        return self.operand(role).dequantised().to(self.dtype)

    def through(self, gradient: Tensor, role: str) -> Tensor:
        """Take a gradient with respect to fprop's quantised, rotated `role` back to the tensor: mask, then S^T."""
        cast = self.call.plan.casts[f"fprop.{role}"]
        inside = self.operand(role).inside if cast.clip_gradient else None
        if inside is not None:
            gradient = gradient * inside.to(gradient.dtype)
        s = self.call.matrix(f"fprop.{role}", gradient.device)
        return gradient if s is None else rotate(gradient, s.T, 1, gradient.dtype)


def _in_dtype(weight: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return what gives `weight` in `dtype`, in which it is quantised, and casts it once."""
    return functools.cache(lambda: weight.to(dtype))


def forward(call: LinearCall, x: Tensor, weight: Tensor, bias: Tensor | None, record: Record | None) -> Tensor:
    """Return Y [M, N] = X W^T + b in the dtype of X [M, K], by the first two of six casts. W [N, K], b [N] or None."""
    call, w = call._replace(rotations={}), _in_dtype(weight, x.dtype)
    if record is not None:
        record("x", x)
        record("w", weight if call.knows_amax else w())
    operands = call.operand(x, "fprop.x", 1), call.operand(w, "fprop.w", 1)
    return multiply(operands[0], operands[1].flipped, x.dtype, call.plan.backend, bias)


class Wanted(NamedTuple):
    """Which gradients a backward pass is to make: those of X and of W, and of b in which dtype, None for none."""

    dx: bool
    dw: bool
    dbias: torch.dtype | None


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def backward(
    call: LinearCall, dy: Tensor, x: Tensor, weight: Tensor, wanted: Wanted, record: Record | None
) -> Gradients:
    """Return the gradients of X, W and b, in their dtypes, from `dy` [M, N], by the other four of six casts."""
    call, plan = call._replace(rotations={}), call.plan
    dy = dy.to(x.dtype).contiguous()
    if record is not None:
        record("dy", dy)
    made = _Forward(call.unobserved(), x.dtype, {"x": lambda: x, "w": _in_dtype(weight, x.dtype)})
    dx = dw = dbias = None
    of_dy = call.operands_of(dy)
    if wanted.dx:
        w = partial(made.source, "dgrad.w", "w")
        dx = multiply(of_dy("dgrad.dy", 1), call.operand(w, "dgrad.w", 0), x.dtype, plan.backend)
        # A GEMM over fprop's quantised weight gives a gradient in the domain fprop rotated both operands into.
        if plan.casts["dgrad.w"].source == "quantised":
            dx = made.through(dx, "x")
    if wanted.dw:
        source = made.source("wgrad.x", "x")
        left, right = of_dy("wgrad.dy", 0).flipped, call.operand(source, "wgrad.x", 0)
        dw = multiply(left, right, plan.wgrad_dtype or x.dtype, plan.backend)
        if plan.casts["wgrad.x"].source == "quantised":
            dw = made.through(dw, "w")
        dw = dw.to(weight.dtype)
    if wanted.dbias is not None:
        dbias = dy.sum(0, dtype=torch.float32).to(wanted.dbias)
    return dx, dw, dbias


class _QuantisedLinear(torch.autograd.Function):
    """`forward` and `backward` of one call. X [M, K], W [N, K], b [N] or None."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        keys: Tensor | None,
        scales: Tensor | None,
        plan: LinearPlan,
        record: Record | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, keys, scales)
        ctx.plan, ctx.record, ctx.bias_dtype = plan, record, None if bias is None else bias.dtype
        return forward(LinearCall(plan, keys, scales), x, weight, bias, record)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, keys, scales = ctx.saved_tensors
        wanted = Wanted(ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.bias_dtype)
        gradients = backward(LinearCall(ctx.plan, keys, scales), dy, x, weight, wanted, ctx.record)
        return *gradients, None, None, None, None


def quantised_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: LinearPlan,
    keys: Tensor | None = None,
    scales: Tensor | None = None,
    record: Record | None = None,
) -> Tensor:
    """Return x W^T + b, [..., N] in the dtype of `x` [..., K], through `plan`'s six casts, forward and backward.

    Operator by operator: in a compiled block `linear_operator` stands for it.

    `keys`: int64 [KEY_COUNT], needed where a cast is stochastic or a rotation's signs are random. `scales`: fp32
    [len(ROLES)], needed for delayed scaling; `record(role, tensor)` is told what its amax is taken from. Raises
    ValueError where one is missing or a block or rotation does not fit.
    """
    flat = x.reshape(-1, x.shape[-1])  # [M, K]
    y = _QuantisedLinear.apply(flat, weight, bias, keys, scales, plan, record)  # [M, N]
    return y.reshape(*x.shape[:-1], weight.shape[0])
