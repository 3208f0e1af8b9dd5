"""The weights in a checkpoint, read by rows: at most one saved shard is in memory, and moments are not read.

A running training may delete the checkpoint at any time (`checkpoint.keep_last`). Each file is therefore memory-mapped
when the weights are opened, so that its content stays readable.
"""

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.integrity import FileContent, unpickling_problem
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.config.weight_folders import TOKENIZER
from lightning_llm.linalg import DTYPES
from lightning_llm.model.weights.folder import Weights
from lightning_llm.train.checkpoint.manifest import TENSORS, Checkpoint, DamagedError
from lightning_llm.train.checkpoint.tensor_storage import open_tensors

NAMES = {dtype: name for name, dtype in DTYPES.items()}
OTHER = "Use another checkpoint of the run, or restore it from a copy."


class CheckpointWeights(Weights):
    """Weights in a verified `checkpoint` of a run with the model `config`, read by rows of parameters."""

    kind = "a checkpoint"

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig):
        """Read the metadata of the checkpoint's tensors.

        Raises:
            ConfigError: it is damaged, or contradicts the names or shapes of the run's config.
        """
        self.checkpoint, self.path, self.config, self.architecture = checkpoint, checkpoint.folder, config, None
        try:
            described = open_tensors(checkpoint).metadata
        except DamagedError as error:
            raise ConfigError(Problem(str(checkpoint.folder), f"{error}.")) from error
        self._where = described.storage_data
        self._entries: dict[str, Any] = {
            name.removeprefix("model."): entry
            for name, entry in described.state_dict_metadata.items()
            if name.startswith("model.")
        }
        padded = {name: (config.padded_vocab_size, *shape[1:]) for name, shape in self.shapes.items()}
        problems = [
            Problem(str(self.path), f"has no {name}, which the run's config requires. {OTHER}")
            for name in self.shapes
            if name not in self._entries
        ]
        problems += [
            Problem(str(self.path), f"{name} has shape {tuple(entry.size)}, but {shape} in the run's config. {OTHER}")
            for name, shape in self.shapes.items()
            if (entry := self._entries.get(name)) is not None and tuple(entry.size) not in (shape, padded[name])
        ]
        if problems:
            raise ConfigError(problems)
        self._held: tuple[MetadataIndex, Tensor] | None = None
        try:
            self._pinned = {file: _mapped(file) for file in self.files()}
        except (OSError, RuntimeError) as error:
            raise ConfigError(Problem(str(self.path), f"cannot be read: {_first_line(error)}. {OTHER}")) from error

    @property
    def tokenizer(self) -> Path | None:
        file = self.checkpoint.run_folder / TOKENIZER
        return file if file.is_file() else None

    def dtype(self, name: str) -> str:
        return NAMES[self._entries[name].properties.dtype]

    def files(self) -> dict[Path, FileContent | None]:
        files = self.checkpoint.files.items()
        return {self.path / name: written for name, written in files if name.startswith(f"{TENSORS}/")}

    def verify(self, rank: int = 0, world: int = 1) -> None:
        """Do nothing: the files were verified when the checkpoint was chosen."""

    def rows(self, name: str, first: int, last: int) -> Tensor:
        entry = self._entries[name]
        found = torch.empty((last - first, *entry.size[1:]), dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            start, stop = max(first, chunk.offsets[0]), min(last, chunk.offsets[0] + chunk.sizes[0])
            if start >= stop:
                continue
            shard = self._shard(f"model.{name}", chunk)[start - chunk.offsets[0] : stop - chunk.offsets[0]]
            target = found[start - first : stop - first]
            for axis, (offset, size) in enumerate(zip(chunk.offsets[1:], chunk.sizes[1:], strict=True), start=1):
                target = target.narrow(axis, offset, size)
            target.copy_(shard)
        return found

    def _content(self, file: Path, offset: int, length: int) -> bytes:
        """Return the bytes of a file, from the mapping in case retention has deleted the file."""
        try:
            with file.open("rb") as opened:
                opened.seek(offset)
                return opened.read(length)
        except FileNotFoundError:
            return bytes(self._pinned[file][offset : offset + length].numpy())

    def _shard(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        """Return one saved shard; the last one is cached, because rows are read in order."""
        index = MetadataIndex(name, chunk.offsets)
        if self._held is None or self._held[0] != index:
            self._held = None
            where = self._where[index]
            file = self.path / TENSORS / where.relative_path
            try:
                content = BytesIO(self._content(file, where.offset, where.length))
                tensor: Tensor = torch.load(content, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError as error:
                raise ConfigError(Problem(str(file), f"{unpickling_problem(error)}. {OTHER}")) from error
            except (OSError, RuntimeError, ValueError, EOFError) as error:
                raise ConfigError(Problem(str(file), f"cannot be read: {error}. {OTHER}")) from error
            if tuple(tensor.shape) != tuple(chunk.sizes):
                text = f"contains another shard of {name} than its metadata describes. {OTHER}"
                raise ConfigError(Problem(str(file), text))
            self._held = (index, tensor)
        return self._held[1]


def _mapped(file: Path) -> Tensor:
    """Return the memory-mapped bytes of `file`. The mapping keeps the content if the file is deleted."""
    size = file.stat().st_size
    return torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
