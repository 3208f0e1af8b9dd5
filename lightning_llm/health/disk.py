"""The disk that runs are written to: free bytes, speeds past the page cache, and how long a record takes to be safe."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

BLOCK_BYTES = 4 << 20
RECORD_BYTES = 4096
RECORDS = 20


@dataclass(frozen=True)
class DiskReport:
    """What the disk of `folder` does; `wrong`: it gave other bytes back than it was given."""

    folder: str
    free_bytes: int
    total_bytes: int
    written_bytes: int
    write_gb_per_second: float
    read_gb_per_second: float
    fsync_seconds: float
    wrong: bool

    @property
    def fsyncs_per_second(self) -> float:
        """How many records a second could be made safe."""
        return 1 / self.fsync_seconds


def nearest_folder(folder: Path) -> Path:
    """Return `folder`, or the nearest above it that is there."""
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())


def measure_disk(folder: Path, size_bytes: int) -> DiskReport:
    """Write a file of `size_bytes` near `folder`, read it past the page cache, and write records that are synced.

    A write counts until the disk has it (fsync). Nothing is left behind. At most a tenth of the free bytes are written.

    Raises:
        OSError: it cannot be written there.
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
        if hasattr(os, "posix_fadvise"):  # Linux: clean pages leave the cache
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        read = [os.pread(number, BLOCK_BYTES, each * BLOCK_BYTES) for each in range(blocks)]
        reading = time.perf_counter() - start
        latency = median(_synced_seconds(number) for _ in range(RECORDS))
    size = blocks * BLOCK_BYTES
    speeds = size / written / 1e9, size / reading / 1e9
    return DiskReport(str(there), usage.free, usage.total, size, *speeds, latency, read != contents)


def _blocks(count: int) -> Iterator[bytes]:
    """Yield random blocks, which no file system stores in less: the same bytes, turned by as many places."""
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
