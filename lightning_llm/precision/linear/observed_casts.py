"""The casts of a product that something else makes, made once more for whoever observes them."""

import torch
from torch import Tensor

from lightning_llm.precision.linear.call import LinearCall
from lightning_llm.precision.linear.plan import LinearPlan


def observe_casts(
    x: Tensor, weight: Tensor, y: Tensor, plan: LinearPlan, keys: Tensor | None, scales: Tensor | None
) -> None:
    """Tell `plan.observe` of the casts of y = x W^T where something else makes them: they are made here too, for it.

    `x` [M, K] is in the dtype that is quantised, `weight` [N, K] in its own, and `y` [..., N] gives its gradient by a
    hook. Nothing is multiplied and no tensor or generator changed. Operands have source high_precision: whatever
    runs natively does.
    """
    call, needs_dx, needs_dw = LinearCall(plan, keys, scales), x.requires_grad, weight.requires_grad
    outputs, dtype = weight.shape[0], x.dtype  # and neither tensor, which a checkpointed block is to let go

    @torch.no_grad()
    def look(dy: Tensor) -> None:
        dy = dy.reshape(-1, outputs).to(dtype).contiguous()
        if needs_dx:
            call.operand(dy, "dgrad.dy", 1)
        if needs_dw:
            call.operand(dy, "wgrad.dy", 0)

    with torch.no_grad():
        w = weight.to(dtype)
        call.operand(x, "fprop.x", 1)
        call.operand(w, "fprop.w", 1)
        if not y.requires_grad:
            return
        if needs_dx:
            call.operand(w, "dgrad.w", 0)
        if needs_dw:
            call.operand(x, "wgrad.x", 0)
    y.register_hook(look)
