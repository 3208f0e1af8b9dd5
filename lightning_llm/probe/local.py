"""Each layer by itself: its three products from the same X, W and dY, with one slot quantised, or all."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.precision.linear.autograd import quantised_linear
from lightning_llm.precision.linear.module import HIGH_CASTS
from lightning_llm.precision.linear.plan import SLOT_NAMES, LinearPlan
from lightning_llm.precision.recipe.ablation import only_slot
from lightning_llm.probe.comparison import Sums, compare
from lightning_llm.probe.model import ProbedModel

PRODUCTS = {"fprop": "Y", "dgrad": "dX", "wgrad": "dW"}
COLUMNS = (*SLOT_NAMES, *PRODUCTS.values())
"""Six slots, each judged by the product it goes into, and the three products with every slot as the recipe has it."""


def local_sums(model: ProbedModel, keys: int) -> dict[str, dict[str, Sums]]:
    """Return by layer and column how far its products lie from those of unquantised operands, over `keys` keys.

    Products are kept in fp32, so that nothing but the operands' casts is seen. Slots that are not quantised, and the
    products of two such, are left out. `model.high()` must have run.
    """
    recipes = {slot: only_slot(model.recipe, slot) for slot in SLOT_NAMES}
    found: dict[str, dict[str, Sums]] = {}
    for name, layer in model.layers.items():
        kept = model.tensors[name]
        if kept.x is None or kept.dy is None:
            continue
        operands = kept.x.float(), layer.weight.detach().to(kept.x.dtype).float(), kept.dy.float()
        plan = replace(layer.plan, observe=None)
        whole = model.recipe.casts_under(plan.rule)
        exact = _products(plan, HIGH_CASTS, operands, None, None)
        columns: dict[str, Sums] = {}
        for slot, recipe in [*recipes.items(), ("", model.recipe)]:
            if slot and not whole[slot].quantises:
                continue
            casts = recipe.casts_under(plan.rule)
            used = replace(plan, casts=casts)
            count = keys if used.random else 1
            samples = [_products(plan, casts, operands, model.keys_for(name, k), layer.scale) for k in range(count)]
            wanted = [PRODUCTS[slot.split(".")[0]]] if slot else list(PRODUCTS.values())
            for product in wanted:
                gemm = next(g for g, p in PRODUCTS.items() if p == product)
                if slot or any(whole[s].quantises for s in SLOT_NAMES if s.startswith(gemm)):
                    columns[slot or product] = compare(exact[product], [sample[product] for sample in samples])
        found[name] = columns
    return found


def _products(
    plan: LinearPlan,
    casts: Mapping[str, CastConfig],
    operands: tuple[Tensor, Tensor, Tensor],
    keys: Tensor | None,
    scales: Tensor | None,
) -> dict[str, Tensor]:
    """Return Y [M, N], dX [M, K] and dW [N, K], fp32."""
    x, w, dy = operands[0].requires_grad_(), operands[1].requires_grad_(), operands[2]
    with torch.enable_grad():
        y = quantised_linear(x, w, None, replace(plan, casts=casts), keys, scales)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    return {"Y": y.detach(), "dX": dx, "dW": dw}
