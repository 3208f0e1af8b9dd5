"""The probe's report: a table for a terminal, a picture, and recipes to train with."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_llm.config.schema import PrecisionConfig
from lightning_llm.precision.linear.plan import SLOT_NAMES
from lightning_llm.precision.module_rules import without_idle_rules
from lightning_llm.precision.outliers import TITLE, outlier_rows
from lightning_llm.probe.measure import COLUMNS, END_TO_END, PRODUCTS, as_yaml_values, only_slot, worst

WORST_ROWS = 10
LAYERS_SHOWN = 12


def render(facts: Mapping[str, Any]) -> str:
    """Return the report of a probe as text: each recipe, and a ranking if there are several.

    `facts`: content of `probe.json`.
    """
    data = facts["data"]
    lines = [
        f"probe      {facts['path']}",
        f"           {facts['model']}, {facts['parameters']:,} parameters; {data['batches']} batches, "
        f"{data['tokens']:,} tokens ({data['from']}); {facts['device']}",
    ]
    for name, its in facts["recipes"].items():
        lines += ["", *recipe_lines(name, its)]
    if "outliers" in facts:
        lines += ["", TITLE, *_indented(_aligned(outlier_rows(facts["outliers"], WORST_ROWS), left=2))]
    if len(facts["recipes"]) > 1:
        lines += ["", *ranking_lines(facts)]
    lines += [f"not probed {name}: {reason}" for name, reason in facts["skipped"].items()]
    return "\n".join(lines)


def recipe_lines(name: str, its: Mapping[str, Any]) -> list[str]:
    """Return the lines of the report on one recipe; `its`: its entry in `probe.json`."""
    loss, gradient, high = its["loss"], its["gradient"], its["compute_dtype"]
    lines = [
        f"{name} ({its['recipe_hash']}), {its['quantised_layers']} linear layers, {its['keys']} "
        f"key{'s' if its['keys'] > 1 else ''}",
        f"  loss     fp32 {loss['fp32']:.5f}, {high} {loss['high']:.5f}, recipe {loss['recipe']:.5f}: "
        f"gap {loss['gap']:+.5f} nats",
        f"  gradient error {gradient['error']:.3g} of |g|^2 ({high} alone {gradient['error_high']:.3g}), "
        f"SQNR {_db(gradient)} dB, cosine {gradient.get('cosine', math.nan):.5f}, {_bias(gradient)}, "
        f"variance {gradient.get('variance', math.nan):.3g}",
    ]
    lines += ["  worst slots, each layer by itself", *_indented(_worst_table(its["layers"]))]
    if "slots" in its:
        lines += ["  slots, share of the error above that (they need not sum to 100 %)"]
        lines += _indented(_slot_table(its["slots"]))
        lines += _keep_lines(its)
    return lines


def _worst_table(layers: Mapping[str, Any]) -> list[str]:
    rows = [["layer", "slot", "product", "SQNR dB", "cosine", "bias", "variance", "gain"]]
    for layer, slot in worst(layers, WORST_ROWS):
        its = layers[layer][slot]
        product = PRODUCTS[slot.split(".")[0]]
        rows.append(
            [layer, slot, product, _db(its), f"{its['cosine']:.5f}", _bias(its).removeprefix("bias "),
             f"{its['variance']:.3g}", f"{its['gain']:+.4f}"]
        )  # fmt: skip
    return _aligned(rows, left=3)


def _slot_table(slots: Mapping[str, Any]) -> list[str]:
    rows = [["slot", "alone", "without it", "loss gap alone"]]
    for slot, its in slots.items():
        rows.append([slot, _percent(its["share_only"]), _percent(its["share_without"]), f"{its['loss_gap_only']:+.5f}"])
    return _aligned(rows, left=1)


def _keep_lines(its: Mapping[str, Any]) -> list[str]:
    kept, high = its["keep_high"], its["compute_dtype"]
    if not math.isfinite(its["gradient"]["error"]):
        return ["  keep     not known: the recipe's gradient is not finite"]
    if kept["won_back"] is None:
        return [f"  keep     nothing: the gradient's error is within what {high} itself makes"]
    count, target = len(kept["layers"]), 100 * kept["target"]
    lines = [
        f"  keep     {count} of {its['quantised_layers']} layers in {high} ({100 * kept['parameter_share']:.0f} % of "
        f"their parameters) to win back {target:.0f} % of the error above {high}'s; measured: "
        f"{100 * kept['won_back']:.0f} %"
    ]
    gap = its["gradient"]["gap"]
    for layer in kept["layers"][:LAYERS_SHOWN]:
        lines.append(f"           {layer}  alone {100 * kept['contributions'][layer] / gap:.1f} %")
    if count > LAYERS_SHOWN:
        lines.append(f"           ... and {count - LAYERS_SHOWN} more (probe.json)")
    return lines


def ranking(recipes: Mapping[str, Any]) -> list[str]:
    """Return the names of the recipes, ordered by the error of the whole gradient, lowest first."""
    errors = {name: its["gradient"]["error"] for name, its in recipes.items()}
    return sorted(errors, key=lambda name: (not math.isfinite(errors[name]), errors[name]))


def ranking_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table that compares several recipes, the one with the least error first."""
    rows = [["recipe", "gradient error", "cosine", "bias", "variance", "loss gap", "worst slot"]]
    for name in facts["ranking"]:
        its = facts["recipes"][name]
        gradient, found = its["gradient"], worst(its["layers"], 1)
        cosine, variance = (gradient.get(key, math.nan) for key in ("cosine", "variance"))
        measured = [
            f"{gradient['error']:.3g}",
            f"{cosine:.5f}",
            _bias(gradient).removeprefix("bias "),
            f"{variance:.3g}",
        ]
        rows.append([name, *measured, f"{its['loss']['gap']:+.5f}", " ".join(found[0]) if found else "-"])
    return ["ranking, by the error of the whole gradient", *_indented(_aligned(rows, left=1))]


