"""Expresses a precision recipe as a configuration of Transformer Engine, or returns the differences. No torch.

A recipe is native only if one configuration of Transformer Engine 2.20 makes its six casts exactly: a candidate is
derived from the recipe, expanded into the library's casts, and compared slot by slot. Any difference is reported, and
the recipe then runs emulated.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.precision import (
    UNQUANTIZED,
    CastConfig,
    DelayedConfig,
    HadamardConfig,
    PrecisionConfig,
)

Kind = Literal["delayed", "current", "subchannel", "mxfp8", "nvfp4"]
NAMES: dict[Kind, str] = {
    "delayed": "Float8Quantizer",
    "current": "Float8CurrentScaling",
    "subchannel": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
"""Transformer Engine's recipe class of each kind. DelayedScaling itself is not used: it updates its scales at the end
of every autocast, over the whole job, but the recipe decides when (`DelayedConfig.update`); so the scales are ours."""
MULTIPLES: dict[Kind, int] = {"delayed": 16, "current": 16, "subchannel": 128, "mxfp8": 32, "nvfp4": 32}
"""Required divisors of a linear's sizes (`assert_dim_for_fp8_exec`, each quantizer's `is_quantizable`); every axis is
some GEMM's contraction axis, so the strictest of the rules holds for all. Tokens are padded with zero rows."""
TE_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Its random signs of a 16-point Hadamard transform, which are always the same."""


@dataclass(frozen=True)
class NativeRecipe:
    """One recipe of Transformer Engine. `gradient`: the format of dY; "high": the backward pass runs in compute_dtype.

    `square`: one scale for both directions of the weight (32x32, 16x16); `rotated`, `stochastic`: NVFP4's switches.
    `scopes`: `amax_scope` of X, W and dY; None if the two casts of a tensor have different ones.
    """

    kind: Kind
    gradient: str
    power_of_two: bool = False
    square: bool = False
    rotated: bool = False
    stochastic: bool = False
    delayed: DelayedConfig | None = None
    scopes: tuple[str | None, ...] = ("logical", "logical", "logical")

    @property
    def whole_tensors(self) -> bool:
        """Whether scales depend on the amax of whole tensors, so that ranks with parts of one must reduce it."""
        return any(cast.quantizes and cast.needs_tensor_amax for cast in casts_of(self).values())

    @property
    def name(self) -> str:
        """Name of the recipe class in Transformer Engine."""
        return NAMES[self.kind]


def why_one_by_one(native: NativeRecipe, sharded: bool) -> str | None:
    """Return why experts call a linear each, instead of Transformer Engine's `GroupedLinear`; None if they do not.

    `sharded`: FSDP2 gathers their weights. Reasons: `native.grouped`.
    """
    if native.kind == "delayed":
        return "delayed scales belong to single linears"
    if native.kind == "nvfp4":
        return "GroupedLinear draws the random bits of all experts from one state"
    return "FSDP2 gathers their weights" if sharded else None


def casts_of(native: NativeRecipe) -> dict[str, CastConfig]:
    """Return the six casts that Transformer Engine makes under `native` (2.20, `quantization.py`)."""
    if native.kind == "nvfp4":
        x, w, dy, turned_dy, turned_x = _nvfp4_casts(native)
    else:
        x, w, dy = _fp8_casts(native)
        turned_dy, turned_x = dy, x
    if native.gradient == "high":
        return {
            "fprop.x": x,
            "fprop.w": w,
            **dict.fromkeys(("dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"), UNQUANTIZED),
        }
    return {"fprop.x": x, "fprop.w": w, "dgrad.dy": dy, "dgrad.w": w, "wgrad.dy": turned_dy, "wgrad.x": turned_x}


def _fp8_casts(native: NativeRecipe) -> tuple[CastConfig, CastConfig, CastConfig]:
    gradient = "e4m3" if native.gradient == "high" else native.gradient
    scale = "power_of_two" if native.power_of_two else "fp32"
    blocks = {"delayed": ("tensor", "tensor"), "current": ("tensor", "tensor"), "subchannel": ("1x128", "128x128")}
    if native.kind == "mxfp8":
        blocks["mxfp8"], scale = ("1x32", "32x32" if native.square else "1x32"), "e8m0_ceil"
    if native.kind == "delayed":
        scale = "delayed"
    row, weight = blocks[native.kind]
    made = [
        CastConfig.model_validate({"format": number, "block": block, "scale": scale, "delayed": native.delayed})
        for number, block in (("e4m3", row), ("e4m3", weight), (gradient, row))
    ]
    return made[0], made[1], made[2]


def _nvfp4_casts(native: NativeRecipe) -> tuple[CastConfig, CastConfig, CastConfig, CastConfig, CastConfig]:
    x = CastConfig(format="e2m1", block="1x16", scale="two_level_e4m3")
    w = x.model_copy(update={"block": "16x16"}) if native.square else x
    dy = x.model_copy(update={"rounding": "stochastic", "noise_bits": 8}) if native.stochastic else x
    transform = HadamardConfig(size=16, signs="fixed", vector=TE_SIGNS, round_to="bf16") if native.rotated else None
    return x, w, dy, dy.model_copy(update={"hadamard": transform}), x.model_copy(update={"hadamard": transform})


def express(casts: Mapping[str, CastConfig]) -> tuple[NativeRecipe | None, list[tuple[str, str]]]:
    """Return (Transformer Engine's recipe that makes exactly `casts`, []), or (None, [(slot, difference), ...])."""
    x, dy = casts["fprop.x"], casts["dgrad.dy"]
    kind = _kind(x)
    if x == UNQUANTIZED:
        return None, [("fprop.x", "high: Transformer Engine quantises no backward pass without the forward pass")]
    if kind is None:
        return None, [("fprop.x", f"{_words(x)}: Transformer Engine has no recipe with such an input")]
    backward = any(cast != UNQUANTIZED for slot, cast in casts.items() if not slot.startswith("fprop"))
    candidate = NativeRecipe(
        kind,
        dy.format if backward else "high",
        power_of_two=kind in ("current", "subchannel") and x.scale_kind.significant_bits == 0,
        square=casts["fprop.w"].block in ("32x32", "16x16"),
        rotated=casts["wgrad.x"].hadamard is not None,
        stochastic=dy.stochastic,
        delayed=x.delayed,
        scopes=tuple(_scope(casts, operand) for operand in ("x", "w", "dy")),
    )
    if backward and not dy.quantizes:
        return None, [("dgrad.dy", "high: Transformer Engine quantises either all of the backward pass or none of it")]
    if kind == "delayed" and not backward:
        return None, [("dgrad.dy", "high: Transformer Engine has no delayed scaling of the forward pass alone")]
    if dy.quantizes and (dy.number_format.engine_dtype is None or dy.number_format.unit != x.number_format.unit):
        return None, [("dgrad.dy", f"{_words(dy)}: Transformer Engine does not combine it with {_words(x)} inputs")]
    made = casts_of(candidate)
    differences = [
        (slot, f"{_words(casts[slot])}, and Transformer Engine's {candidate.name} has {_words(made[slot])}")
        for slot in casts
        if _without_scope(casts[slot]) != made[slot]
    ]
    return (None, differences) if differences else (candidate, [])


def _kind(x: CastConfig) -> Kind | None:
    """Return the configuration that the scale of `x` declares for its format and block, if any."""
    name = x.scale_kind.engine.get((x.format, x.block)) if x.quantizes else None
    return next((kind for kind in NAMES if kind == name), None)


def _scope(casts: Mapping[str, CastConfig], operand: str) -> str | None:
    own = {cast.amax_scope for slot, cast in casts.items() if slot.endswith(f".{operand}") and cast.quantizes}
    return "logical" if not own else own.pop() if len(own) == 1 else None


def _without_scope(cast: CastConfig) -> CastConfig:
    """Return `cast` without `amax_scope`, which has no effect if ranks have whole tensors; see `scopes`."""
    return cast.model_copy(update={"amax_scope": "logical"})


def _words(cast: CastConfig) -> str:
    """Return e.g. "e2m1 1x32 e8m0_floor stochastic", and every other key that has not its default."""
    if not cast.quantizes:
        return "high" if cast == UNQUANTIZED else f"high, but rotated or of {cast.source}"
    parts = [cast.format, cast.block, cast.scale, *([] if cast.rounding == "even" else [cast.rounding])]
    rest = cast.model_dump(exclude_defaults=True, exclude={"format", "block", "scale", "rounding", "amax_scope"})
    return " ".join([*parts, *(f"{key}={_brief(value)}" for key, value in rest.items() if value != {})])


def _brief(value: object) -> str:
    if isinstance(value, Mapping):
        return "(" + " ".join(f"{key}={each}" for key, each in value.items() if key != "vector") + ")"
    return str(value)


@functools.cache
def native_recipes(recipe: PrecisionConfig) -> tuple[dict[str, NativeRecipe], tuple[Problem, ...]]:
    """Return ({key of `cast_sets`: Transformer Engine's recipe}, problems of the sets that have none).

    Sets of casts that quantize nothing need no recipe: their GEMMs run in compute_dtype.
    """
    found, problems = dict[str, NativeRecipe](), []
    for key, casts in recipe.cast_sets().items():
        if all(cast == UNQUANTIZED for cast in casts.values()):
            continue
        native, differences = express(casts)
        prefix = f"precision.{key}" if key else "precision"
        problems += [Problem(f"{prefix}.{slot}", f"is {text}.") for slot, text in differences]
        if native is None:
            continue
        found[key] = native
        if recipe.compute_dtype == "fp32":
            problems.append(Problem("precision.compute_dtype", "is fp32: native GEMMs take bf16 or fp16."))
        if native.kind == "nvfp4" and recipe.compute_dtype == "fp16":
            problems.append(Problem("precision.compute_dtype", "is fp16: the rotation of NVFP4 takes only bf16."))
    return found, tuple(dict.fromkeys(problems))


def native_recipe(recipe: PrecisionConfig) -> tuple[NativeRecipe | None, tuple[Problem, ...]]:
    """Return (Transformer Engine's recipe for the own slots, else for the first other set, or None; problems)."""
    found, problems = native_recipes(recipe)
    return next(iter(found.values()), None), problems
