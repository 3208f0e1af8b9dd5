"""The shipped recipes, as the tests load them, and casts to the number formats that none of them has."""

from functools import cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_llm.config.schema.number_formats import NUMBER_FORMATS
from lightning_llm.config.schema.precision import CastConfig, PrecisionConfig, slots_of

FOLDER = Path(__file__).parents[2] / "conf" / "precision"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml"))

ALIKE = (
    "mxfp4_sr_fp8", "mxfp4_sr_norht", "mxfp4_rht_rne", "nvfp4_all_blocks", "fp16_mxfp8_hybrid", "fp8_rowwise_gw_hp",
    "fp8_subchannel_ue8m0", "fp8_mlp", "fp8_unit", "int8_rowwise", "mxfp6", "mxfp8_wgrad_hp", "mxfp8_bwd_dequantized",
    "mxfp8_bwd_high_fwd", "mxfp8_fwd_nvfp4_bwd", "nvfp4_bwd_dequantized", "nvfp4_1d_weight", "nvfp4_late_bf16_fwd",
    "fp4_all_the_way", "tetrajet_v2",
)  # fmt: skip
"""Other combinations of the casts that the others have."""


def sample(names):
    """Return parameters of a test over recipes: those of `ALIKE` are for `make test-full`."""
    return [pytest.param(name, marks=pytest.mark.full) if name in ALIKE else name for name in names]


@cache
def load(name):
    return PrecisionConfig.model_validate(OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"), resolve=True))


CASTS = {f"{name}:{slot}": cast for name in RECIPES for slot, cast in slots_of(load(name)).items() if cast.quantizes}
SHIPPED = {cast: label for label, cast in CASTS.items()}
"""Every cast that quantises by "recipe:slot", and each of them once, with the last of its names."""
KINDS = {
    "ceil": {"block": "1x32", "scale": "e8m0_ceil"},
    "SR": {"block": "32x32", "scale": "e8m0_floor", "rounding": "stochastic"},
    "fp32": {"block": "1x128"},
}
OTHER_FORMATS = {
    CastConfig(format=name, **keys): f"{name} {kind}"
    for name in NUMBER_FORMATS
    if name not in {cast.format for cast in SHIPPED}
    for kind, keys in KINDS.items()
}
OTHER_KINDS = {
    CastConfig.model_validate(keys): label
    for label, keys in {
        "rows": {"format": "e4m3", "block": "row", "scale": "power_of_two"},
        "int8 rows": {"format": "int8", "block": "row"},
        "blocks of 3 x 24": {"format": "e3m2", "block": "3x24", "scale": "e8m0_ceil"},
        "even exponents": {"format": "e2m3", "block": "1x32", "scale": "e8m0_even"},
        "no scale": {"format": "e5m2", "scale": "unit"},
        "a grid": {
            "format": {"mantissa": 1, "min_exponent": -3, "max_exponent": 3, "max": 8}, "block": "1x16",
            "scale": "power_of_two", "headroom": 0.75, "rounding": "stochastic",
        },
        "NVFP4 with headroom": {
            "format": "e2m1", "block": "1x16", "scale": "two_level_e4m3", "headroom": 16 / 17,
            "rounding": "stochastic_compare",
        },
        "4/6": {"format": "e2m1", "block": "1x16", "scale": "two_level_e4m3", "candidates": {}, "scale_max": 256},
        "4/6 of rows by the largest error": {
            "format": "e2m1", "block": "1x16", "scale": "two_level_e4m3", "candidates": {"by": "max"}, "amax": "row",
        },
    }.items()
}  # fmt: skip
"""Casts of kinds that no shipped recipe has."""
DISTINCT = SHIPPED | OTHER_FORMATS | OTHER_KINDS
