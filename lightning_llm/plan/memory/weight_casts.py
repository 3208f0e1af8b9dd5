"""Quantized weights that are kept within a step, or gathered by FSDP2 as FP8 codes, and their bytes. No torch."""

from collections.abc import Iterator
from dataclasses import replace

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.optim import ParameterShard, role_in_block
from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.model.spec import LinearSpec
from lightning_llm.model.structure import block_linears, linear_names
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.divisibility import SHARD_AXES
from lightning_llm.plan.memory.activations import code_bits
from lightning_llm.plan.memory.units import Unit, Units, shard_ranks, uses_fsdp
from lightning_llm.plan.resolve import DerivedConfig, Plan
from lightning_llm.plan.stages import StagePart, layers_of, units_at
from lightning_llm.precision.linear.weight_rules import (
    WEIGHT_SLOTS,
    block_scales,
    codes_cast,
    kept_by_kernel,
    kept_bytes,
    kept_slots,
    why_not_codes,
    why_not_kept,
)
from lightning_llm.precision.recipe.module_rules import layers_of_casts, reasons_to_stay_high, rule_in_effect

KEY = "precision.keep_weight_casts"


def keeping_blocks(config: Config, degrees: Degrees, micro_batches: int, native: bool) -> dict[int, bool]:
    """Return {index: whether rotated weights are kept, too} of the blocks that keep casts of weights within a step.

    If `precision.keep_weight_casts` is null, blocks with more than one forward pass per step keep them, unless FSDP2
    shards the weights: sharding is chosen to save memory, and casts take once or twice the bytes of the gathered 16-bit
    weights. `micro_batches` is per rank and step. See `why_not_kept` for rotated weights.
    """
    wanted, parallel = config.precision.keep_weight_casts, config.parallel
    if wanted is False or _why_not_here(config, degrees, native) is not None:
        return {}
    if wanted is None and shard_ranks(parallel, degrees) > 1:
        return {}
    modes = {index: parallel.checkpointing_of(index) for index in range(config.model.num_layers)}
    return {
        index: mode != "selective" for index, mode in modes.items() if wanted or micro_batches > 1 or mode != "none"
    }


def keeps(plan: Plan) -> dict[int, bool]:
    """Return `keeping_blocks` of `plan`."""
    return keeping_blocks(plan.config, plan.degrees, plan.micro_batches, plan.decision.runs == "native")


def _why_not_here(config: Config, degrees: Degrees, native: bool) -> str | None:
    """Return why the layout or the kernels cannot keep casts, with a remedy; None if they can."""
    parallel, sharded = config.parallel, uses_fsdp(config.parallel, degrees)
    if parallel.zero_stage == 3 and sharded:
        return (
            f"parallel={parallel.name} frees a block's weights after each use (ZeRO-3), and kept casts "
            "would take a whole model's memory. Use zero1 or zero2, or set null or false"
        )
    if config.precision.parameter_gather == "quantised" and shard_ranks(parallel, degrees) > 1:
        return "precision.parameter_gather=quantised gathers casts already. Set null or false, or parameter_gather=high"
    if native and sharded:
        return "Transformer Engine keeps no casts of weights that FSDP2 gathers. Set null or false, or parallel=ddp"
    return None


def weight_cast_problems(derived: DerivedConfig) -> list[Problem]:
    """Return why `precision.keep_weight_casts=true` is not possible: because of layout, casts, or kernels."""
    config, recipe = derived.config, derived.config.precision
    if not recipe.keep_weight_casts:
        return []
    layers = layers_of_casts(linear_names(config.model), recipe, config.model.num_layers)
    sets = {key: casts for key, casts in recipe.cast_sets().items() if layers[key]}
    modes = {config.parallel.checkpointing_of(index) for index in range(config.model.num_layers)}
    rotated = modes != {"selective"}
    native = recipe.quantises and derived.decision.runs == "native"
    texts = []
    if not any(casts[slot].quantises for casts in sets.values() for slot in WEIGHT_SLOTS):
        texts.append("the recipe casts no weights. Use e.g. precision=fp8_current, or set null or false")
    elif not any(kept_slots(casts, rotated) for casts in sets.values()):
        slots = ((slot, why_not_kept(casts, slot, rotated)) for casts in sets.values() for slot in WEIGHT_SLOTS)
        reasons = dict.fromkeys(f"{slot} {why}" for slot, why in slots)
        texts.append(f"no cast of a weight stays the same within a step: {'; '.join(reasons)}. Set null or false")
    elif native and not any(kept_by_kernel(casts) for casts in sets.values()):
        texts.append(
            "Transformer Engine's kernels keep both casts of a weight or none, and none with delayed scales, because "
            "they measure the amax while casting. Set null or false, or precision.backend=emulated"
        )
    if (reason := _why_not_here(config, derived.likely_degrees, native)) is not None:
        texts.append(reason)
    return [Problem(KEY, f"is true, and {text}.") for text in texts]


