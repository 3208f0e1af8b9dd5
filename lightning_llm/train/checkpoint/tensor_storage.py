"""Tensor storage through torch.distributed.checkpoint: files are hashed as they are written, and described in JSON.

Each rank writes one `__<rank>_0.distcp` with one torch.save record per shard, readable by
`torch.load(weights_only=True)`. `metadata.json` gives the place of each shard in its tensor. torch's own `.metadata` is
a pickle, which can run code when opened, so it is not written, and read only for version 2, restricted:

    {"format": 1, "tensors": {name: {"dtype", "shape", "shards": [[offsets, sizes, file, first byte, bytes], ...]}}}

Checkpoints of version 2 have no digests. They are opened without running code. The CRC-32 that torch.save adds to each
record verifies their tensors; only the structure of the rest is checked.
"""

import json
import os
import pickle
import re
import zipfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from errno import ECANCELED
from io import BytesIO, IOBase
from math import prod
from pathlib import Path
from threading import Event
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from xxhash import xxh3_128

from lightning_llm.base.integrity import FileContent, parse_object
from lightning_llm.train.checkpoint.manifest import PRECISION, TENSORS, UNSEALED, Checkpoint, Damage, DamagedError

METADATA = "metadata.json"
FORMAT = 1
SHARD_FILE = re.compile(r"__\d+_\d+\.distcp")


@dataclass(frozen=True)
class _Written:
    """A file written by a rank. Sent to the first rank with torch's results of writing."""

    name: str
    content: FileContent


class TensorWriter(dcp.FileSystemWriter):
    """Storage writer of torch.distributed.checkpoint that hashes files as it writes them into `folder`.

    After `finish`, on the first rank, `files` has size and digest of the files of all ranks by name.
    """

    def __init__(self, folder: Path, abandoned: Event | None = None):
        """`abandoned`: event that makes writing fail once it is set."""
        super().__init__(folder, sync_files=True)
        self.fs = self._hashing = _HashingFileSystem(abandoned or Event())
        self.files: dict[str, FileContent] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards; the result includes the digests of the files."""
        results: list[Any] = list(super().write_data(plan, planner).wait())
        results += [_Written(name, content) for name, content in self._hashing.written.items()]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write metadata.json, on the first rank."""
        flat: list[Any] = [each for part in results for each in part]
        self.files = {each.name: each.content for each in flat if isinstance(each, _Written)}
        metadata.storage_data = {each.index: each.storage_data for each in flat if isinstance(each, WriteResult)}
        content = json.dumps(metadata_to_json(metadata)).encode()
        with (Path(self.path) / METADATA).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self.files[METADATA] = FileContent.of(content)


class TensorReader(dcp.FileSystemReader):
    """Storage reader of torch.distributed.checkpoint for the tensors in `folder`, described by `metadata`."""

    def __init__(self, folder: Path, metadata: Metadata):
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self) -> Metadata:  # with **kwargs, torch would request per-rank metadata
        return self.metadata


class _HashedFile(IOBase):
    """A file that is written sequentially and hashed at the same time.

    An error (a full disk) is kept until `flush`, because torch's writer cannot handle one between two records.
    """

    def __init__(self, file: IO[bytes], abandoned: Event):
        self._file = file
        self._abandoned = abandoned
        self._digest = xxh3_128()
        self._failure: OSError | None = None
        self._bytes = 0

    @property
    def content(self) -> FileContent:
        """Size and digest of the data written so far."""
        return FileContent(self._bytes, self._digest.hexdigest())

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        self._digest.update(view)
        self._bytes += len(view)
        try:
            if self._abandoned.is_set():
                raise OSError(ECANCELED, os.strerror(ECANCELED))
            if self._failure is None:
                self._file.write(view)
        except OSError as error:
            self._failure = error
        return len(view)

    def tell(self) -> int:
        return self._bytes

    def flush(self) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()


class _HashingFileSystem(FileSystem):
    """The file system, which also records the digests of written files."""

    def __init__(self, abandoned: Event) -> None:
        self.abandoned = abandoned
        self.written: dict[str, FileContent] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[IOBase, None, None]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            hashed = _HashedFile(stream, self.abandoned)  # type: ignore[arg-type]  # torch calls a binary file an IOBase
            yield hashed
            self.written[Path(path).name] = hashed.content


def open_tensors(checkpoint: Checkpoint) -> TensorReader:
    """Return a reader of the checkpoint's tensors.

    Raises:
        DamagedError: their metadata is damaged.
    """
    folder, prefix = checkpoint.folder / TENSORS, f"{TENSORS}/"
    files = {name.removeprefix(prefix): each for name, each in checkpoint.files.items() if name.startswith(prefix)}
    described = METADATA
    try:
        if checkpoint.version == UNSEALED:
            described = PICKLED_METADATA
            values = read_pickled_metadata(folder / described)
        else:
            values = parse_object((folder / described).read_bytes())
        return TensorReader(folder, metadata_from_json(values, files))
    except (OSError, ValueError) as error:
        raise DamagedError(Damage(checkpoint.folder, prefix + described, str(error))) from error


def metadata_to_json(metadata: Metadata) -> dict[str, Any]:
    """Return the content of metadata.json, as JSON data, for torch's metadata of the stored tensors."""
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"{name} is no tensor")
        shards = []
        for chunk in entry.chunks:
            stored = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            if stored is None:
                raise ValueError(f"nothing was written of {name} at {list(chunk.offsets)}")
            where = [stored.relative_path, stored.offset, stored.length]
            shards.append([list(chunk.offsets), list(chunk.sizes), *where])
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(entry.size), "shards": shards}
    return {"format": FORMAT, "tensors": tensors}


