"""Checks of each rank's device and disk: GEMMs of each number format, memory (size, speed, faults), writes and reads.

`Extent` sets the amount of work: full for the verb, short before a run.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_llm.base.hardware import device_name, peak_flops_per_second
from lightning_llm.health.ranks import Ranks, Timer
from lightning_llm.linalg.gemm import product


@dataclass(frozen=True)
class Extent:
    """Amount of work of a health check: `FULL` for the verb `health`, `SHORT` before a run."""

    sizes_bytes: tuple[int, ...]
    """Sizes at which collectives are measured."""
    size_seconds: float
    """Time for which a collective is repeated at each size, about."""
    product_side: int
    """Rows and columns of the matrices of a GEMM."""
    copy_bytes: int
    """Size of a memory copy."""
    verify_bytes: int
    """Largest amount of memory that is written and read back."""
    link_bytes: int | None = None
    """Size of a message between two ranks; None: links are not measured."""
    disk_bytes: int | None = None
    """Size of the file written to the disk; None: the disk is not measured."""


FULL = {
    "cpu": Extent((1 << 10, 1 << 16, 1 << 20, 1 << 23), 0.2, 512, 1 << 25, 1 << 26, 1 << 20, 1 << 26),
    "cuda": Extent((1 << 13, 1 << 20, 1 << 25, 1 << 28), 0.5, 8192, 1 << 30, 1 << 35, 1 << 25, 1 << 28),
}
SHORT = {
    "cpu": Extent((1 << 16,), 0.02, 256, 1 << 25, 1 << 22),
    "cuda": Extent((1 << 20, 1 << 25), 0.1, 4096, 1 << 28, 1 << 30),
}
"""Amount of work of the check before a run (`trainer.health`), by kind of device; links and disks are left out."""
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = (*DTYPES, "fp8")
"""Formats in which speed is measured. Not fp4: torch has no documented way to pass its block scales."""
LARGEST_OPERAND = 2


def formats_of(device: torch.device) -> tuple[str, ...]:
    """Return the names of the number formats in which GEMMs are measured on `device`, such as ("fp32", "bf16").

    On a GPU those that its compute capability supports, on a CPU those that models use.
    """
    if device.type != "cuda":
        return "fp32", "bf16"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return "fp32", "fp16"
    return FORMATS if capability >= (8, 9) else ("fp32", "tf32", "bf16", "fp16")


def peak_tflops(device: torch.device, number_format: str) -> float | None:
    """Return the dense peak of `device` by its data sheet, in 10^12 FLOP/s; None if it is not in the tables (CPUs)."""
    peak = peak_flops_per_second(device_name(device), number_format)
    return None if peak is None else peak / 1e12


class SquareProduct:
    """A GEMM of two square matrices with `side` rows in one number format, with the same operands on every rank.

    Operands are small integers, so that the exact result is known.
    """

    def __init__(self, number_format: str, side: int, device: torch.device):
        self.number_format, self.side = number_format, side
        generator = torch.Generator().manual_seed(0)
        draw = partial(torch.randint, -LARGEST_OPERAND, LARGEST_OPERAND + 1, (side, side), generator=generator)
        self.a, self.b = (draw(dtype=torch.int8).to(device).float() for _ in range(2))
        if number_format == "fp8":
            self.left, self.right = (each.to(torch.float8_e4m3fn) for each in (self.a, self.b.t().contiguous().t()))
        else:
            self.left, self.right = (each.to(DTYPES[number_format]) for each in (self.a, self.b))

    @property
    def flops(self) -> int:
        """Floating-point operations of one product."""
        return 2 * self.side**3

    def run(self) -> Tensor:
        """Multiply once; return the product, [side, side]."""
        if self.number_format == "fp8":
            return fp8_product(self.left, self.right)
        with _fp32_as(self.number_format):
            return product(self.left, self.right)

    def wrong_elements(self) -> int:
        """Multiply once; return how many elements of the product are wrong.

        If even the fp32 product, computed for reference, has wrong row sums, return the number of such rows instead.
        """
        with _fp32_as("fp32"):
            exact = self.a @ self.b
        ones = torch.ones(self.side, dtype=torch.float64, device=exact.device)
        wrong = (exact.double() @ ones) != (self.a.double() @ (self.b.double() @ ones))
        if bool(wrong.any()):
            return int(wrong.sum())
        found = self.run()
        return int((found != exact.to(found.dtype)).sum())


def fp8_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of fp8 `a` [M, K] (row-major) and `b` [K, N] (column-major) in bf16, with scales of 1."""
    one, whole = torch.ones((), device=a.device), F.ScalingType.TensorWise
    return F.scaled_mm(a, b, one, whole, one, whole, output_dtype=torch.bfloat16)


