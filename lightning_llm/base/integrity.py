"""Integrity of files: syncing to disk, digests of content, checksummed JSON files, and hash chains over their lines.

Digests are XXH3-128 (https://xxhash.com), which runs at 5 GB/s on one core (SHA-256: 0.9 GB/s), so that verifying a
checkpoint takes less time than reading it. They detect corruption, torn writes and mix-ups, but not forgery, since a
digest can be recomputed: file formats must be safe to read by themselves.

A hash chain over the lines of `metrics.jsonl` verifies the step metrics of a run. It starts at 16 zero bytes; each line
with its newline extends it: digest = BLAKE2b-128(previous digest, line). Its head is stored in the manifest of each
checkpoint and in the summary of a run that ended. It is not a signature either.
"""

import errno
import json
import os
import pickle
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from xxhash import xxh3_128, xxh3_128_hexdigest

BLOCK_BYTES = 1 << 20
SEAL = "digest"
"""Key of a checksummed JSON file with the digest of its other content."""


@dataclass(frozen=True)
class FileContent:
    """Recorded content of a file: its size in bytes, and the digest of its bytes (32 hex digits); None: unknown."""

    size_bytes: int
    digest: str | None

    @classmethod
    def of(cls, content: bytes) -> "FileContent":
        """Return the size and digest of `content`."""
        return cls(len(content), xxh3_128_hexdigest(content))


def sync_to_disk(path: Path) -> None:
    """Wait until the content of the file, or the names in the folder, at `path` are on disk. Raises OSError.

    A renamed file is safe from a power failure only once its folder is synced, too.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of_file(file: Path) -> str:
    """Return the digest of the bytes of `file` (32 hex digits). Raises OSError."""
    digest, block = xxh3_128(), bytearray(BLOCK_BYTES)
    view = memoryview(block)
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(block):
            digest.update(view[:count])
    return digest.hexdigest()


def read_regular(file: Path) -> bytes:
    """Return the bytes of a regular file. Raises OSError, also for a pipe or a device, which might never end."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # do not wait for the writer of a pipe
    with open(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", str(file))
        return opened.read()


def file_mark(file: Path) -> list[int]:
    """Return size, times and inode of `file`, which change when it is written or replaced. Raises OSError.

    The change time (ctime) is included because programs such as `cp -p` and `rsync -t` set the modification time.
    """
    its = file.stat()
    return [its.st_size, its.st_mtime_ns, its.st_ctime_ns, its.st_ino]


def size_problem(file: Path, written: FileContent) -> str | None:
    """Return the problem of `file` if it is missing or has another size than `written`, else None."""
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
    """Return the problem of `file` if its size or its bytes differ from `written`, else None."""
    return size_problem(file, written) or digest_problem(file, written.digest)


def digest_problem(file: Path, written: str | None) -> str | None:
    """Return the problem of `file` if its bytes do not have the digest `written`; None if they do, or it is unknown."""
    try:
        found = digest_of_file(file)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if written in (None, found):
        return None
    return f"was changed or is damaged (digest {found[:8]}, {str(written)[:8]} when written)"


def seal(values: Mapping[str, Any]) -> bytes:
    """Return a JSON object as bytes with a checksum (the digest of the rest); `unseal` reads them."""
    return _encoded({**values, SEAL: xxh3_128_hexdigest(_encoded(values))})


def unseal(content: bytes) -> dict[str, Any]:
    """Return the JSON object that `seal` wrote as `content`, after verifying its checksum.

    Raises:
        ValueError: it is damaged; the message continues a sentence that begins with the file's name.
    """
    values = parse_object(content)
    if values.pop(SEAL, None) is None:
        raise ValueError("has no digest: it is damaged or from an earlier release")
    if seal(values) != content:
        raise ValueError("was changed or is damaged (its digest differs)")
    return values


def parse_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object in `content`. Raises ValueError as `unseal` does."""
    try:
        values = json.loads(content, object_pairs_hook=each_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError("is not a JSON object")
    return values


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return `pairs` as a dict, for `json.loads(object_pairs_hook=)`. Raises ValueError for a duplicate key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index]))
        raise ValueError(f"{twice!r} is given twice")
    return found


def _encoded(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, indent=1).encode()


def unpickling_problem(error: pickle.UnpicklingError) -> str:
    """Return why `torch.load(weights_only=True)` rejected a file, without torch's advice to load it unsafely.

    The text continues a sentence that begins with the file's name.
    """
    named = re.search(r"GLOBAL (\S+)", str(error))
    return f"refers to {named[1]}, which is code; it was not run" if named else "contains no readable data"


DIGEST_BYTES = 16
RECORDS = "records"
"""Key of the head in `summary.json` and in manifests."""


@dataclass(frozen=True)
class ChainHead:
    """Head of the chain: its digest after `lines` lines.

    Steps up to `unverified_steps` were written by an earlier release, without a chain.
    """

    lines: int = 0
    digest: bytes = bytes(DIGEST_BYTES)
    unverified_steps: int = 0

    def after(self, line: bytes) -> "ChainHead":
        """Return the head after one more line, including its newline."""
        digest = blake2b(self.digest + line, digest_size=DIGEST_BYTES).digest()
        return ChainHead(self.lines + 1, digest, self.unverified_steps)

    @classmethod
    def over(cls, lines: Iterable[bytes], unverified_steps: int = 0) -> "ChainHead":
        """Return the head after all of `lines`."""
        head = cls(unverified_steps=unverified_steps)
        for line in lines:
            head = head.after(line)
        return head

    def as_data(self) -> dict[str, Any]:
        """Return the head as JSON data, for a summary or a manifest."""
        unverified = {"unverified_steps": self.unverified_steps} if self.unverified_steps else {}
        return {"lines": self.lines, "chain": self.digest.hex(), **unverified}

    @classmethod
    def from_data(cls, data: Any) -> "ChainHead":
        """Return the head written by `as_data`. Raises ValueError if `data` is invalid."""
        try:
            head = cls(data["lines"], bytes.fromhex(data["chain"]), data.get("unverified_steps", 0))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"'{RECORDS}' is not the head of a hash chain") from error
        if type(head.lines) is not int or type(head.unverified_steps) is not int or len(head.digest) != DIGEST_BYTES:
            raise ValueError(f"'{RECORDS}' is not the head of a hash chain")
        return head

    def problem(self, found: "ChainHead", where: str = "") -> str | None:
        """Return the problem of a file with the head `found` if this recorded head differs; None if they agree.

        The text continues a sentence that begins with the file's name. `where`: the part of the file that was read,
        such as " up to step 4".
        """
        if found.lines != self.lines:
            return f"has {_count(found.lines)}{where}, but {self.lines} were written: lines were added or lost"
        if found.digest != self.digest:
            return f"was changed{where}: one of its {_count(self.lines)} was edited or moved"
        return None


class RecordChain:
    """Chain of a growing `metrics.jsonl`: its head now, and before the newest step, which may be discarded."""

    def __init__(self, head: ChainHead | None = None):
        self.head = self._before = head or ChainHead()
        self._step: int | None = None

    def add(self, step: int, line: bytes) -> None:
        """Add `line`, the written record of `step`, to the chain."""
        if step != self._step:
            self._before, self._step = self.head, step
        self.head = self.head.after(line)

    def at(self, step: int) -> ChainHead:
        """Return the head after the records up to `step`, which is the newest step or the one before."""
        return self._before if self._step is not None and self._step > step else self.head


def _count(number: int) -> str:
    return f"{number} line{'' if number == 1 else 's'}"
