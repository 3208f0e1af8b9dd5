"""Check of the disk of a run folder: free bytes, speeds without the page cache, and seconds to fsync a record."""

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
