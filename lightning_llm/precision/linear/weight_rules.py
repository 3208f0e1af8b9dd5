"""Rules of weight casts: which can be cached within a training step, which ranks can gather as codes. No torch."""

from collections.abc import Mapping

from lightning_llm.config.schema.number_formats import NUMBER_FORMATS
from lightning_llm.config.schema.precision import CastConfig

WEIGHT_SLOTS = ("fprop.w", "dgrad.w")


def why_not_kept(casts: Mapping[str, CastConfig], slot: str, rotated: bool = True) -> str | None:
    """Return why the weight's cast for `slot` of these six `casts` cannot be cached over micro-batches; None if it can.

    `rotated`: whether rotated weights can be cached. False in a block that selective checkpointing recomputes: it
    expects the same matrix products as in the forward pass, including those of rotations.
    """
    cast = casts[slot]
    if not cast.quantizes:
        return "leaves the weight in compute_dtype"
    if cast.stochastic:
        return "is rounded stochastically, by other bits in each micro-batch"
    if cast.hadamard is not None and cast.hadamard.signs == "random":
        return "is rotated by random signs, which are others in each micro-batch"
    if cast.hadamard is not None and not rotated:
        return "is rotated, by a product that selective checkpointing keeps"
    if cast.delayed is not None and cast.delayed.update == "micro_batch":
        return "has a delayed scale that moves with every micro-batch (update: micro_batch)"
    if cast.source == "quantised":
        made = why_not_kept(casts, "fprop.w", rotated)
        return made and f"is made of fprop's quantised weight, which {made}"
    return None


def kept_slots(casts: Mapping[str, CastConfig], rotated: bool = True) -> tuple[str, ...]:
    """Return the slots with casts of the weight that can be cached; only one if both GEMMs can use the same cast."""
    kept = tuple(slot for slot in WEIGHT_SLOTS if why_not_kept(casts, slot, rotated) is None)
    return kept[:1] if serve_both(casts) else kept


def serve_both(casts: Mapping[str, CastConfig]) -> bool:
    """Return whether one cast of the weight serves both GEMMs.

    Both slots need the same cast, unrotated and not stochastic. Its blocks must not depend on the GEMM's axis (whole
    tensor or square), and its block scales must not multiply partial sums.
    """
    cast = casts["fprop.w"]
    if cast != casts["dgrad.w"] or cast.source != "high_precision" or cast.hadamard is not None or cast.stochastic:
        return False
    return cast.block == "tensor" or (cast.is_square and not cast.scales_partial_sums)


def kept_by_kernel(casts: Mapping[str, CastConfig]) -> bool:
    """Return whether Transformer Engine's kernel can cache the weight's casts: those of both slots, or none.

    False with delayed scales: there the kernel computes the weight's amax while it casts.
    """
    return all(why_not_kept(casts, slot) is None and not casts[slot].scale_kind.from_history for slot in WEIGHT_SLOTS)


def kept_bytes(casts: Mapping[str, CastConfig], rows: int, columns: int, rotated: bool = True) -> int:
    """Return the bytes of the emulation's cached casts of a weight [`rows`, `columns`].

    Numbers take 2 bytes each and, unless the gradient rule is straight-through, so does the factor of the gradient;
    scales of partial sums and of a tensor are fp32.
    """
    found = 0
    for slot in kept_slots(casts, rotated):
        cast = casts[slot]
        length, other = (columns, rows) if slot == "fprop.w" else (rows, columns)
        if cast.hadamard is not None:
            length = cast.hadamard.padded(length)
        found += (2 if cast.gradient_kind.is_one else 4) * length * other
        if cast.scales_partial_sums:
            across, along = cast.block_size or (1, 0)
            along = along or length
            found += 4 * -(-length // along) * -(-other // across) * across
        elif cast.has_factor:
            found += 4 if cast.amax == "tensor" else 4 * other
    return found


CODES = tuple(row.name for row in NUMBER_FORMATS.values() if row.code_bits == 8)
"""Formats with 8-bit codes."""


def codes_cast(casts: Mapping[str, CastConfig]) -> CastConfig | None:
    """Return the cast for which ranks can gather the weight as codes that both GEMMs use; None if there is none."""
    return casts["fprop.w"] if why_not_codes(casts) is None else None


def block_scales(cast: CastConfig, rows: int, columns: int) -> int:
    """Return the number of block scales of a weight [`rows`, `columns`]; 0 for one scale per tensor."""
    if cast.block_size is None:
        return 0
    across, along = cast.block_size
    return -(-rows // across) * -(-columns // along)


def why_not_codes(casts: Mapping[str, CastConfig]) -> str | None:
    """Return why ranks cannot gather the weight as codes of these six `casts`, with the slot; None if they can."""
    for slot in WEIGHT_SLOTS:
        reason = _why_not(casts[slot])
        if reason is not None:
            return f"{slot} {reason}"
    if casts["fprop.w"] != casts["dgrad.w"]:
        return "fprop.w and dgrad.w are cast differently, and gathering codes of both would save nothing"
    return None


def _why_not(cast: CastConfig) -> str | None:
    if not cast.quantizes:
        return "reads the weight in compute_dtype, so that it has to be gathered in it"
    if cast.source != "high_precision":
        return "is made of fprop's quantised weight, along another axis than its codes"
    if cast.hadamard is not None:
        return "is rotated along its own GEMM's axis, so the two GEMMs need different codes"
    if cast.format not in CODES:
        return f"is {cast.format}, which has no 8-bit codes; {', '.join(CODES)} have"
    if cast.block != "tensor" and not cast.is_square:
        return f"has blocks of {cast.block}, along other axes for fprop and dgrad: codes of both would save nothing"
    if cast.block != "tensor" and not cast.scale_kind.from_block_amax:
        return f"has scale {cast.scale}, which needs all elements of a block, and shards cut blocks of {cast.block}"
    if cast.stochastic:
        return "is rounded stochastically, by other bits in each micro-batch and each GEMM"
    if cast.delayed is not None and cast.delayed.update == "micro_batch":
        return "has a delayed scale that moves with every micro-batch (update: micro_batch), and codes stay for a step"
    return None
