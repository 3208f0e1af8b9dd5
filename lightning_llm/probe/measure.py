"""Measurements of one recipe on one checkpoint: the whole gradient, each layer by itself, and the shares of slots.

The error of a pass is |g' - g|^2 / |g|^2 over every parameter of the model, g the gradient of an fp32 pass over the
same weights and batches. The gap of a recipe is its error less that of the same pass without any cast (bf16, or the
recipe's own compute dtype): that part does not depend on the casts. The gap is attributed to slots and layers by
switching others off.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from operator import add
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from lightning_llm.config.schema.precision import HIGH, CastConfig, PrecisionConfig, slots_of
from lightning_llm.precision.linear.autograd import quantised_linear
from lightning_llm.precision.linear.module import HIGH_CASTS
from lightning_llm.precision.linear.plan import SLOT_NAMES, LinearPlan
from lightning_llm.precision.recipe.lint import still_broken
from lightning_llm.probe.comparison import Collector, Sums, compare, figures
from lightning_llm.probe.passes import Pass, Passes

PRODUCTS = {"fprop": "Y", "dgrad": "dX", "wgrad": "dW"}
COLUMNS = (*SLOT_NAMES, *PRODUCTS.values())
"""Six slots, each judged by the product it goes into, and the three products with every slot as the recipe has it."""
END_TO_END = "dW end to end"
TARGET = 0.8
MEASURABLE = 0.2
"""A gap below this share of the floor is within what roundings of bf16 alone move."""


def measure(
    model: Passes,
    reference: Pass,
    delayed: Mapping[str, Mapping[str, Tensor]] | None,
    keys: int,
    attribute: bool,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Return the figures of `model`'s recipe: `loss`, `gradient`, `layers`, and with `attribute` `slots`, `keep_high`.

    `reference`: the fp32 pass. `delayed`: scales that the checkpoint holds, where it was trained by this recipe.
    `keys`: how many draws of random numbers are compared; a recipe without any takes one.
    """
    progress("high-precision pass")
    high = model.high()
    model.calibrate(delayed)
    count = keys if model.random else 1
    progress("each layer by itself, after the casts that it is the first to use are compiled")
    local = local_sums(model, count)
    whole = {name: Collector(each) for name, each in reference.gradients.items()}
    errors, losses = [], []
    for key in range(count):
        progress(f"the whole model, key {key + 1} of {count}")
        made = model.quantised(key)
        losses.append(made.loss)
        errors.append(gradient_error(made, reference))
        for name, gradient in made.gradients.items():
            whole[name].add(gradient)
    sums = {name: collector.sums() for name, collector in whole.items()}
    error, floor = fmean(errors), gradient_error(high, reference)
    found: dict[str, Any] = {
        "recipe_hash": model.recipe.recipe_hash,
        "compute_dtype": model.compute_dtype,
        "quantised_slots": model.quantised_slots,
        "quantised_layers": len(model.layers),
        "keys": count,
        "loss": {"fp32": reference.loss, "high": high.loss, "recipe": fmean(losses), "gap": fmean(losses) - high.loss},
        "gradient": {**figures(reduce(add, sums.values())), "error": error, "error_high": floor, "gap": error - floor},
        "layers": {name: _layer(columns, sums[model.weight_names[name]]) for name, columns in local.items()},
    }
    if attribute:
        progress("one slot at a time")
        shares = slot_shares(model, reference, high, error, floor)
        found["slots"] = {slot: asdict(share) for slot, share in shares.items()}
        kept = layers_to_keep(model, reference, error, floor, min(count, 2), progress)
        parameters = {name: layer.weight.numel() for name, layer in model.layers.items()}
        share = sum(parameters[name] for name in kept.layers) / sum(parameters.values())
        found["keep_high"] = {"target": TARGET, **asdict(kept), "parameter_share": share}
    return found


def _layer(columns: Mapping[str, Sums], weight: Sums) -> dict[str, Any]:
    made = {name: figures(sums) for name, sums in columns.items()}
    return {**made, END_TO_END: figures(weight)}


def worst(layers: Mapping[str, Mapping[str, Mapping[str, float]]], count: int) -> list[tuple[str, str]]:
    """Return the `count` (layer, slot) with the lowest SQNR, lowest first."""
    ranked = [
        (its["sqnr_db"], layer, column)
        for layer, columns in layers.items()
        for column, its in columns.items()
        if column in SLOT_NAMES and "sqnr_db" in its
    ]
    return [(layer, column) for _, layer, column in sorted(ranked)[:count]]


def local_sums(model: Passes, keys: int) -> dict[str, dict[str, Sums]]:
    """Return {layer: {column: errors of its products against unquantized operands}}, summed over `keys` keys.

    Products are kept in fp32, so that nothing but the operands' casts is seen. Slots that are not quantized, and the
    products of two such, are left out. `model.high()` must have run.
    """
    recipes = {slot: only_slot(model.recipe, slot) for slot in SLOT_NAMES}
    found: dict[str, dict[str, Sums]] = {}
    for name, layer in model.layers.items():
        kept = model.tensors[name]
        if kept.x is None or kept.dy is None:
            continue
        operands = kept.x.float(), layer.matrix.detach().to(kept.x.dtype).float(), kept.dy.float()
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


def gradient_error(made: Pass, reference: Pass) -> float:
    """Return |g' - g|^2 / |g|^2 over all parameters."""
    difference = sum(_square(made.gradients[name] - each) for name, each in reference.gradients.items())
    return difference / sum(_square(each) for each in reference.gradients.values())


def _square(tensor: Tensor) -> float:
    flat = tensor.flatten().double()
    return torch.dot(flat, flat).item()


