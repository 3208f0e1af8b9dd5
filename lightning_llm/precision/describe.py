"""A precision recipe as plain data and as text, for `plan`. Pure: needs neither torch nor a model."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_llm.config.schema.precision import SELECTS, UNQUANTIZED, CastConfig, PrecisionConfig, slots_of
from lightning_llm.precision.module_rules import (
    NO_EXPERTS,
    Coverage,
    alike_experts,
    coverage,
    expert_place,
    fractions_of_no_block,
    layers_of_casts,
    reasons_to_stay_unquantized,
)
from lightning_llm.precision.native.decide import Decision

ALWAYS = ("block", "scale", "rounding")
"""Keys of a cast that are shown even where they have their default."""


def precision_facts(
    recipe: PrecisionConfig,
    decision: Decision,
    names: Sequence[str],
    num_layers: int,
    experts: Mapping[str, int] = NO_EXPERTS,
) -> dict[str, Any]:
    """Return the recipe as data: its hash, its other keys, how it runs, its layers and its slots.

    `decision`: how its casts run on the device that would train; each slot has its `format`, how it `runs` and the
    `reason`; casts also have `block`, `scale`, `rounding`, and each key without its default value. A phase and a rule
    of `modules.casts` list the slots that differ from the recipe's own. `names`: the model's linears; `num_layers`:
    number of blocks; `experts`: numbers of experts by linear. Experts of one linear under different rules are listed by
    their names.
    """
    slots = _slots(slots_of(recipe), recipe.compute_dtype, decision)

    def changed(casts: dict[str, CastConfig]) -> dict[str, Any]:
        its = _slots(casts, recipe.compute_dtype, decision)
        return {slot: facts for slot, facts in its.items() if facts != slots[slot]}

    layers = _layers_of_casts(names, recipe, num_layers, experts)
    phases = [
        {"start": phase.start, "end": phase.end, "slots": changed(slots_of(recipe.in_phase(number)))}
        | ({"modules": phase.modules.model_dump(exclude_defaults=True)} if phase.modules else {})
        for number, phase in enumerate(recipe.phases)
    ]
    rules = [
        {
            "for": rule.model_dump(mode="json", include=SELECTS, exclude_none=True),
            "recipe": rule.recipe,
            "layers": layers[f"modules.casts.{number}"],
            "slots": changed(recipe.casts_under(number)),
        }
        for number, rule in enumerate(recipe.modules.casts or ())
    ]
    return {
        "name": recipe.name,
        "compute_dtype": recipe.compute_dtype,
        "master_dtype": recipe.master_dtype,
        **({"update": recipe.update.model_dump()} if recipe.update.rounding != "even" else {}),
        **({"gradient_reduction": recipe.gradient_reduction.model_dump()} if recipe.gradient_reduction else {}),
        "main_grad_dtype": recipe.main_grad_dtype,
        "reduce_dtype": recipe.reduce_dtype,
        "wgrad_dtype": recipe.wgrad_dtype or recipe.compute_dtype,
        "recipe_hash": recipe.recipe_hash,
        "reference": recipe.reference,
        "hardware": recipe.hardware,
        "modules": recipe.modules.model_dump(exclude_defaults=True, exclude={"casts"}),
        "allow": list(recipe.allow or ()),
        "layers": _layers(recipe, names, num_layers, experts),
        "loss_scaling": recipe.loss_scaling.model_dump() if recipe.loss_scaling else None,
        "optimizer": recipe.optimizer.model_dump(exclude_none=True),
        "backend": recipe.backend,
        **decision.facts(),
        "slots": slots,
        "module_casts": rules,
        "phases": phases,
    }


def _layers_of_casts(
    names: Sequence[str], recipe: PrecisionConfig, num_layers: int, experts: Mapping[str, int]
) -> dict[str, list[str]]:
    """Return `layers_of_casts`, with the experts of a linear one by one if they follow different rules."""
    every = []
    for name in names:
        count = experts.get(name, 1)
        mixed = len(alike_experts(name, count, recipe, num_layers)) > 1
        every += [expert_place(name, number) for number in range(count)] if mixed else [name]
    return layers_of_casts(every, recipe, num_layers)


def _layers(
    recipe: PrecisionConfig, names: Sequence[str], num_layers: int, experts: Mapping[str, int]
) -> dict[str, Any]:
    """Return how many linears are quantized and not (by reason), and the fractions of blocks that round to none.

    A linear is quantized if one of its experts is; `experts_high` has the number of the others by reason.
    `coverage`: the counts in linears and blocks, with the recipe's shortfall on this model; None without casts.
    """
    counts = coverage(recipe, names, num_layers, experts)
    whole = reasons_to_stay_unquantized(names, recipe, num_layers, experts)
    reasons, high = Counter(whole.values()), Counter[str]()
    for name in [name for name, why in whole.items() if why is None]:
        for place, count in alike_experts(name, experts.get(name, 1), recipe, num_layers):
            why = reasons_to_stay_unquantized([place], recipe, num_layers)[place]
            high.update({why: count} if why is not None else {})
    return {
        **({"experts_high": dict(high)} if high else {}),
        "quantised": reasons.pop(None, 0),
        "high": dict(reasons),
        "no_block": fractions_of_no_block(recipe.modules, num_layers) if recipe.quantizes else [],
        "coverage": counts.as_data() if counts else None,
    }


def _slots(casts: dict[str, CastConfig], compute_dtype: str, decision: Decision) -> dict[str, dict[str, Any]]:
    return {slot: _slot(cast, compute_dtype, decision) for slot, cast in casts.items()}


def _slot(cast: CastConfig, compute_dtype: str, decision: Decision) -> dict[str, Any]:
    if cast == UNQUANTIZED:
        if decision.software is not None:
            return {"format": compute_dtype, "runs": "emulated", "reason": decision.software}
        return {"format": compute_dtype, "runs": "native", "reason": "not quantized"}
    if not cast.quantizes:
        shown = cast.model_dump(exclude_none=True, include={"source", "hadamard"})
        return {"format": compute_dtype, **shown, **decision.facts()}
    defaults = UNQUANTIZED.model_dump()
    keys = cast.model_dump(exclude_none=True, exclude={"format"})
    # Keys that a default excludes from the dump are in neither, or have another value.
    shown = {key: value for key, value in keys.items() if key in ALWAYS or value != defaults.get(key)}
    return {"format": cast.format, **shown, **decision.facts()}


def precision_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows (label, text) that show `precision_facts` in a terminal."""
    dtypes = f"computing in {facts['compute_dtype']}, master weights {facts['master_dtype']}"
    if "update" in facts:
        dtypes += f" (rounding {facts['update']['rounding']})"
    others = {key: facts[key] for key in ("main_grad_dtype", "reduce_dtype") if facts[key] != "fp32"}
    if facts["wgrad_dtype"] != facts["compute_dtype"]:
        others["wgrad_dtype"] = facts["wgrad_dtype"]
    rules = "".join(f", {each}" for each in (_pairs(others), _pairs(facts["modules"])) if each)
    counts = Coverage(**facts["layers"]["coverage"]) if facts["layers"]["coverage"] else None
    name = facts["name"] + (counts.suffix if counts else "")
    rows = [("precision", f"{name} ({facts['recipe_hash']}), {dtypes}{rules}")]
    rows.append(("  runs", f"{facts['runs']}: {facts['reason']}"))
    rows += [("  experts", facts["experts"])] if "experts" in facts else []
    rows += [*_layer_rows(facts), *_slot_rows(facts["slots"])]
    if "gradient_reduction" in facts:
        rows.append(("  between ranks", f"gradients as {_pairs(facts['gradient_reduction'])}"))
    for number, rule in enumerate(facts["module_casts"]):
        source = f", the slots of {rule['recipe']}" if rule["recipe"] else ""
        text = f"modules.casts.{number} ({_pairs(rule['for'])}){source}: {len(rule['layers'])} layers, "
        rows.append(("  casts", text + ("these slots differ" if rule["slots"] else "the same slots")))
        rows += _slot_rows(rule["slots"], indent=4)
    if facts["loss_scaling"]:
        rows.append(("  loss scaling", _pairs(facts["loss_scaling"])))
    if facts["optimizer"]:
        rows.append(("  optimizer", f"{_pairs(facts['optimizer'])}, in place of optim's"))
    for phase in facts["phases"]:
        span = f"from {100 * phase['start']:.4g}% to {100 * phase['end']:.4g}% of the steps"
        its = f", modules {_pairs(phase['modules'])}" if phase.get("modules") else ""
        rows.append(("  phase", f"{span}{its}, {'these slots differ' if phase['slots'] else 'the same slots'}"))
        rows += _slot_rows(phase["slots"], indent=4)
    return rows


