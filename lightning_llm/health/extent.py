"""How much a check measures: in full by the verb, in short before a run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Extent:
    """`sizes_bytes`: of collectives, each timed for some `size_seconds`; `product_side`: of the matrices of GEMMs.

    `copy_bytes`: of a memory copy; `verify_bytes`: at most so much memory is written and read. `link_bytes`: of a
    message between two ranks, `disk_bytes`: of a file; None: not at all.
    """

    sizes_bytes: tuple[int, ...]
    size_seconds: float
    product_side: int
    copy_bytes: int
    verify_bytes: int
    link_bytes: int | None = None
    disk_bytes: int | None = None


FULL = {
    "cpu": Extent((1 << 10, 1 << 16, 1 << 20, 1 << 23), 0.2, 512, 1 << 25, 1 << 26, 1 << 20, 1 << 26),
    "cuda": Extent((1 << 13, 1 << 20, 1 << 25, 1 << 28), 0.5, 8192, 1 << 30, 1 << 35, 1 << 25, 1 << 28),
}
SHORT = {
    "cpu": Extent((1 << 16,), 0.02, 256, 1 << 25, 1 << 22),
    "cuda": Extent((1 << 20, 1 << 25), 0.1, 4096, 1 << 28, 1 << 30),
}
"""By kind of device."""
