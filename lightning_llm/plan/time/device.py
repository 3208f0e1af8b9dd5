"""Speed of a device: a roofline of GEMMs and bytes, the formats of a recipe's GEMMs, and the FLOPs of MFU.

MFU is the time of the needed FLOPs at the peaks of their formats, divided by the time of the step. For one format that
is the usual ratio of rates (Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B). For a mixture it is relative to
the mixture's peak, sum F_i / sum (F_i / P_i), the harmonic mean weighted by work (J. E. Smith, "Characterizing computer
performance with a single number", CACM 31 (1988) 1202-1206).

PaLM counts all T x T scores of attention, but causal kernels compute half of them, so with long sequences its MFU can
exceed 100 %. Here a token attends to itself and the tokens before it within its window, consistent with the kernels'
time.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_llm.base.hardware import COMPUTE_UNITS, planned_peak_flops
from lightning_llm.config.schema import ClusterConfig, Config
from lightning_llm.config.schema.precision import CastConfig, PrecisionConfig
from lightning_llm.model.structure import block_linears, feed_forward_of, for_layers, mixer_of
from lightning_llm.precision.module_rules import (
    alike_experts,
    reasons_to_stay_unquantized,
    rule_in_effect,
)

FORMAT_BYTES = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5}
TILES = ((256, 128), (128, 256), (128, 128))
"""Rows and columns of a product per compute unit: smaller tiles do not saturate tensor cores."""
SPLITS = (1, 2, 4, 8, 16)
"""Numbers of parts that the summed axis may be split into if there are few tiles ("split-K")."""


@dataclass(frozen=True)
class Device:
    """One device of a cluster."""

    cluster: ClusterConfig

    def peak(self, number_format: str) -> float | None:
        """Return the peak of GEMMs in `number_format`, FLOP/s, measured or from the data sheet; None without a unit."""
        if (measured := self.cluster.peak_tflops) is not None:
            return measured[number_format] * 1e12 if number_format in measured else None
        return planned_peak_flops(self.cluster.hardware, number_format)

    def required_peak(self, number_format: str) -> float:
        """Return `peak`. Raises ValueError if the device has no such unit."""
        if (peak := self.peak(number_format)) is None:
            raise ValueError(f"{self.cluster.hardware} has no unit for {number_format}")
        return peak

    def mixer_format(self, compute_dtype: str, *, recurrent: bool) -> str:
        """Return the format of a mixer's kernel: fp32 for attention on a CPU, else `compute_dtype`."""
        on_cpu = self.cluster.hardware == "cpu" and not recurrent
        return "fp32" if on_cpu and self.peak("fp32") is not None else compute_dtype

    def bytes_seconds(self, moved: float, operators: float = 1) -> float:
        """Return the seconds that `operators` kernels take to read and write `moved` bytes of memory in total."""
        return moved / (self.cluster.memory_gb_per_second * 1e9) + operators * self.cluster.operator_microseconds * 1e-6

    def gemm_seconds(self, rows: float, columns: float, summed: float, number_format: str) -> float:
        """Return the seconds of `[rows, summed] x [summed, columns]` with a 16-bit product.

        The maximum of arithmetic and memory time. Arithmetic runs at peak in waves of one tile per compute unit; the
        last wave takes as long as a full one
        (https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication, "wave quantization").
        Operands and product move once.

        Raises:
            ValueError: the device has no such unit.
        """
        peak = self.required_peak(number_format)
        width = FORMAT_BYTES[number_format]
        moved = width * summed * (rows + columns) + max(2.0, width) * rows * columns
        units = COMPUTE_UNITS.get(self.cluster.hardware)
        flops = 2 * rows * columns * summed if units is None else self._tiled_flops(rows, columns, summed, units)
        return max(flops / peak, self.bytes_seconds(moved, 0)) + self.bytes_seconds(0)

    def _tiled_flops(self, rows: float, columns: float, summed: float, units: int) -> float:
        """Return the FLOPs that the device could do in the waves of the fastest tiling."""
        best = math.inf
        for tile_rows, tile_columns in TILES:
            tiles = math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
            for parts in SPLITS:
                waves = math.ceil(tiles * parts / units)
                best = min(best, waves * units * 2 * tile_rows * tile_columns * math.ceil(summed / parts))
        return best


GEMMS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}


@dataclass(frozen=True)
class LinearFormats:
    """The format of each GEMM, and the bytes moved by casting one element of x, w and dy."""

    gemms: Mapping[str, str]
    cast_bytes: Mapping[str, float]