def metadata_from_json(values: Mapping[str, Any], files: Mapping[str, FileContent]) -> Metadata:
    """Return torch's metadata from the JSON data of metadata.json. `files`: existing files by name.

    Raises:
        ValueError: it is invalid or refers to missing data; the message completes the sentence "FILE ...".
    """
    if values.get("format") != FORMAT or not isinstance(values.get("tensors"), dict):
        raise ValueError(f"is not a tensor description in format {FORMAT}")
    state: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for name, about in values["tensors"].items():
        try:
            dtype, shape = _dtype(about["dtype"]), _sizes(about["shape"])
            chunks = []
            for offsets, sizes, file, start, length in about["shards"]:
                chunks.append(ChunkStorageMetadata(_sizes(offsets), _sizes(sizes)))
                storage[MetadataIndex(name, chunks[-1].offsets)] = _StorageInfo(*_within(file, start, length, files))
            _check_cover(shape, chunks)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"describes {name} wrongly ({error})") from error
        state[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), shape, chunks)
    return Metadata(state, storage_data=storage)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


def _sizes(values: list[int]) -> torch.Size:
    if not all(type(each) is int and each >= 0 for each in values):
        raise ValueError(f"{values} are no sizes")
    return torch.Size(values)


def _within(file: str, start: int, length: int, files: Mapping[str, FileContent]) -> tuple[str, int, int]:
    """Return the arguments if `file` is a shard file in `files` that contains these bytes."""
    if not SHARD_FILE.fullmatch(file) or file not in files:
        raise ValueError(f"{file!r} is not a file of shards")
    if not 0 <= start <= start + length <= files[file].size_bytes:
        raise ValueError(f"bytes {start} to {start + length} are not in {file}")
    return file, start, length


def _check_cover(shape: torch.Size, shards: list[ChunkStorageMetadata]) -> None:
    """Raise ValueError unless the shards lie within the tensor and have as many elements."""
    for shard in shards:
        if not len(shard.offsets) == len(shard.sizes) == len(shape):
            raise ValueError("a shard and its tensor have different numbers of dimensions")
        if any(offset + size > whole for offset, size, whole in zip(shard.offsets, shard.sizes, shape, strict=True)):
            raise ValueError("a shard exceeds its tensor")
    if sum(prod(shard.sizes) for shard in shards) != prod(shape):
        raise ValueError("its shards do not cover the whole tensor")


PICKLED_METADATA = ".metadata"
ADMITTED = {
    **{("torch.distributed.checkpoint.metadata", name): getattr(metadata, name) for name in (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
    )},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{("pathlib", name): Path for name in ("PosixPath", "WindowsPath", "Path")},
    **{("pathlib._local", name): Path for name in ("PosixPath", "WindowsPath", "Path")},
}  # fmt: skip
"""All names, except dtypes, that a pickle of torch's tensor metadata may import."""


class _MetadataUnpickler(pickle.Unpickler):
    """Allows only the classes of torch's metadata
    (https://docs.python.org/3/library/pickle.html#restricting-globals)."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ADMITTED:
            return ADMITTED[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which a tensor description never contains")


def read_pickled_metadata(file: Path) -> dict[str, Any]:
    """Return torch's `.metadata` of stored tensors in the format of metadata.json.

    Raises:
        ValueError: it is damaged or imports something else; no code of it has run.
    """
    try:
        with file.open("rb") as opened:
            found = _MetadataUnpickler(opened).load()
        if not isinstance(found, Metadata):
            raise ValueError("it holds something else")
        return metadata_to_json(found)
    # A damaged pickle can raise any exception.
    except Exception as error:
        raise ValueError(f"is not a tensor description ({error})") from error


def structural_damage(checkpoint: Checkpoint) -> list[Damage]:
    """Return the damaged files of a checkpoint of version 2, as far as that can be found without digests."""
    try:
        reader = open_tensors(checkpoint)
    except DamagedError as error:
        return list(error.damage)
    damaged = dict(_damaged_records(checkpoint.folder / TENSORS, reader.metadata))
    found = [Damage(checkpoint.folder, f"{TENSORS}/{name}", what) for name, what in damaged.items()]
    try:
        with safe_open(checkpoint.folder / PRECISION, "pt") as opened:
            opened.keys()
    except (OSError, SafetensorError) as error:
        found.append(Damage(checkpoint.folder, PRECISION, f"cannot be read ({error})"))
    return found


def _damaged_records(folder: Path, described: Metadata) -> Iterator[tuple[str, str]]:
    """Yield (shard file, reason) for each record that does not match its CRC-32."""
    for stored in described.storage_data.values():
        with (folder / stored.relative_path).open("rb") as file:
            file.seek(stored.offset)
            record = BytesIO(file.read(stored.length))
        try:
            with zipfile.ZipFile(record) as archive:
                broken = archive.testzip()
        # zipfile raises many exception types for invalid archives
        except Exception as error:
            yield stored.relative_path, f"holds no tensor at byte {stored.offset:,} ({error})"
            continue
        if broken:
            yield (
                stored.relative_path,
                f"was changed after it was written (CRC-32 of {broken} at byte {stored.offset:,})",
            )
