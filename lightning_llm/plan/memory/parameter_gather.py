"""Weights that FSDP2 gathers as FP8 codes: where that can be, and which they are. Imports no torch."""

from dataclasses import replace

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.optim import ParameterShard, role_in_block
from lightning_llm.model.linear_names import block_linears, linear_names
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.memory.units import Units, shard_ranks
from lightning_llm.plan.resolve import Resolution
from lightning_llm.plan.shard_axes import SHARD_AXES
from lightning_llm.plan.stages import StagePart, layers_of, units_at
from lightning_llm.precision.linear.gather_rules import codes_cast, why_not_codes
from lightning_llm.precision.linear.weight_cast_rules import WEIGHT_SLOTS
from lightning_llm.precision.recipe.module_rules import layers_of_casts, reasons_to_stay_high, rule_of

KEY = "precision.parameter_gather"


def parameter_gather_problems(found: Resolution) -> list[Problem]:
    """Return why weights cannot be gathered as codes, where they are to be: by layout, casts, and who makes them."""
    config, recipe = found.config, found.config.precision
    if recipe.parameter_gather == "high":
        return []
    texts = []
    if config.parallel.zero_stage == 0:
        layouts = "zero1, zero2, zero3, hsdp or another with parallel.zero_stage above 0"
        texts.append(f"is quantised, and parallel={config.parallel.name} shards no weights to gather. Take {layouts}")
    layers = layers_of_casts(linear_names(config.model), recipe, config.model.num_layers)
    sets = {key: casts for key, casts in recipe.cast_sets().items() if layers[key]}
    cast = {key: casts for key, casts in sets.items() if any(casts[slot].quantises for slot in WEIGHT_SLOTS)}
    if not cast:
        texts.append("is quantised, and the recipe casts no weights. Take precision=fp8_current, say, or set high")
    for key, casts in cast.items():
        if (reason := why_not_codes(casts)) is not None:
            where = f"{key}." if key else ""
            texts.append(f"is quantised, and precision.{where}{reason}. Set high, or a cast of one scale per tensor")
    if cast and found.decision.runs == "native":
        text = "is quantised, and Transformer Engine makes the casts, of weights that it is given in compute_dtype"
        texts.append(f"{text}. Set high, or precision.backend=emulated")
    return [Problem(KEY, f"{text}.") for text in texts]


def gathered_units(config: Config, parts: list[StagePart], degrees: Degrees) -> Units:
    """Return what a rank with stages `parts` shards, as `units_at`, with what of it is gathered as codes."""
    units = units_at(config.model, parts, degrees.tp)
    if config.precision.parameter_gather == "high" or shard_ranks(config.parallel, degrees) == 1:
        return units
    coded = (_coded(config, index, degrees.tp) for index in layers_of(parts))
    blocks = tuple(replace(unit, coded=each) for unit, each in zip(units.blocks, coded, strict=True))
    return replace(units, blocks=blocks)


def _coded(config: Config, index: int, tp: int) -> tuple[ParameterShard, ...]:
    """Return what a tensor-parallel rank has of the weights of block `index` that are gathered as codes."""
    recipe, layers, found = config.precision, config.model.num_layers, []
    for linear in block_linears(config.model, index):
        name = f"layers.{index}.{linear.name}"
        kept = reasons_to_stay_high([name], recipe, layers)[name] is not None
        if kept or codes_cast(recipe.casts_under(rule_of(name, recipe.modules, layers))) is None:
            continue
        axis = SHARD_AXES[linear.role]["w"]
        sides = (linear.outputs.length, linear.inputs.length)
        rows, columns = (length // tp if axis == side else length for side, length in enumerate(sides))
        found.append(ParameterShard(rows, columns, role_in_block(2)))
    return tuple(found)
