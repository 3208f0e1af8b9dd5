"""Products that are built once and then only mapped: each is a folder named by the hash of all that shaped it.

A folder is written under another name and renamed when whole, so that it exists complete or not at all; a lock file
beside it lets one of several processes build while the others wait. The manifest, written last, holds every file's
size, so that a folder torn by a power cut is built again too.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from lightning_llm.errors import ConfigError, Problem

CODE_VERSION = 1  # of everything under data/ that shapes a product; raise it when the same input gives another output
MANIFEST = "manifest.json"
FREE_RESERVE_BYTES = 64 << 20
FLUSH_BYTES = 8 << 20

Build = Callable[[Path], dict[str, Any]]


def default_cache_dir() -> Path:
    """Return the folder of token caches within the user's cache folder."""
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("lightning-llm"))


def digest_of(content: Any) -> str:
    """Return 32 hex digits that name JSON data (keys in any order)."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a whole product, None where there is none or a file lacks or has another size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        whole = all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return manifest if whole else None


def product_folder(cache_dir: Path, kind: str, identity: Any) -> Path:
    """Return where the product named by `kind` and `identity` (JSON data) lies or would lie."""
    return cache_dir / f"{kind}-{digest_of([CODE_VERSION, kind, identity])}"


def build_once(cache_dir: Path, kind: str, identity: Any, build: Build) -> tuple[Path, dict[str, Any]]:
    """Return the folder and manifest of the product named by `kind` and `identity`, built now if it is not there.

    `build` fills the folder it is given and returns the manifest's own entries (JSON data). Raises ConfigError for a
    `data.cache_dir` that cannot be written or is full; what was half written is removed.
    """
    folder = product_folder(cache_dir, kind, identity)
    manifest = read_manifest(folder)
    if manifest is not None:
        return folder, manifest
    from filelock import FileLock

    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            manifest = read_manifest(folder) or _build(folder, identity, build)
    except OSError as error:
        raise _cache_problem(cache_dir, error) from error
    return folder, manifest


def _build(folder: Path, identity: Any, build: Build) -> dict[str, Any]:
    """Build `folder`, whose lock is held. Leftovers of a killed builder can only be nobody's."""
    partial = folder.with_name(f"{folder.name}.partial")
    for leftover in (partial, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir()
    try:
        entries = build(partial)
        files = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        manifest = entries | {"identity": identity, "code_version": CODE_VERSION, "files": files}
        with (partial / MANIFEST).open("w", encoding="utf-8") as opened:
            json.dump(manifest, opened, indent=1)
            opened.flush()
            os.fsync(opened.fileno())
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return manifest


def _cache_problem(cache_dir: Path, error: OSError) -> ConfigError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(cache_dir).free
        text = f"the disk ran full while writing there ({free:,} bytes free). Free some, or choose another folder."
    else:
        text = f"cannot be used ({error.strerror or error}). Choose a folder that can be written."
    return ConfigError(Problem("data.cache_dir", f"{cache_dir} {text}"))


def token_bytes(text_bytes: int, is_bytes: bool, vocab_size: int) -> int:
    """Return about how many bytes a cache of `text_bytes` takes: 1 token per byte, or at least 2 bytes per token."""
    return text_bytes * (2 if vocab_size <= 1 << 16 else 4) // (1 if is_bytes else 2)


def nearest_existing(path: Path) -> Path:
    """Return `path` or the nearest folder above it that exists."""
    return next((p for p in (path, *path.parents) if os.path.exists(p)), Path("/"))  # Path's raises for long names


def disk_problem(cache_dir: Path, needed_bytes: int) -> Problem | None:
    """Say so where the disk of `cache_dir` (which need not exist yet) has not `needed_bytes` and a reserve free."""
    free = shutil.disk_usage(nearest_existing(cache_dir)).free
    if free >= needed_bytes + FREE_RESERVE_BYTES:
        return None
    return Problem(
        "data.cache_dir",
        f"the token cache may take {needed_bytes:,} bytes (and {FREE_RESERVE_BYTES:,} are kept free), but the disk of "
        f"{cache_dir} has {free:,} free. Free some, or choose another folder.",
    )


class TokenWriter:
    """Writes one split of one source: its documents' tokens end to end, and where each begins."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], end_of_document: int):
        self.folder, self.split, self.dtype = folder, split, dtype
        self.end = np.array([end_of_document], dtype)
        self.tokens = 0
        self._starts: list[int] = []
        self._pending: list[np.ndarray] = []
        self._pending_tokens = 0
        self._digest = blake2b(digest_size=16)
        self._file = (folder / f"{split}.bin").open("wb")

    def add(self, document: np.ndarray) -> None:
        """Append one document's token ids and the end-of-document token."""
        self._starts.append(self.tokens)
        self._pending += [document.astype(self.dtype), self.end]
        self.tokens += len(document) + 1
        self._pending_tokens += len(document) + 1
        if self._pending_tokens * self.dtype.itemsize >= FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            content = np.concatenate(self._pending).astype(self.dtype.newbyteorder("<")).tobytes()
            self._digest.update(content)
            self._file.write(content)
        self._pending, self._pending_tokens = [], 0

    def close(self) -> dict[str, Any]:
        """Write what is left to the disk and return the split's manifest entry."""
        self._flush()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        np.array(self._starts, "<i8").tofile(self.folder / f"{self.split}.starts")
        return {"tokens": self.tokens, "documents": len(self._starts), "digest": self._digest.hexdigest()}


@dataclass
class TokenStream:
    """One split of one source, memory-mapped: `tokens` uint16 or uint32 [tokens], `starts` int64 [documents].

    `starts` holds the position of each document's first token; the documents lie end to end, each closed by the
    end-of-document token. Pickles as its path, so that a loader process maps the file itself.
    """

    folder: Path
    split: str
    dtype: str
    digest: str
    tokens: np.ndarray = field(init=False, repr=False)
    starts: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.tokens = _map(self.folder / f"{self.split}.bin", np.dtype(self.dtype))
        self.starts = _map(self.folder / f"{self.split}.starts", np.dtype("<i8"))

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStream, (self.folder, self.split, self.dtype, self.digest)

    def document_ids(self, start: int, length: int) -> np.ndarray:
        """Return int64 [length]: for each position from `start`, its document, counted from 0 in this window."""
        first, last = np.searchsorted(self.starts, (start, start + length - 1), side="right")
        ids = np.zeros(length, np.int64)  # [length]
        ids[self.starts[first:last] - start] = 1
        return ids.cumsum()


def _map(file: Path, dtype: np.dtype[Any]) -> np.ndarray:
    if file.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(file, dtype, mode="r"))  # a plain view: slicing a memmap object is several times slower
