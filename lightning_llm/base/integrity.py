"""Does a file hold what was written? Getting it to the disk, digests of content, and JSON files with their own.

XXH3 with 128 bits (https://xxhash.com): a checkpoint must be verified in less time than it is read, and on one core it
goes at 5 GB/s where SHA-256 takes 0.9. It finds what decays, is torn or mixed up; it is no proof against a forger, who
would write the digest anew: reading must be safe by the format alone.
"""

import errno
import json
import os
import pickle
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128, xxh3_128_hexdigest

BLOCK_BYTES = 1 << 20
SEAL = "digest"
"""The key of a sealed JSON file that holds the digest of all the rest."""


@dataclass(frozen=True)
class FileContent:
    """What a file was written with: its size and 32 hex digits over its bytes, None where none were taken."""

    size_bytes: int
    digest: str | None

    @classmethod
    def of(cls, content: bytes) -> "FileContent":
        """Return the size and digest of `content`."""
        return cls(len(content), xxh3_128_hexdigest(content))


def sync_to_disk(path: Path) -> None:
    """Return when what was written to the file, or the names in the folder, at `path` are on the disk. Raises OSError.

    A file under its new name is safe from a power failure only when its folder is, too.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of_file(file: Path) -> str:
    """Return 32 hex digits over the bytes of `file`. Raises OSError."""
    digest, block = xxh3_128(), bytearray(BLOCK_BYTES)
    view = memoryview(block)
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(block):
            digest.update(view[:count])
    return digest.hexdigest()


def read_regular(file: Path) -> bytes:
    """Return the content of `file`. Raises OSError for a pipe or a device, too, which might never end."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would wait for one
    with open(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", str(file))
        return opened.read()


def file_mark(file: Path) -> list[int]:
    """Return size, times and inode of `file`: they change when it is written to or replaced. Raises OSError.

    The change time (ctime) is there because programs such as `cp -p` and `rsync -t` set the modification time.
    """
    its = file.stat()
    return [its.st_size, its.st_mtime_ns, its.st_ctime_ns, its.st_ino]


def size_problem(file: Path, written: FileContent) -> str | None:
    """Return what is wrong with the size of `file`, None if nothing is."""
    try:
        found = file.stat().st_size
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return (
        None if found == written.size_bytes else f"has {found:,} bytes of the {written.size_bytes:,} that were written"
    )


def content_problem(file: Path, written: FileContent) -> str | None:
    """Return what is wrong with `file` by its size and bytes, None if it holds what was written."""
    return size_problem(file, written) or digest_problem(file, written.digest)


def digest_problem(file: Path, written: str | None) -> str | None:
    """Return what is wrong with `file` by its bytes, None if they have the digest `written`, or that is unknown."""
    try:
        found = digest_of_file(file)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if written in (None, found):
        return None
    return f"does not hold what was written (digest {found[:8]}, {str(written)[:8]} when written)"


def seal(values: Mapping[str, Any]) -> bytes:
    """Return JSON data as bytes that end with their own digest; `unseal` takes them back."""
    return _encoded({**values, SEAL: xxh3_128_hexdigest(_encoded(values))})


def unseal(content: bytes) -> dict[str, Any]:
    """Return what was sealed, without its digest.

    Raises:
        ValueError: what is wrong, as the rest of a sentence that begins with the file.
    """
    values = parse_object(content)
    if values.pop(SEAL, None) is None:
        raise ValueError("has no digest: an earlier release wrote it, or it is damaged")
    if seal(values) != content:
        raise ValueError("does not hold what was written (its own digest differs)")
    return values


def parse_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object in `content`. Raises ValueError as `unseal` does."""
    try:
        values = json.loads(content, object_pairs_hook=each_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError("is no JSON object")
    return values


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises ValueError where it has a key twice, of which readers take either."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index]))
        raise ValueError(f"{twice!r} is given twice")
    return found


def _encoded(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, indent=1).encode()


def unpickling_problem(error: pickle.UnpicklingError) -> str:
    """Return what `torch.load(weights_only=True)` refused, as the rest of a sentence, less its advice to trust it."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    return f"names {named[1]}, which is no data; nothing of it has run" if named else "holds no data that can be read"