class Formats:
    """The formats of a recipe's linears on a device, assuming that cast operands are multiplied on its units.

    `without_unit`: formats without a peak in the cluster. Their GEMMs have no time.
    """

    def __init__(
        self, recipe: PrecisionConfig, names: list[str], num_layers: int, device: Device, experts: Mapping[str, int]
    ):
        """`experts`: numbers of experts by linear of `names`."""
        self.recipe, self.num_layers, self.device = recipe, num_layers, device
        self._experts, self._parts = experts, dict[str, list[tuple[LinearFormats, float]]]()
        groups = (alike_experts(name, experts.get(name, 1), recipe, num_layers) for name in names)
        names = [name for every in groups for name, _ in every]
        self._reasons = reasons_to_stay_unquantized(names, recipe, num_layers)
        self._high = LinearFormats(dict.fromkeys(GEMMS, recipe.compute_dtype), {})
        self._made: dict[int | None, LinearFormats] = {}
        self.units: set[str] = set()
        """Low-precision units that GEMMs are timed on."""
        self.without_unit: set[str] = set()
        for name in names:
            self.of(name)

    def of(self, name: str) -> LinearFormats:
        """Return the formats of the linear with the full `name`; a tied head has the compute dtype."""
        if self._reasons.get(name, "no linear") is not None:
            return self._high
        number = rule_in_effect(name, self.recipe, self.num_layers)
        if number not in self._made:
            self._made[number] = self._of_casts(self.recipe.casts_under(number))
        return self._made[number]

    def parts(self, name: str) -> list[tuple[LinearFormats, float]]:
        """Return (formats, share of experts) for each group of experts of the linear `name` with the same formats."""
        if name not in self._parts:
            experts = self._experts.get(name, 1)
            groups = alike_experts(name, experts, self.recipe, self.num_layers)
            self._parts[name] = [(self.of(place), count / experts) for place, count in groups]
        return self._parts[name]

    def _of_casts(self, casts: Mapping[str, CastConfig]) -> LinearFormats:
        gemms: dict[str, str] = {}
        moved: dict[str, float] = {}
        for gemm, operands in GEMMS.items():
            of_gemm = [casts[f"{gemm}.{operand}"] for operand in operands]
            units = {cast.number_format.unit if cast.quantizes else None for cast in of_gemm}
            unit = "fp8" if units == {"fp8", "fp4"} else units.pop() if len(units) == 1 else None
            if unit is not None and self.device.peak(unit) is None:
                self.without_unit.add(unit)
                unit = None
            gemms[gemm] = unit or self.recipe.compute_dtype
            self.units |= {unit} if unit else set()
            for operand in operands if unit else ():
                wide = FORMAT_BYTES[self.recipe.compute_dtype]
                reads = casts[f"{gemm}.{operand}"].scale_kind.reads
                # Read once for both directions, written for each.
                moved[operand] = (moved.get(operand) or reads * wide) + FORMAT_BYTES[unit or "fp8"]
        return LinearFormats(gemms, moved)


@dataclass(frozen=True)
class NeededFlops:
    """FLOPs of training on one token by number format, and the device's peak in each format in FLOP/s."""

    flops: Mapping[str, float]
    peaks: Mapping[str, float]

    @property
    def total(self) -> float:
        """Total FLOPs over all formats."""
        return sum(self.flops.values())

    @property
    def seconds(self) -> float:
        """Seconds that one device needs for the FLOPs of one token at peak speed."""
        return sum(value / self.peaks[each] for each, value in self.flops.items())

    @property
    def peak(self) -> float:
        """The peak of the mixture in FLOP/s."""
        return self.total / self.seconds

    def text(self) -> str:
        """Return the peak as text, e.g. "the bf16 peak 989.5 TFLOP/s"; for a mixture with the formats' shares."""
        if len(self.flops) == 1:
            return f"the {next(iter(self.flops))} peak {self.peak / 1e12:,.4g} TFLOP/s"
        shares = (
            f"{value / self.total:.0%} of FLOPs {each} at {self.peaks[each] / 1e12:,.4g}"
            for each, value in sorted(self.flops.items(), key=lambda item: -item[1])
        )
        return f"the mixture's peak {self.peak / 1e12:,.4g} TFLOP/s ({', '.join(shares)})"


def needed_flops(config: Config, formats: Formats, device: Device) -> NeededFlops:
    """Return the needed FLOPs of a token of `config` with `formats` for its linears.

    Raises:
        ValueError: the device has no peak for one of the formats.
    """
    model, length = config.model, config.data.sequence_length
    flops: dict[str, float] = defaultdict(float)

    def add_linear(name: str, elements: int) -> None:
        for made, share in formats.parts(name):
            for gemm in GEMMS:
                flops[made.gemms[gemm]] += 2 * elements * share

    layers = range(model.num_layers)
    shapes = for_layers(
        model, layers, lambda at: [(each.name, each.active_elements) for each in block_linears(model, at)]
    )
    for index, linears in zip(layers, shapes, strict=True):
        for name, elements in linears:
            add_linear(f"layers.{index}.{name}", elements)
    add_linear("head", model.vocab_size * model.hidden_size)
    for index in layers:
        mixer = mixer_of(model, index)
        share = 1.0
        if not mixer.recurrent:
            seen = min(mixer.window_tokens(model) or length, length)
            share = 1 - seen / (2 * length)
        number_format = device.mixer_format(config.precision.compute_dtype, recurrent=mixer.recurrent)
        flops[number_format] += share * mixer.flops_per_token(model, length)
        flops[number_format] += feed_forward_of(model, index).flops_per_token(model, length)
    return NeededFlops(dict(flops), {each: device.required_peak(each) for each in flops})
