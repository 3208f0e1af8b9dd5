"""Cache of products (scans, tokenizers, tokens): each is a folder named by the hash of its inputs, built once.

A folder is written under a temporary name and renamed when complete. A lock file lets one of several processes build
while the others wait. The manifest, written last, contains the size and digest of every file and its own digest. A
product that is incomplete after a power cut, or changed since, is built again.

Before use, one process verifies the content of a product. The file `NAME.verified` records which files (by size, times
and inode) were intact, and when. The record is valid for a day, or until one of the files changes.
"""

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.folders import nearest_existing
from lightning_llm.base.integrity import (
    FileContent,
    content_problem,
    digest_of_file,
    file_mark,
    seal,
    size_problem,
    unseal,
)

CODE_VERSION = 2  # of everything under data/ that shapes a product; raise it when the same input gives another output
MANIFEST = "manifest.json"
VERIFIED_SECONDS = 24 * 3600
FREE_RESERVE_BYTES = 64 << 20

Build = Callable[[Path], dict[str, Any]]


def digest_of(content: Any) -> str:
    """Return a hash of JSON data, 32 hex digits; the order of keys does not matter."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of the product in `folder`; None if it is missing, or a file has another size."""
    try:
        return _open(folder)
    except (OSError, ValueError):
        return None


def _open(folder: Path) -> dict[str, Any]:
    """Return the manifest.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it or a file was changed; the text names the difference.
    """
    content = (folder / MANIFEST).read_bytes()
    try:
        manifest = unseal(content)
    except ValueError as error:
        raise ValueError(f"{MANIFEST} {error}") from error
    for name, written in _files(manifest).items():
        if problem := size_problem(folder / name, written):
            raise ValueError(f"{name} {problem}")
    return manifest


def _files(manifest: dict[str, Any]) -> dict[str, FileContent]:
    return {name: FileContent(each["bytes"], each["digest"]) for name, each in manifest["files"].items()}


def product_folder(cache_dir: Path, kind: str, identity: Any) -> Path:
    """Return the folder of the product of this `kind` ("scan", "tokens", ...) and `identity`; it need not exist.

    `identity`: JSON data that determines the product.
    """
    return cache_dir / f"{kind}-{digest_of([CODE_VERSION, kind, identity])}"


def build_once(cache_dir: Path, kind: str, identity: Any, build: Build) -> tuple[Path, dict[str, Any]]:
    """Return (folder, manifest) of a product, which is built first if it is missing or damaged.

    Args:
        cache_dir: folder of all products.
        kind: name of the kind of product, such as "tokens".
        identity: JSON data that determines the product.
        build: writes the product's files into the given folder, and returns entries for the manifest (JSON data).

    Raises:
        ConfigError: `cache_dir` cannot be written or is full; a partly written folder is removed.
    """
    folder = product_folder(cache_dir, kind, identity)
    if (manifest := read_manifest(folder)) is not None and _is_known_whole(folder, manifest):
        return folder, manifest
    try:
        with _locked(cache_dir, folder, to_build=manifest is None):
            manifest = _whole(folder)
            if manifest is not None and (_is_known_whole(folder, manifest) or _verify(folder, manifest)):
                return folder, manifest
            return folder, _build(folder, identity, build)
    except OSError as error:
        raise _cache_problem(cache_dir, error) from error


@contextmanager
def _locked(cache_dir: Path, folder: Path, to_build: bool) -> Iterator[None]:
    """Lock a product until the context ends. In a read-only cache, an existing product is verified without a lock."""
    from filelock import FileLock

    lock = FileLock(f"{folder}.lock")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError:
        if to_build:
            raise
    try:
        yield
    finally:
        lock.release()


def _whole(folder: Path) -> dict[str, Any] | None:
    """Return the manifest if all files have their sizes; None, after printing why, if the product must be built."""
    try:
        return _open(folder)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _say_damaged(folder, str(error))
        return None


def _is_known_whole(folder: Path, manifest: dict[str, Any]) -> bool:
    try:
        known = json.loads(_note_of(folder).read_bytes())
        recent = 0 <= time.time() - known["time"] < VERIFIED_SECONDS
        return recent and bool(known["files"] == _marks(folder, manifest))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _verify(folder: Path, manifest: dict[str, Any]) -> bool:
    """Return whether every file has its recorded digest, and record success; otherwise print the name of the file."""
    for name, written in _files(manifest).items():
        if problem := content_problem(folder / name, written):
            _say_damaged(folder, f"{name} {problem}")
            return False
    _note_whole(folder, manifest)
    return True


def _note_whole(folder: Path, manifest: dict[str, Any]) -> None:
    partial = folder.with_name(f"{folder.name}.verified.{os.getpid()}")
    with suppress(OSError):  # a cache that cannot be written is verified by each process
        partial.write_text(json.dumps({"time": time.time(), "files": _marks(folder, manifest)}))
        partial.replace(_note_of(folder))


def _note_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.verified")


def _marks(folder: Path, manifest: dict[str, Any]) -> dict[str, list[int]]:
    """Return {file: mark that changes when the file is written to}."""
    return {name: file_mark(folder / name) for name in manifest["files"]}


def _say_damaged(folder: Path, what: str) -> None:
    print(f"note   {folder} is damaged and is built again: {what}", file=sys.stderr, flush=True)


def _build(folder: Path, identity: Any, build: Build) -> dict[str, Any]:
    """Build `folder` while its lock is held. Leftovers of a killed builder are removed."""
    partial = folder.with_name(f"{folder.name}.partial")
    for leftover in (partial, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir()
    try:
        entries = build(partial)
        files = {
            file.name: {"bytes": file.stat().st_size, "digest": digest_of_file(file)}
            for file in sorted(partial.iterdir())
        }
        manifest = entries | {"identity": identity, "code_version": CODE_VERSION, "files": files}
        with (partial / MANIFEST).open("wb") as opened:
            opened.write(seal(manifest))
            opened.flush()
            os.fsync(opened.fileno())
        partial.rename(folder)
        _note_whole(folder, manifest)
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
    """Return the estimated size of the tokens of `text_bytes` bytes of text, in bytes.

    A token is one byte of text with the tokenizer `bytes` (`is_bytes`), and is taken to be two bytes with others.
    """
    return text_bytes * (2 if vocab_size <= 1 << 16 else 4) // (1 if is_bytes else 2)


def disk_problem(cache_dir: Path, needed_bytes: int) -> Problem | None:
    """Return a problem if the disk of `cache_dir` has not `needed_bytes` and a reserve free; the folder may not exist.

    None if there is enough space.
    """
    free = shutil.disk_usage(nearest_existing(cache_dir)).free
    if free >= needed_bytes + FREE_RESERVE_BYTES:
        return None
    return Problem(
        "data.cache_dir",
        f"the token cache may take {needed_bytes:,} bytes (and {FREE_RESERVE_BYTES:,} are kept free), but the disk of "
        f"{cache_dir} has {free:,} free. Free some, or choose another folder.",
    )