@contextmanager
def _fp32_as(number_format: str) -> Iterator[None]:
    """Context in which fp32 matrices are multiplied as tf32, or in full fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if number_format == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


PATTERNS = (0x5555555555555555, ~0x5555555555555555)
"""Every bit is written as 0 and 1, combined with the address, so that aliased addresses are detected, too."""
CHUNK_BYTES = 1 << 30


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return (free, total) bytes of memory: of a CUDA `device`, otherwise of the machine."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)


class Copy:
    """Two buffers of `size_bytes` in the device's memory; `run` copies one to the other."""

    def __init__(self, size_bytes: int, device: torch.device):
        self.source = torch.ones(size_bytes // 4, device=device)
        self.target = torch.zeros_like(self.source)

    def run(self) -> None:
        """Copy the source buffer to the target buffer once."""
        self.target.copy_(self.source)


def wrong_words(size_bytes: int, device: torch.device) -> int:
    """Fill `size_bytes` of memory with known patterns, then read them; return how many 8-byte words have changed.

    All of it is written before any is read. 0 means that the memory is intact.
    """
    whole, rest = divmod(size_bytes, CHUNK_BYTES)
    counts = [count for count in [*[CHUNK_BYTES // 8] * whole, rest // 8] if count]
    chunks = [torch.empty(count, dtype=torch.int64, device=device) for count in counts]
    return sum(_wrong_words(chunks, each) for each in PATTERNS)


def _wrong_words(chunks: list[torch.Tensor], bits: int) -> int:
    for number, chunk in enumerate(chunks):
        _written(chunk, number, bits)
    read = [
        int((chunk != _written(torch.empty_like(chunk), number, bits)).sum()) for number, chunk in enumerate(chunks)
    ]
    return sum(read)


def _written(chunk: torch.Tensor, number: int, bits: int) -> torch.Tensor:
    """Fill `chunk`, number `number`, with the pattern of `bits`; return it."""
    first = number * (CHUNK_BYTES // 8)
    torch.arange(first, first + len(chunk), out=chunk)
    return chunk.bitwise_xor_(bits)


COPY = "memory copy"
WARM_UP_ROUNDS = 2


def gemm(number_format: str) -> str:
    """Return the name of GEMMs in `number_format` as a kind of work: "bf16 GEMM"."""
    return f"{number_format} GEMM"


def shares_cores(ranks: Ranks, device: torch.device) -> bool:
    """Return whether ranks of any machine have more CPU threads than cores, so that they slow each other.
    Collective."""
    here = device.type != "cuda" and ranks.local_world * torch.get_num_threads() > (os.cpu_count() or 1)
    return any(ranks.share(here))


def device_seconds(
    ranks: Ranks, device: torch.device, timer: Timer, extent: Extent, rounds: int, wrong: list[str]
) -> list[dict[str, list[float]]]:
    """Time GEMMs and memory copies on all ranks; return seconds as `result[rank][kind of work][round]`. Collective.

    Wrong GEMM results are added to `wrong` as lines. All ranks work at the same time. Ranks that share cores take
    turns, in an order that rotates each round, so that none is favored by its position.
    """
    products = {each: SquareProduct(each, extent.product_side, device) for each in formats_of(device)}
    work: dict[str, Callable[[], Any]] = {gemm(name): product.run for name, product in products.items()}
    work[COPY] = Copy(extent.copy_bytes, device).run
    wrong += _product_faults(ranks, products)
    turns = max(ranks.share(ranks.local_world)) if shares_cores(ranks, device) else 1
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(WARM_UP_ROUNDS + rounds):
        mine = (ranks.local_rank + number) % turns
        for name, call in work.items():
            for turn in range(turns):
                ranks.meet()
                if turn == mine:
                    seconds[name].append(timer.seconds(call))
    return ranks.share({name: its[WARM_UP_ROUNDS:] for name, its in seconds.items()})


def _product_faults(ranks: Ranks, products: dict[str, SquareProduct]) -> Iterator[str]:
    every = ranks.share({name: each.wrong_elements() for name, each in products.items()})
    for rank, its in enumerate(every):
        for name, count in its.items():
            if count:
                yield f"{gemm(name)}: {count} elements on {ranks.name(rank)} are wrong"


BLOCK_BYTES = 4 << 20
RECORD_BYTES = 4096
RECORDS = 20


@dataclass(frozen=True)
class DiskReport:
    """Measurements of the disk that contains a folder."""

    folder: str
    free_bytes: int
    total_bytes: int
    written_bytes: int
    """Size of the file that was written and read."""
    write_gb_per_second: float
    read_gb_per_second: float
    fsync_seconds: float
    """Median seconds to append a record of `RECORD_BYTES` and sync it."""
    wrong: bool
    """Whether the disk returned other bytes than were written."""

    @property
    def fsyncs_per_second(self) -> float:
        """Number of records that can be appended and synced per second."""
        return 1 / self.fsync_seconds


def nearest_folder(folder: Path) -> Path:
    """Return `folder`, or its nearest existing parent."""
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())


def measure_disk(folder: Path, size_bytes: int) -> DiskReport:
    """Measure the disk of `folder`: write a file, read it without the page cache, and append records with fsync.

    The file has `size_bytes`, but at most a tenth of the free bytes, and is in `folder` or its nearest existing parent.
    The time of writing includes fsync. The file is removed.

    Raises:
        OSError: the folder is not writable.
    """
    there = nearest_folder(folder)
    usage = shutil.disk_usage(there)
    blocks = max(1, min(size_bytes, usage.free // 10) // BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=there, buffering=0) as file:
        number = file.fileno()
        contents = list(_blocks(blocks))
        start = time.perf_counter()
        for block in contents:
            _write(number, block)
        os.fsync(number)
        written = time.perf_counter() - start
        if hasattr(os, "posix_fadvise"):  # Linux: drop clean pages from the cache
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        read = [os.pread(number, BLOCK_BYTES, each * BLOCK_BYTES) for each in range(blocks)]
        reading = time.perf_counter() - start
        latency = median(_synced_seconds(number) for _ in range(RECORDS))
    size = blocks * BLOCK_BYTES
    speeds = size / written / 1e9, size / reading / 1e9
    return DiskReport(str(there), usage.free, usage.total, size, *speeds, latency, read != contents)


def _blocks(count: int) -> Iterator[bytes]:
    """Yield random blocks, which a file system cannot compress: rotations of the same bytes."""
    content = os.urandom(BLOCK_BYTES)
    for each in range(count):
        yield content[each:] + content[:each]


def _write(number: int, content: bytes) -> None:
    done = 0
    while done < len(content):
        done += os.write(number, content[done:])


def _synced_seconds(number: int) -> float:
    start = time.perf_counter()
    _write(number, b"\0" * RECORD_BYTES)
    os.fsync(number)
    return time.perf_counter() - start
