"""Everything that is measured of one recipe on one checkpoint, as plain data."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import reduce
from operator import add
from statistics import fmean
from typing import Any

from torch import Tensor

from lightning_llm.precision.linear.plan import SLOT_NAMES
from lightning_llm.probe.attribution import TARGET, gradient_error, layers_to_keep, slot_shares
from lightning_llm.probe.comparison import Collector, Sums, figures
from lightning_llm.probe.local import local_sums
from lightning_llm.probe.model import Pass, ProbedModel

END_TO_END = "dW end to end"


def measure(
    model: ProbedModel,
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
        "compute_dtype": model.recipe.compute_dtype,
        "quantised_slots": model.quantised_slots,
        "quantised_layers": len(model.layers),
        "keys": count,
        "loss": {"fp32": reference.loss, "high": high.loss, "recipe": fmean(losses), "gap": fmean(losses) - high.loss},
        "gradient": {**figures(reduce(add, sums.values())), "error": error, "error_high": floor, "gap": error - floor},
        "layers": {name: _layer(columns, sums[f"{name}.weight"]) for name, columns in local.items()},
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
