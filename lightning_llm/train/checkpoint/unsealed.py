"""Checkpoints of version 2, from before there were digests: opened without running what they hold, checked as can be.

torch.save puts a CRC-32 beside each record, so their tensors can be held against that; the rest by its structure alone.
"""

import pickle
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from lightning_llm.train.checkpoint.manifest import PRECISION, TENSORS, Checkpoint, Damage, DamagedError
from lightning_llm.train.checkpoint.tensor_storage import metadata_to_json, open_tensors

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
"""All that a pickle of torch's metadata of tensors needs to name, beside dtypes."""


class _MetadataUnpickler(pickle.Unpickler):
    """Admits the classes of torch's metadata alone (https://docs.python.org/3/library/pickle.html#restricting-globals)."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ADMITTED:
            return ADMITTED[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no description of tensors needs")


def read_pickled_metadata(file: Path) -> dict[str, Any]:
    """Return what torch's `.metadata` says of stored tensors, as metadata.json would.

    Raises:
        ValueError: it is damaged, or names something else; nothing of it has run.
    """
    try:
        with file.open("rb") as opened:
            found = _MetadataUnpickler(opened).load()
        if not isinstance(found, Metadata):
            raise ValueError("it holds something else")
        return metadata_to_json(found)
    # A damaged pickle raises whatever its opcodes come to.
    except Exception as error:
        raise ValueError(f"is no description of tensors ({error})") from error


def structural_damage(checkpoint: Checkpoint) -> list[Damage]:
    """Return which files cannot be what was written."""
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
    """Yield files of shards with a record that is not what its CRC-32 says, and why."""
    for stored in described.storage_data.values():
        with (folder / stored.relative_path).open("rb") as file:
            file.seek(stored.offset)
            record = BytesIO(file.read(stored.length))
        try:
            with zipfile.ZipFile(record) as archive:
                broken = archive.testzip()
        # zipfile raises a dozen kinds for what is no archive
        except Exception as error:
            yield stored.relative_path, f"holds no tensor at byte {stored.offset:,} ({error})"
            continue
        if broken:
            yield stored.relative_path, f"does not hold what was written (CRC-32 of {broken} at byte {stored.offset:,})"
