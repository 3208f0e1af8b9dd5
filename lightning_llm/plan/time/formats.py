"""In which format each GEMM of a linear is timed, and what the casts before it move. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_llm.config.schema.precision import CastConfig, PrecisionConfig
from lightning_llm.plan.time.device import FORMAT_BYTES, Device
from lightning_llm.precision.recipe.module_rules import reasons_to_stay_high, rule_of

GEMMS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
UNITS = {"e4m3": "fp8", "e5m2": "fp8", "e2m1": "fp4"}
"""The unit that multiplies each element format."""
ONE_READ = ("delayed", "e8m0_ceil", "e8m0_floor")
"""Scales that a cast knows, or finds, as it reads: of the others a whole tensor's amax comes first, another read."""


@dataclass(frozen=True)
class LinearFormats:
    """The format of each GEMM, and of x, w and dy the bytes that casting one element moves, 0 where none is cast."""

    gemms: Mapping[str, str]
    cast_bytes: Mapping[str, float]


class Formats:
    """The formats of a recipe's linears on a device, on whose units every cast slot is multiplied.

    `without_unit`: formats for which the cluster has no peak. Their GEMMs have no time.
    """

    def __init__(self, recipe: PrecisionConfig, names: list[str], num_layers: int, device: Device):
        self.recipe, self.num_layers, self.device = recipe, num_layers, device
        self._reasons = reasons_to_stay_high(names, recipe, num_layers)
        self._high = LinearFormats(dict.fromkeys(GEMMS, recipe.compute_dtype), {})
        self._made: dict[int | None, LinearFormats] = {}
        self.units: set[str] = set()
        """Units of low precision that GEMMs are timed on."""
        self.without_unit: set[str] = set()
        for name in names:
            self.of(name)

    def of(self, name: str) -> LinearFormats:
        """Return those of the linear with the full `name`; of the head that a tied embedding is, the compute dtype."""
        if self._reasons.get(name, "no linear") is not None:
            return self._high
        number = rule_of(name, self.recipe.modules, self.num_layers)
        if number not in self._made:
            self._made[number] = self._of_casts(self.recipe.casts_under(number))
        return self._made[number]

    def _of_casts(self, casts: Mapping[str, CastConfig]) -> LinearFormats:
        gemms: dict[str, str] = {}
        moved: dict[str, float] = {}
        for gemm, operands in GEMMS.items():
            units = {UNITS.get(casts[f"{gemm}.{operand}"].format) for operand in operands}
            unit = "fp8" if units == {"fp8", "fp4"} else units.pop() if len(units) == 1 else None
            if unit is not None and self.device.peak(unit) is None:
                self.without_unit.add(unit)
                unit = None
            gemms[gemm] = unit or self.recipe.compute_dtype
            self.units |= {unit} if unit else set()
            for operand in operands if unit else ():
                wide = FORMAT_BYTES[self.recipe.compute_dtype]
                reads = 1 if casts[f"{gemm}.{operand}"].scale in ONE_READ else 2
                # Read once for both directions that it is multiplied in, written for each.
                moved[operand] = (moved.get(operand) or reads * wide) + FORMAT_BYTES[unit or "fp8"]
        return LinearFormats(gemms, moved)