def kept_cast_bytes(plan: Plan, parts: list[StagePart]) -> int:
    """Return the bytes of quantized weights that a rank with stages `parts` keeps for a whole step.

    They are counted for the recipe's own casts, not for those of its phases.
    """
    blocks = keeps(plan)
    kept = ((index, linear) for index in layers_of(parts) if index in blocks for linear in _linears(plan, index))
    return sum(_bytes_of(plan, index, linear) for index, linear in kept)


def keeps_codes(plan: Plan, name: str, index: int) -> bool:
    """Return whether the native kernel of linear `name` in block `index` keeps its quantized weight within a step."""
    return index in keeps(plan) and kept_by_kernel(_casts(plan, name))


def _casts(plan: Plan, name: str) -> dict[str, CastConfig]:
    recipe = plan.config.precision
    return recipe.casts_under(rule_in_effect(name, recipe, plan.config.model.num_layers))


def _linears(plan: Plan, index: int) -> Iterator[LinearSpec]:
    """Yield the linears of block `index` that are cast."""
    config, linears = plan.config, block_linears(plan.config.model, index)
    names = [f"layers.{index}.{linear.name}" for linear in linears]
    reasons = reasons_to_stay_high(names, config.precision, config.model.num_layers)
    yield from (linear for name, linear in zip(names, linears, strict=True) if reasons[name] is None)


def _bytes_of(plan: Plan, index: int, linear: LinearSpec) -> int:
    name, axis = f"layers.{index}.{linear.name}", SHARD_AXES[linear.role]["w"]
    sides, width = (linear.outputs.length, linear.inputs.length), plan.degrees.width
    if linear.role == "expert":
        return linear.groups // width * kept_bytes(_casts(plan, name), *sides, keeps(plan)[index])
    rows, columns = (length // width if axis == side else length for side, length in enumerate(sides))
    if plan.decision.runs != "native":
        return kept_bytes(_casts(plan, name), rows, columns, keeps(plan)[index])
    bits = code_bits(plan, name) if keeps_codes(plan, name, index) else None
    return int(2 * rows * columns * (bits or 0) / 8)


GATHER_KEY = "precision.parameter_gather"


def parameter_gather_problems(derived: DerivedConfig) -> list[Problem]:
    """Return why `precision.parameter_gather=quantised` is not possible: because of layout, casts, or kernels."""
    config, recipe = derived.config, derived.config.precision
    if recipe.parameter_gather == "high":
        return []
    texts = []
    if config.parallel.zero_stage == 0:
        layouts = "zero1, zero2, zero3, hsdp or another with parallel.zero_stage above 0"
        texts.append(f"is quantised, and parallel={config.parallel.name} shards no weights. Use {layouts}")
    layers = layers_of_casts(linear_names(config.model), recipe, config.model.num_layers)
    sets = {key: casts for key, casts in recipe.cast_sets().items() if layers[key]}
    cast = {key: casts for key, casts in sets.items() if any(casts[slot].quantises for slot in WEIGHT_SLOTS)}
    if not cast:
        texts.append("is quantised, and the recipe casts no weights. Use e.g. precision=fp8_current, or set high")
    for key, casts in cast.items():
        if (reason := why_not_codes(casts)) is not None:
            where = f"{key}." if key else ""
            texts.append(f"is quantised, and precision.{where}{reason}. Set high, or choose other casts")
    if cast and derived.decision.runs == "native":
        text = "is quantised, and Transformer Engine casts weights itself, from compute_dtype"
        texts.append(f"{text}. Set high, or precision.backend=emulated")
    return [Problem(GATHER_KEY, f"{text}.") for text in texts]


def gathered_units(config: Config, parts: list[StagePart], degrees: Degrees) -> Units:
    """Return the FSDP2 units of a rank with stages `parts` (`units_at`), with weights gathered as codes marked."""
    units = units_at(config.model, parts, degrees.width)
    if config.precision.parameter_gather == "high" or shard_ranks(config.parallel, degrees) == 1:
        return units
    blocks = zip(units.blocks, layers_of(parts), strict=True)
    return replace(units, blocks=tuple(_coded(config, unit, index, degrees.width) for unit, index in blocks))


def _coded(config: Config, unit: Unit, index: int, tp: int) -> Unit:
    """Return `unit` with a tensor-parallel rank's part of the weights of block `index` that are gathered as codes."""
    block_count = tensor_count = 0
    recipe, layers, found = config.precision, config.model.num_layers, []
    for linear in block_linears(config.model, index):
        if linear.role == "expert":  # whose codes are not gathered
            continue
        name = f"layers.{index}.{linear.name}"
        kept = reasons_to_stay_high([name], recipe, layers)[name] is not None
        cast = codes_cast(recipe.casts_under(rule_in_effect(name, recipe, layers)))
        if kept or cast is None:
            continue
        axis = SHARD_AXES[linear.role]["w"]
        sides = (linear.outputs.length, linear.inputs.length)
        rows, columns = (length // tp if axis == side else length for side, length in enumerate(sides))
        found.append(ParameterShard(rows, columns, role_in_block(2)))
        block_count += block_scales(cast, rows, columns)
        tensor_count += cast.block == "tensor"
    return replace(unit, coded=tuple(found), block_scales=block_count, tensor_scales=tensor_count)
