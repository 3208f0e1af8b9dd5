"""Whether a weight can travel between ranks as FP8 codes, by its casts alone. Pure: needs neither torch nor a model."""

from collections.abc import Mapping

from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.precision.linear.weight_cast_rules import WEIGHT_SLOTS

CODES = ("e4m3", "e5m2")


def codes_cast(casts: Mapping[str, CastConfig]) -> CastConfig | None:
    """Return the cast whose codes are the weight in both GEMMs that read it; None where there is no such cast."""
    return casts["fprop.w"] if why_not_codes(casts) is None else None


def why_not_codes(casts: Mapping[str, CastConfig]) -> str | None:
    """Return why codes of these six `casts` cannot take the weight's place between ranks, with the slot; else None."""
    for slot in WEIGHT_SLOTS:
        reason = _why_not(casts[slot])
        if reason is not None:
            return f"{slot} {reason}"
    if casts["fprop.w"] != casts["dgrad.w"]:
        return "fprop.w and dgrad.w are cast differently, and codes of both leave nothing of the saving"
    return None


def _why_not(cast: CastConfig) -> str | None:
    if not cast.quantises:
        return "reads the weight in compute_dtype, so that it has to be gathered in it"
    if cast.source != "high_precision":
        return "is made of fprop's quantised weight, along another axis than its codes"
    if cast.hadamard is not None:
        return "is rotated along its own GEMM's axis, so that each of the two has codes of its own"
    if cast.block != "tensor":
        rows, columns = cast.block.split("x")
        if rows == columns:
            return f"has blocks of {cast.block}, which the shards cut: no rank has all that a scale is of"
        return f"has blocks of {cast.block}: of rows for one GEMM and columns for the other, and both leave no saving"
    if cast.format not in CODES:
        return f"is {cast.format}, whose codes are no bytes; {' and '.join(CODES)} are"
    if cast.stochastic:
        return "is rounded stochastically, by other bits in each micro-batch and each GEMM"
    if cast.delayed is not None and cast.delayed.update == "micro_batch":
        return "has a delayed scale that moves with every micro-batch (update: micro_batch), and codes stay for a step"
    return None