@dataclass(frozen=True)
class SlotShare:
    """Shares of the gap of one slot alone and of all other slots. Those of six slots need not sum to 1."""

    error_only: float
    error_without: float
    share_only: float | None
    share_without: float | None
    loss_gap_only: float


def slot_shares(model: Passes, reference: Pass, high: Pass, whole: float, floor: float) -> dict[str, SlotShare]:
    """Return every quantised slot's share of the gap, `whole` - `floor`; two passes each, under one key.

    An error is a sum over millions of elements, so that another key moves it by little.
    """
    found = {}
    gap = whole - floor
    for slot in model.quantised_slots:
        alone = model.quantised(0, only_slot(model.recipe, slot))
        only = gradient_error(alone, reference)
        without = gradient_error(model.quantised(0, all_but_slot(model.recipe, slot)), reference)
        measurable = gap > MEASURABLE * floor
        found[slot] = SlotShare(
            only,
            without,
            (only - floor) / gap if measurable else None,
            1 - (without - floor) / gap if measurable else None,
            alone.loss - high.loss,
        )
    return found


@dataclass(frozen=True)
class UnquantizedLayers:
    """The layers to keep high, most harmful first; `won_back`: the share of the gap, measured with other keys."""

    layers: list[str]
    won_back: float | None
    contributions: dict[str, float]
    error_after: float | None


def layers_to_keep(
    model: Passes,
    reference: Pass,
    whole: float,
    floor: float,
    keys: int,
    progress: Callable[[str], None] = lambda text: None,
) -> UnquantizedLayers:
    """Return the fewest layers, by falling contribution, that win back `TARGET` of the gap if unquantized.

    A layer's contribution is the gap with that layer alone quantised. The number is found by bisection over errors
    measured with those layers high, and the result is measured once more with keys that chose nothing.
    """
    names, gap = list(model.layers), whole - floor
    contributions = {}
    for index, name in enumerate(names):
        progress(f"layer {index + 1} of {len(names)}")
        others = frozenset(each for each in names if each != name)
        contributions[name] = gradient_error(model.quantised(0, kept=others), reference) - floor
    ordered = sorted(names, key=lambda name: -contributions[name])
    contributions = {name: contributions[name] for name in ordered}
    if not gap > MEASURABLE * floor:  # nor where the recipe's gradient is not finite
        return UnquantizedLayers([], None, contributions, None)

    def won_back(count: int, trial: Sequence[int]) -> float:
        kept = frozenset(ordered[:count])
        return 1 - (fmean(gradient_error(model.quantised(k, kept=kept), reference) for k in trial) - floor) / gap

    low, high = 0, len(ordered)  # with none kept nothing is won back, with all kept everything
    while high - low > 1:
        middle = (low + high) // 2
        progress(f"keeping {middle} of {len(names)} layers high")
        if won_back(middle, [0]) >= TARGET:
            high = middle
        else:
            low = middle
    fresh = range(1000, 1000 + (keys if model.random else 1))
    while (measured := won_back(high, fresh)) < TARGET and high < len(ordered):
        high += 1
    return UnquantizedLayers(ordered[:high], measured, contributions, floor + (1 - measured) * gap)


def without_rounding(cast: CastConfig) -> CastConfig:
    """Return `cast` with its rounding taken out: a rotation stays, since the other operand's must cancel with it."""
    return CastConfig(source=cast.source, hadamard=cast.hadamard)


def only_slot(recipe: PrecisionConfig, slot: str) -> PrecisionConfig:
    """Return the recipe in which `slot` ("wgrad.dy") alone is quantised, named "<recipe>_only_<slot>"."""
    return _without(recipe, set(slots_of(recipe)) - {slot}, f"{recipe.name}_only_{slot.replace('.', '_')}")


def all_but_slot(recipe: PrecisionConfig, slot: str) -> PrecisionConfig:
    """Return the recipe in which every slot but `slot` is quantised, named "<recipe>_without_<slot>"."""
    return _without(recipe, {slot}, f"{recipe.name}_without_{slot.replace('.', '_')}")


def _without(recipe: PrecisionConfig, slots: set[str], name: str) -> PrecisionConfig:
    """Return the recipe, less its phases, with the rounding taken out of `slots` in every layer."""
    values = recipe.model_dump(exclude={"fprop", "dgrad", "wgrad", "phases"}) | {"name": name}
    values |= _nested(_unrounded(slots_of(recipe), slots))
    for number, rule in enumerate(recipe.modules.casts or ()):
        if not rule.high:
            its = _nested(_unrounded(recipe.casts_under(number), slots))
            values["modules"]["casts"][number].update(its, recipe=None)
    made = PrecisionConfig.model_validate({**values, "allow": None})
    return PrecisionConfig.model_validate({**values, "allow": still_broken(made, recipe.allow or ())})


def _unrounded(casts: Mapping[str, CastConfig], slots: set[str]) -> dict[str, CastConfig]:
    made = {slot: without_rounding(cast) if slot in slots else cast for slot, cast in casts.items()}
    for slot, forward in (("dgrad.w", "fprop.w"), ("wgrad.x", "fprop.x")):
        if made[forward] == HIGH:  # which now leaves the tensor as it is
            made[slot] = made[slot].model_copy(update={"source": "high_precision"})
    return made


def _nested(casts: Mapping[str, CastConfig]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for slot, cast in casts.items():
        gemm, operand = slot.split(".")
        values.setdefault(gemm, {})[operand] = cast.model_dump()
    return values


def as_yaml_values(recipe: PrecisionConfig) -> dict[str, object]:
    """Return the contents of the recipe's YAML file: keys that differ from their defaults, in the schema's order."""
    return recipe.model_dump(mode="json", exclude_defaults=True)