def _layer_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    layers, rows = facts["layers"], []
    if layers["quantised"]:
        high = [f"{count} high ({why})" for why, count in layers["high"].items()]
        high += [f"{count} experts of linears high ({why})" for why, count in layers.get("experts_high", {}).items()]
        counts = Coverage(**layers["coverage"]).text
        rows.append(("  layers", "; ".join([counts, *high, *layers["no_block"]])))
    if facts["allow"]:
        rows.append(("  allowed", f"{', '.join(facts['allow'])}: known to fail, and asked for (precision.allow)"))
    return rows


def _slot_rows(slots: dict[str, dict[str, Any]], indent: int = 2) -> list[tuple[str, str]]:
    return [(f"{'':{indent}}{slot}", _slot_text(facts)) for slot, facts in slots.items()]


def _slot_text(facts: dict[str, Any]) -> str:
    """Return e.g. "e2m1 1x32, e8m0_floor scale, stochastic, prescale=0.75: emulated"."""
    if facts["runs"] == "native" and "block" not in facts:
        return str(facts["format"])
    named = {"format", "runs", "reason", *ALWAYS}
    parts = [str(facts["format"])]
    if "block" in facts:
        parts = [f"{facts['format']} {facts['block']}", f"{facts['scale']} scale", facts["rounding"]]
    rest = _pairs({key: value for key, value in facts.items() if key not in named})
    return f"{', '.join([*parts, rest] if rest else parts)}: {facts['runs']}"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}={_value(key, value)}" for key, value in values.items())


def _value(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return f"({_pairs(value)})"
    if key == "vector":  # of signs
        return "".join("+" if sign > 0 else "-" for sign in value)
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple | list) else str(value)
