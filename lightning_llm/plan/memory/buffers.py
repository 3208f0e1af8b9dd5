"""Copies of weights and gradients during a step: quantized, gathered, cast, and sent. Imports no torch.

Quantized weights are kept within a step (`precision.keep_weight_casts`), or gathered by FSDP2 as FP8 codes
(`precision.parameter_gather`).
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.optim import ParameterShard, role_in_block
from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.model.spec import LinearSpec
from lightning_llm.model.structure import block_linears, linear_names
from lightning_llm.optim.kinds import DTYPE_BYTES
from lightning_llm.plan.degrees import Degrees, replica_axes
from lightning_llm.plan.divisibility import SHARD_AXES
from lightning_llm.plan.gradient_codes import scattered_bytes
from lightning_llm.plan.memory import OURS, Accounting
from lightning_llm.plan.memory.activations import code_bits, on_gpu, recomputed_layers
from lightning_llm.plan.memory.units import Unit, Units, shard_ranks, sums_in_tree, units_of, uses_fsdp
from lightning_llm.plan.nodes import ranks_per_node, ranks_together
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
from lightning_llm.precision.module_rules import (
    alike_experts,
    layers_of_casts,
    reasons_to_stay_unquantized,
    rule_in_effect,
)

KEEP_KEY = "precision.keep_weight_casts"


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
    native = recipe.quantizes and derived.decision.runs == "native"
    texts = []
    if not any(casts[slot].quantizes for casts in sets.values() for slot in WEIGHT_SLOTS):
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
    return [Problem(KEEP_KEY, f"is true, and {text}.") for text in texts]


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
    """Yield the linears of block `index` that are cast, all experts of a linear or some."""
    config, linears = plan.config, block_linears(plan.config.model, index)
    experts = {f"layers.{index}.{linear.name}": linear.groups for linear in linears}
    reasons = reasons_to_stay_unquantized(experts, config.precision, config.model.num_layers, experts)
    yield from (linear for name, linear in zip(experts, linears, strict=True) if reasons[name] is None)


def _bytes_of(plan: Plan, index: int, linear: LinearSpec) -> int:
    name, axis = f"layers.{index}.{linear.name}", SHARD_AXES[linear.role]["w"]
    sides, width = (linear.outputs.length, linear.inputs.length), plan.degrees.width
    if linear.role == "expert":
        if plan.decision.runs == "native":  # made in each micro-batch (`native.grouped`)
            return 0
        recipe, layers = plan.config.precision, plan.config.model.num_layers
        groups = alike_experts(name, linear.groups, recipe, layers)
        every = sum(count * kept_bytes(_casts(plan, place), *sides, keeps(plan)[index]) for place, count in groups)
        return every // (width * plan.degrees.ranks("ep"))
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
    reasons = []
    if config.parallel.zero_stage == 0:
        layouts = "zero1, zero2, zero3, hsdp or another with parallel.zero_stage above 0"
        reasons.append(f"parallel={config.parallel.name} shards no weights. Use {layouts}")
    layers = layers_of_casts(linear_names(config.model), recipe, config.model.num_layers)
    sets = {key: casts for key, casts in recipe.cast_sets().items() if layers[key]}
    cast = {key: casts for key, casts in sets.items() if any(casts[slot].quantizes for slot in WEIGHT_SLOTS)}
    if not cast:
        reasons.append("the recipe casts no weights. Use e.g. precision=fp8_current, or set high")
    for key, casts in cast.items():
        if (reason := why_not_codes(casts)) is not None:
            where = f"{key}." if key else ""
            reasons.append(f"precision.{where}{reason}. Set high, or choose other casts")
    if cast and derived.decision.runs == "native":
        reason = "Transformer Engine casts weights itself, from compute_dtype"
        reasons.append(f"{reason}. Set high, or precision.backend=emulated")
    return [Problem(GATHER_KEY, f"is quantised, and {reason}.") for reason in reasons]


def gathered_units(config: Config, parts: list[StagePart], degrees: Degrees) -> Units:
    """Return the FSDP2 units of a rank with stages `parts` (`units_at`), with weights gathered as codes marked."""
    units = units_at(config.model, parts, degrees)
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
        kept = reasons_to_stay_unquantized([name], recipe, layers)[name] is not None
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


REPLICA_BUCKET_BYTES = 25 * 2**20
"""Largest bucket of `parallel.gradient_sync`, unless one parameter is larger."""


def gathered_bytes(config: Config, units: Units, degrees: Degrees, accounting: Accounting = OURS) -> int:
    """Return the peak bytes of gathered weights; 0 without FSDP2."""
    if not uses_fsdp(config.parallel, degrees):
        return 0
    if config.parallel.zero_stage < 3:
        return sum(_whole_bytes(config, degrees, unit, accounting) for unit in units.each())
    blocks = [_whole_bytes(config, degrees, block, accounting) for block in units.blocks]
    if units.experts:
        of_experts = (_whole_bytes(config, degrees, unit, accounting) for unit in units.experts)
        blocks = [sum(pair) for pair in zip(blocks, of_experts, strict=True)]
    root, head, embedding = (
        _whole_bytes(config, degrees, unit, accounting) for unit in (units.root, units.head, units.embedding)
    )
    two_blocks = max(map(sum, pairwise(blocks)), default=sum(blocks))  # the next one is prefetched
    if accounting.one_root:
        return root + head + embedding + two_blocks
    return root + max(head + two_blocks, embedding + blocks[0])


def _whole_bytes(config: Config, degrees: Degrees, unit: Unit, accounting: Accounting) -> int:
    cast = unit.cast or accounting.one_root
    dtype = config.precision.gather_dtype if cast else config.precision.master_dtype
    return DTYPE_BYTES[dtype] * unit.whole(shard_ranks(config.parallel, degrees))


def gather_buffer_bytes(config: Config, units: Units, degrees: Degrees, accounting: Accounting) -> int:
    """Return the peak bytes of gather buffers: two consecutive units, the root and then blocks."""
    if not uses_fsdp(config.parallel, degrees):
        return 0
    outside = [_whole_bytes(config, degrees, unit, accounting) for unit in (units.root, units.head, units.embedding)]
    root = sum(outside) if accounting.one_root else max(outside)
    ranks, recipe = shard_ranks(config.parallel, degrees), config.precision
    widths = [DTYPE_BYTES[recipe.gather_dtype if unit.cast else recipe.master_dtype] for unit in units.of_blocks()]
    each = list(zip(units.of_blocks(), widths, strict=True))
    blocks = [unit.over(ranks) * unit.gathered_bytes(ranks, width) for unit, width in each]
    codes = [ranks * unit.code_bytes(ranks) for unit, _ in each]  # in separate buffers, until they are converted
    pairs = zip(pairwise(blocks), codes[1:], strict=True)
    return max(root + blocks[0] + codes[0], max((sum(pair) + code for pair, code in pairs), default=0))


def compute_copy_bytes(plan: Plan, part: StagePart, units: Units) -> tuple[int, int]:
    """Return the bytes of weights that are cast on use: (kept per forward pass in flight, for one block at a time).

    Embeddings are looked up in the master dtype. FSDP2 gathers weights already cast, except for norms and a tied
    embedding outside the blocks. A linear with emulated casts keeps its master weight and casts it again. A linear in
    Transformer Engine keeps the 16-bit weight and its codes in both directions, unless the codes are kept for the whole
    step (`keeps_codes`).
    """
    config, degrees = plan.config, plan.degrees
    model, recipe = config.model, config.precision
    if recipe.compute_dtype == recipe.master_dtype:
        return 0, 0
    width = DTYPE_BYTES[recipe.compute_dtype]
    # The last norm, and a tied embedding, which is cast to project.
    outside = units_of(model, (), first=False, last=True, tp=degrees.width).root.shard(1) if part.last else 0
    again = set(recomputed_layers(config, [part]))
    cast_here: tuple[Unit, ...] = units.blocks
    head = 0 if _emulates_all(plan) else units.head.shard(1)
    if uses_fsdp(config.parallel, degrees) and recipe.gather_dtype == recipe.compute_dtype:
        if not units.experts:
            return width * outside, 0
        cast_here, head = units.experts, 0
    elif units.experts:
        both = zip(units.blocks, units.experts, strict=True)
        cast_here = tuple(replace(one, parameters=one.parameters + other.parameters) for one, other in both)
    sizes = {index: _copied_in_block(plan, index, unit) for index, unit in zip(part.layers, cast_here, strict=True)}
    kept = width * (outside + head) + sum(size for index, size in sizes.items() if index not in again)
    return kept, max((sizes[index] for index in again), default=0)


def _copied_in_block(plan: Plan, index: int, unit: Unit) -> int:
    """Return the bytes of cast weights of block `index` that its forward pass keeps."""
    config = plan.config
    width, tp, ep = DTYPE_BYTES[config.precision.compute_dtype], plan.degrees.width, plan.degrees.ranks("ep")
    copied = width * unit.shard(1)
    for linear in block_linears(config.model, index):
        name = f"layers.{index}.{linear.name}"
        if unit.ep > 1 and linear.role != "expert":
            continue
        whole = linear.elements // (tp if linear.role in ("column", "row", "expert") else 1)
        whole //= ep if linear.role == "expert" else 1
        copied += sum(
            _copied(plan, index, place, linear, whole * count // linear.groups)
            for place, count in alike_experts(name, linear.groups, config.precision, config.model.num_layers)
        )
    return copied


def _copied(plan: Plan, index: int, name: str, linear: LinearSpec, elements: int) -> int:
    """Return the bytes that `elements` of linear `name` add to those of its weight in the compute dtype."""
    config = plan.config
    if bits := code_bits(plan, name):
        return 0 if linear.role != "expert" and keeps_codes(plan, name, index) else int(2 * elements * bits / 8)
    reasons = reasons_to_stay_unquantized([name], config.precision, config.model.num_layers)
    emulated = reasons[name] is None or _emulates_all(plan)
    return -DTYPE_BYTES[config.precision.compute_dtype] * elements if emulated else 0


def _emulates_all(plan: Plan) -> bool:
    """Return whether every linear is emulated, as with fp16 on a CPU."""
    return plan.config.precision.compute_dtype == "fp16" and not on_gpu(plan)


def communication_bytes(config: Config, units: Units, degrees: Degrees) -> int:
    """Return the peak bytes of gradients being reduced: send and receive buffers.

    FSDP2 reduces one group after another. Other gradients go in buckets through the collectives they need
    (`parallel.gradient_sync`), except for the few parameters that tensor-parallel ranks replicate.
    """
    gradient, ranks = DTYPE_BYTES[config.precision.main_grad_dtype], shard_ranks(config.parallel, degrees)
    fsdp = uses_fsdp(config.parallel, degrees)
    largest = max(_reduced_bytes(config, unit, ranks) for unit in units.each()) if fsdp else 0
    shared = degrees.sequence > 1 and not fsdp
    tensors = [gradient * shard.elements for shard in units.shards(ranks)]
    held = [largest, bucket_bytes(sum(tensors), max(tensors), shared, 1)]
    for axis in replica_axes() if sums_in_tree(config.parallel) else ():
        coded = config.precision.gradient_reduction is not None  # takes less than a bucket's bytes, and one stage
        together = 1 if coded else ranks_together(degrees, (axis,), ranks_per_node(config))
        held.append(bucket_bytes(sum(tensors), max(tensors), shared, degrees.ranks(axis), together))
    return max(held)


def _reduced_bytes(config: Config, unit: Unit, ranks: int) -> int:
    """Return the bytes of the gradients of `unit` while they are scattered: to send, received, and summed codes."""
    gradient = DTYPE_BYTES[config.precision.main_grad_dtype] * unit.whole(ranks)
    if config.precision.gradient_reduction is None:
        return 2 * gradient
    shard = unit.shard(ranks)
    return gradient + 2 * ranks * scattered_bytes(config, shard) + 4 * shard


def bucket_bytes(total: int, largest: int, shared: bool, replicas: int, together: int = 1) -> int:
    """Return the peak bytes of buckets for `total` bytes of gradients, `largest` bytes of one parameter.

    A bucket stays in memory through its collectives: an all-reduce over ranks that share sequences (`shared`), one
    all-to-all over `replicas`, or two if a machine first sums its `together` ranks, and an all-gather. The bucket in
    the first all-to-all needs twice its bytes, the one in the second its receive buffer, the last one its part of the
    sum.
    """
    collectives = shared + (2 + (together > 1) if replicas > 1 else 0)
    if not collectives:
        return 0
    bucket = max(largest, min(REPLICA_BUCKET_BYTES, total))
    received = bucket + bucket // replicas if replicas > 1 else 0
    received += bucket // together if together > 1 else 0
    return min(collectives * bucket, total) + received