def _db(its: Mapping[str, float]) -> str:
    return f"{its['sqnr_db']:.1f}" if "sqnr_db" in its else "-"


def _bias(its: Mapping[str, float]) -> str:
    """Return the bias, or its upper bound if it cannot be distinguished from none."""
    if "bias" not in its:
        return "bias -"
    return f"bias <{its['bias_floor']:.2g}" if its["bias"] < its["bias_floor"] else f"bias {its['bias']:.2g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_cell(*each, left) for each in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]


def _cell(index: int, sized: tuple[str, int], left: int) -> str:
    cell, width = sized
    return cell.ljust(width) if index < left else cell.rjust(width)


def as_json(value: Any) -> Any:
    """Return nested data with NaN and infinities as the strings "nan", "inf" and "-inf", because JSON has none."""
    if isinstance(value, Mapping):
        return {key: as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def draw(name: str, its: Mapping[str, Any], path: Path) -> None:
    """Draw a map of layers and slots, colored by SQNR in dB, as a PNG at `path`; nothing if no number is finite."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not pyplot: it keeps global state
    from matplotlib.figure import Figure

    layers = its["layers"]
    columns = [c for c in (*COLUMNS, END_TO_END) if any("sqnr_db" in each.get(c, {}) for each in layers.values())]
    if not columns:
        return  # nothing was finite
    values = np.array([[each.get(c, {}).get("sqnr_db", np.nan) for c in columns] for each in layers.values()])
    figure = Figure(figsize=(2.5 + 0.75 * len(columns), 1.6 + 0.22 * len(layers)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(title=f"{name}: SQNR of each layer's products, dB (higher is better)")
    image = axes.imshow(values, aspect="auto", cmap="viridis")
    axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right")
    axes.set_yticks(range(len(layers)), layers, fontsize=7)
    middle = (np.nanmax(values) + np.nanmin(values)) / 2
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            colour = "white" if value < middle else "black"
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=6, color=colour)
    figure.colorbar(image, ax=axes, shrink=0.6)
    figure.savefig(path, dpi=120, format="png")


def write_recipes(recipe: PrecisionConfig, its: Mapping[str, Any], num_layers: int, folder: Path) -> None:
    """Write YAML files of recipes into `folder`, for `--config-dir`.

    One recipe per quantized slot quantizes only that slot. One more keeps the layers unquantized that the probe names.
    `num_layers`: number of blocks of the probed model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = [only_slot(recipe, slot) for slot in SLOT_NAMES if slot in its["quantised_slots"]]
    if its["keep_high"]["layers"]:
        exclude = (*recipe.modules.exclude, *its["keep_high"]["layers"])
        modules = recipe.modules.model_copy(update={"exclude": exclude})
        kept = recipe.model_copy(update={"name": f"{recipe.name}_kept", "modules": modules})
        made.append(without_idle_rules(kept, its["layers"], num_layers))
    for each in made:
        text = yaml.safe_dump(as_yaml_values(each), sort_keys=False, allow_unicode=True, width=120)
        (folder / f"{each.name}.yaml").write_text(f"# Made by `lightning-llm probe` of {recipe.name}.\n{text}")
