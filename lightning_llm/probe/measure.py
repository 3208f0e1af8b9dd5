"""Measure the error that a recipe adds to gradients: of the whole model, of each layer alone, and of each slot.

The error of a pass is |g' - g|^2 / |g|^2 over every parameter of the model, with g the gradient of an fp32 pass over
the same weights and batches. The floor is the error of a pass without any cast (bf16, or the recipe's own compute
dtype), which does not depend on the casts. The gap of a recipe is its error minus the floor. It is attributed to slots
(operands of matrix products) and layers by switching the casts of others off.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from operator import add
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from lightning_llm.config.schema.precision import UNQUANTIZED, CastConfig, PrecisionConfig, slots_of
from lightning_llm.precision.linear.autograd import quantized_linear
from lightning_llm.precision.linear.module import UNQUANTIZED_CASTS
from lightning_llm.precision.linear.plan import SLOT_NAMES, LinearPlan
from lightning_llm.precision.lint import still_broken
from lightning_llm.probe.figures import Collector, Sums, compare, figures
from lightning_llm.probe.passes import Pass, Passes

PRODUCTS = {"fprop": "Y", "dgrad": "dX", "wgrad": "dW"}
COLUMNS = (*SLOT_NAMES, *PRODUCTS.values())
"""Columns of a layer's figures: six slots, each measured by the error of its product with only that slot quantized, and
the three products with all slots as in the recipe."""
END_TO_END = "dW end to end"
TARGET = 0.8
MEASURABLE = 0.2
"""Smallest gap that is attributed, as a share of the floor; rounding in bf16 alone changes errors by as much."""


def measure(
    model: Passes,
    reference: Pass,
    delayed: Mapping[str, Mapping[str, Tensor]] | None,
    keys: int,
    attribute: bool,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Return the figures of `model`'s recipe, its entry in `probe.json`: "loss", "gradient", "layers" and others.

    Args:
        reference: the fp32 pass.
        delayed: delayed scales of the checkpoint, {layer: {"scale", "amax_history"}}; None: from the first pass.
        keys: number of draws of random bits to compare; recipes without random bits need one.
        attribute: also measure "slots" and "keep_high", which takes many more passes.
        progress: called with a line about the current pass.
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
        made = model.quantized(key)
        losses.append(made.loss)
        errors.append(gradient_error(made, reference))
        for name, gradient in made.gradients.items():
            whole[name].add(gradient)
    sums = {name: collector.sums() for name, collector in whole.items()}
    error, floor = fmean(errors), gradient_error(high, reference)
    found: dict[str, Any] = {
        "recipe_hash": model.recipe.recipe_hash,
        "compute_dtype": model.compute_dtype,
        "quantised_slots": model.quantized_slots,
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
    """Return the `count` pairs (layer, slot) with the lowest SQNR (signal over quantization noise), lowest first."""
    ranked = [
        (its["sqnr_db"], layer, column)
        for layer, columns in layers.items()
        for column, its in columns.items()
        if column in SLOT_NAMES and "sqnr_db" in its
    ]
    return [(layer, column) for _, layer, column in sorted(ranked)[:count]]


def local_sums(model: Passes, keys: int) -> dict[str, dict[str, Sums]]:
    """Return {layer: {column: `Sums` of its product's errors}} of each layer by itself, over `keys` random keys.

    Products are computed in fp32 from the operands of the unquantized pass, so errors come from the casts only. Slots
    that are not quantized, and products of two such slots, are left out. `model.high()` must have run.
    """
    recipes = {slot: only_slot(model.recipe, slot) for slot in SLOT_NAMES}
    found: dict[str, dict[str, Sums]] = {}
    for name, layer in model.layers.items():
        kept = model.tensors[name]
        if kept.x is None or kept.dy is None:
            continue
        operands = kept.x.float(), model.matrix(name).to(kept.x.dtype).float(), kept.dy.float()
        plan = replace(layer.plan, observe=None)
        whole = model.recipe.casts_under(plan.rule)
        exact = _products(plan, UNQUANTIZED_CASTS, operands, None, None)
        columns: dict[str, Sums] = {}
        for slot, recipe in [*recipes.items(), ("", model.recipe)]:
            if slot and not whole[slot].quantizes:
                continue
            casts = recipe.casts_under(plan.rule)
            used = replace(plan, casts=casts)
            count = keys if used.random else 1
            samples = [_products(plan, casts, operands, model.keys_for(name, k), layer.scale) for k in range(count)]
            wanted = [PRODUCTS[slot.split(".")[0]]] if slot else list(PRODUCTS.values())
            for product in wanted:
                gemm = next(g for g, p in PRODUCTS.items() if p == product)
                if slot or any(whole[s].quantizes for s in SLOT_NAMES if s.startswith(gemm)):
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
        y = quantized_linear(x, w, None, replace(plan, casts=casts), keys, scales)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    return {"Y": y.detach(), "dX": dx, "dW": dw}


def gradient_error(made: Pass, reference: Pass) -> float:
    """Return the error of a pass, |g' - g|^2 / |g|^2 over all parameters, with g the gradients of `reference`."""
    difference = sum(_square(made.gradients[name] - each) for name, each in reference.gradients.items())
    return difference / sum(_square(each) for each in reference.gradients.values())


def _square(tensor: Tensor) -> float:
    flat = tensor.flatten().double()
    return torch.dot(flat, flat).item()


@dataclass(frozen=True)
class SlotShare:
    """The part of a recipe's gap that is due to one slot. The shares of six slots need not sum to 1.

    `error_only`, `share_only`: with only this slot quantized; `error_without`, `share_without`: with all others
    quantized, as the part that is then missing. Shares are None if the gap is too small. `loss_gap_only`: nats.
    """

    error_only: float
    error_without: float
    share_only: float | None
    share_without: float | None
    loss_gap_only: float


def slot_shares(model: Passes, reference: Pass, high: Pass, whole: float, floor: float) -> dict[str, SlotShare]:
    """Return {slot: its share of the gap} of every quantized slot; it takes two passes per slot.

    The gap is `whole`, the recipe's error, minus `floor`, the error of the unquantized pass `high`. One random key is
    enough: an error is a sum over millions of elements, so it hardly depends on the key.
    """
    found = {}
    gap = whole - floor
    for slot in model.quantized_slots:
        alone = model.quantized(0, only_slot(model.recipe, slot))
        only = gradient_error(alone, reference)
        without = gradient_error(model.quantized(0, all_but_slot(model.recipe, slot)), reference)
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
    """The layers to keep unquantized, the one with the largest contribution first.

    `won_back`: the share of the gap that this removes, measured with random keys that did not choose the layers; None
    if the gap is too small. `contributions`: {layer: gap with that layer alone quantized}; `error_after`: the error
    with these layers unquantized, None if not measured.
    """

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
    """Return the fewest layers that remove the share `TARGET` of the gap if they stay unquantized.

    Layers are taken in order of their contribution, the gap with that layer alone quantized. Their number is found by
    bisection over measured errors, and the result is measured again with random keys that did not choose the layers.
    `whole`: the recipe's error; `floor`: that of the unquantized pass; `keys`: random keys of the last measurement.
    """
    names, gap = list(model.layers), whole - floor
    contributions = {}
    for index, name in enumerate(names):
        progress(f"layer {index + 1} of {len(names)}")
        others = frozenset(each for each in names if each != name)
        contributions[name] = gradient_error(model.quantized(0, kept=others), reference) - floor
    ordered = sorted(names, key=lambda name: -contributions[name])
    contributions = {name: contributions[name] for name in ordered}
    if not gap > MEASURABLE * floor:  # nor where the recipe's gradient is not finite
        return UnquantizedLayers([], None, contributions, None)

    def won_back(count: int, trial: Sequence[int]) -> float:
        kept = frozenset(ordered[:count])
        return 1 - (fmean(gradient_error(model.quantized(k, kept=kept), reference) for k in trial) - floor) / gap

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
        if made[forward] == UNQUANTIZED:  # which now leaves the tensor as it is
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
