"""How long a device takes for a GEMM, and for bytes: a roofline. Imports no torch."""

import math
from dataclasses import dataclass

from lightning_llm.base.hardware import COMPUTE_UNITS, planned_peak_flops
from lightning_llm.config.schema import ClusterConfig

FORMAT_BYTES = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5}
TILES = ((256, 128), (128, 256), (128, 128))
"""Rows and columns of a product that a compute unit works on at once: smaller tiles do not feed tensor cores."""
SPLITS = (1, 2, 4, 8, 16)
"""Into how many parts the summed axis may be cut, each a tile of its own, where there are few tiles ("split-K")."""


@dataclass(frozen=True)
class Device:
    """One device of a cluster."""

    cluster: ClusterConfig

    def peak(self, number_format: str) -> float | None:
        """Return the peak of GEMMs in `number_format`, FLOP/s: measured, or the data sheet's; None: no such unit."""
        if (measured := self.cluster.peak_tflops) is not None:
            return measured[number_format] * 1e12 if number_format in measured else None
        return planned_peak_flops(self.cluster.hardware, number_format)

    def mixer_format(self, compute_dtype: str, *, recurrent: bool) -> str:
        """Return the format of a mixer's own products: on a CPU attention multiplies in fp32."""
        on_cpu = self.cluster.hardware == "cpu" and not recurrent
        return "fp32" if on_cpu and self.peak("fp32") is not None else compute_dtype

    def bytes_seconds(self, moved: float, operators: float = 1) -> float:
        """Return the time in which `operators` read and write `moved` bytes of memory together."""
        return moved / (self.cluster.memory_gb_per_second * 1e9) + operators * self.cluster.operator_microseconds * 1e-6

    def gemm_seconds(self, rows: float, columns: float, summed: float, number_format: str) -> float:
        """Return the time of `[rows, summed] x [summed, columns]` with a 16-bit product.

        What takes longer of arithmetic and memory. Arithmetic at peak, in tiles that run in waves of as many as there
        are compute units: the last wave takes as long as a full one (https://docs.nvidia.com/deeplearning/performance/
        dl-performance-matrix-multiplication, "wave quantization"). Memory: operands and product move once.
        Raises ValueError where the device has no such unit.
        """
        peak = self.peak(number_format)
        if peak is None:
            raise ValueError(f"{self.cluster.hardware} multiplies no {number_format}")
        width = FORMAT_BYTES[number_format]
        moved = width * summed * (rows + columns) + max(2.0, width) * rows * columns
        units = COMPUTE_UNITS.get(self.cluster.hardware)
        flops = 2 * rows * columns * summed if units is None else self._tiled_flops(rows, columns, summed, units)
        return max(flops / peak, self.bytes_seconds(moved, 0)) + self.bytes_seconds(0)

    def _tiled_flops(self, rows: float, columns: float, summed: float, units: int) -> float:
        """Return the FLOPs that the device could do in the waves that the fastest tiling takes."""
        best = math.inf
        for tile_rows, tile_columns in TILES:
            tiles = math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
            for parts in SPLITS:
                waves = math.ceil(tiles * parts / units)
                best = min(best, waves * units * 2 * tile_rows * tile_columns * math.ceil(summed / parts))
        return best
