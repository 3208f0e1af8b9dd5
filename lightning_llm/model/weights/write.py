"""Writing of weights as a folder of safetensors files, under this package's or Hugging Face's names.

Each tensor is computed when its file is written, and the folder gets its name only when it is complete.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.integrity import sync_to_disk
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.linalg import DTYPES
from lightning_llm.model.interop.families import StoredParameter, architecture, stored_as
from lightning_llm.model.weights.files import INDEX, SINGLE
from lightning_llm.model.weights.folder import Weights

SHARD_BYTES = 5 * 10**9
"""Largest size of a file, unless one tensor alone is larger: transformers' default."""
OURS = re.compile(
    r"(model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|[\w.-]+\.json|README\.md|loss\.png|tokenizer\.model|"
    r"merges\.txt|vocab\.txt|chat_template\.jinja|LICENSE[\w.]*)"
)
"""Names of files that `import` and `export` write: what --force may replace holds nothing else."""


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor to write: its name and bytes, and a function that computes it when its file is written."""

    name: str
    size_bytes: int
    make: Callable[[], Tensor]


def write_tensors(folder: Path, tensors: Sequence[TensorToWrite], shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write `tensors` to `folder`, as model.safetensors or as several files and an index; return the files of tensors.

    The tensors of at most one file are in memory at a time. Raises OSError if a file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    shards: list[list[TensorToWrite]] = [[]]
    for each in tensors:
        if shards[-1] and sum(one.size_bytes for one in shards[-1]) + each.size_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(each)
    names = [SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        made = {each.name: _own(each.make()) for each in shard}
        try:
            save_file(made, folder / name, metadata={"format": "pt"})
            _follow_umask(folder / name)
        except SafetensorError as error:  # wraps the system's error, such as a full disk
            raise OSError(str(error)) from error
    if len(shards) > 1:
        where = {each.name: name for name, shard in zip(names, shards, strict=True) for each in shard}
        total = sum(each.size_bytes for each in tensors)
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return [folder / name for name in names]


def _own(tensor: Tensor) -> Tensor:
    """Return a copy that shares memory with nothing: parts of one tensor may be written as several."""
    import torch

    return tensor.clone(memory_format=torch.contiguous_format)


def _follow_umask(file: Path) -> None:
    """Set the mode of `file` to that of ordinary new files: the library creates files only readable by their owner."""
    ordinary = file.with_name(f"{file.name}.mode")
    ordinary.touch()
    try:
        shutil.copymode(ordinary, file)
    finally:
        ordinary.unlink()


def _shard_name(number: int, count: int) -> str:
    return SINGLE.replace(".safetensors", f"-{number:05d}-of-{count:05d}.safetensors")


def output_problems(output: Path, source: Path, force: bool, needed_bytes: int = 0) -> list[Problem]:
    """Return the reasons why the folder `output` cannot be written; [] if it can.

    It exists (without `force`), is inside the input folder `source`, is not writable, or lacks `needed_bytes` of space.
    """
    if source.resolve() in (output.resolve(), *output.resolve().parents):
        return [Problem("--output", f"{output} is inside the input folder. Choose another.")]
    if problems := _existing_problems(output, force):
        return problems
    above = next(each for each in output.parents if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        return [Problem("--output", f"{output} cannot be written ({above} is not writable). Choose another.")]
    free = shutil.disk_usage(above).free
    if needed_bytes > free:
        sizes = f"{output} needs {needed_bytes / 1e9:.1f} GB, and {above} has {free / 1e9:.1f} GB free"
        return [Problem("--output", f"{sizes}. Free some space, or choose another.")]
    return []


def _existing_problems(output: Path, force: bool) -> list[Problem]:
    """Return why an existing `output` may not be replaced; empty if it may, or does not exist."""
    if not os.path.lexists(output):
        return []
    if not force:
        return [Problem("--output", f"{output} already exists. Choose another, or add --force to replace it.")]
    if output.is_symlink() or not output.is_dir():
        return [Problem("--output", f"{output} is not a folder, and --force replaces only folders. Choose another.")]
    if others := sorted(each.name for each in output.iterdir() if each.is_dir() or not OURS.fullmatch(each.name)):
        text = f"{output} holds {others[0]}, which is no part of weights, and --force would delete it. Choose another."
        return [Problem("--output", text)]
    return []


def undo_killed(output: Path) -> list[str]:
    """Clean up after a command that was killed while it wrote `output`; return one line per change.

    If it was killed between the two moves that replace a folder, the old folder gets its name back.

    Raises:
        ConfigError: another command is writing `output` right now, or it cannot be written.
    """
    partial, old = _beside(output)
    if not partial.is_dir() and not old.is_dir():
        return []
    try:
        with _locked(output):
            return list(_undone(output, partial, old))
    except OSError as error:
        raise _refused(output, error) from error


def _undone(output: Path, partial: Path, old: Path) -> Iterator[str]:
    if old.is_dir() and not os.path.lexists(output):
        os.rename(old, output)
        yield f"note         {output} was being replaced when a command was killed: its old content is restored"
    elif old.is_dir():
        shutil.rmtree(old, ignore_errors=True)
        yield f"note         {old} was replaced, and left undeleted by a killed command: it is deleted"
    if partial.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
        yield f"note         {partial} was left half-written by a killed command, and is deleted"


def _beside(output: Path) -> tuple[Path, Path]:
    """Return where a folder is written, and where the one that it replaces waits to be deleted."""
    return output.parent / f".{output.name}.partial", output.parent / f".{output.name}.replaced"


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Keep other commands from writing `output`. A killed process' lock is nobody's, and its file is taken over.

    Raises:
        ConfigError: another process has it.
        OSError: its file cannot be made.
    """
    file = output.parent / f".{output.name}.lock"
    lock = FileLock(file, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        text = f"{output} is being written right now, by another command. Wait for it, or choose another."
        raise ConfigError(Problem("--output", text)) from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)  # while it is held: later it may be the next one's
        lock.release()


@contextmanager
def whole_folder(output: Path, force: bool) -> Iterator[Path]:
    """Yield a folder next to `output` to write into; it is renamed to `output` if the block succeeds.

    An old `output` is moved away then, and deleted after the renaming. `undo_killed` cleans up after a killed process.

    Raises:
        ConfigError: it cannot be written, another command is writing it or, without `force`, has written it since
            `output_problems` looked.
    """
    partial, old = _beside(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with _locked(output):
            if problems := _existing_problems(output, force):
                raise ConfigError(problems)
            try:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                yield partial
                for path in [*partial.iterdir(), partial]:
                    sync_to_disk(path)
                if output.exists():
                    shutil.rmtree(old, ignore_errors=True)
                    os.rename(output, old)
                os.rename(partial, output)
                sync_to_disk(output.parent)
                shutil.rmtree(old, ignore_errors=True)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
                if old.is_dir() and not os.path.lexists(output):
                    os.rename(old, output)
    except OSError as error:
        raise _refused(output, error) from error


def _refused(output: Path, error: OSError) -> ConfigError:
    text = f"{output} cannot be written ({error.strerror or error}). Free some space, or choose another."
    return ConfigError(Problem("--output", text))


KEPT_IN_FP32 = (".e_score_correction_bias", ".balancing_biases")
"""Ends of the names of tensors that transformers keeps in fp32, whatever the other weights' dtype."""


def as_ours(weights: Weights) -> list[TensorToWrite]:
    """Return the tensors to write under this package's parameter names, bit for bit in the dtype they have now."""
    return [
        TensorToWrite(name, prod(shape) * DTYPES[weights.dtype(name)].itemsize, _Rows(weights, name, shape[0]))
        for name, shape in weights.shapes.items()
    ]


def as_huggingface(weights: Weights, config: ModelConfig, dtype: str) -> list[TensorToWrite]:
    """Return the tensors to write for the transformers architecture that is equivalent to `config`, in `dtype`.

    `dtype`: "fp32", "bf16" or "fp16".

    Raises:
        ConfigError: no architecture of transformers is equivalent.
    """
    parts: dict[str, list[_Part]] = {}
    for ours, stored in stored_as(config, architecture(config)).items():
        pieces = stored.count * stored.slices
        rows, names = stored.shape[0] // pieces, stored.tensors * stored.slices
        for number, name in enumerate(names):
            parts.setdefault(name, []).append(_Part(ours, stored, number * rows, (number + 1) * rows))
    for several in parts.values():
        if several[0].stored.slices > 1:  # of each slice all rows, before those of the next
            several.sort(key=lambda part: (part.first * part.stored.slices // part.stored.shape[0], part.stored.first))
    made = []
    for name, several in parts.items():
        kind = DTYPES["fp32" if name.endswith(KEPT_IN_FP32) else dtype]
        made.append(TensorToWrite(name, prod(several[0].stored.whole) * kind.itemsize, _Joined(weights, several, kind)))
    return made


class _Part(NamedTuple):
    """Rows `first` to `last` of our parameter `name`, which are a tensor of theirs or a part of one."""

    name: str
    stored: StoredParameter
    first: int
    last: int


class _Rows:
    """A whole parameter."""

    def __init__(self, weights: Weights, name: str, rows: int):
        self.weights, self.name, self.rows = weights, name, rows

    def __call__(self) -> Tensor:
        return self.weights.rows(self.name, 0, self.rows)


class _Joined:
    """A tensor of the architecture, from one parameter of the decoder or several concatenated ones."""

    def __init__(self, weights: Weights, several: list[_Part], dtype: torch.dtype):
        self.weights, self.several, self.dtype = weights, several, dtype

    def __call__(self) -> Tensor:
        parts = [self.weights.rows(each.name, each.first, each.last).to(self.dtype) for each in self.several]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        stored = self.several[0].stored
        return whole.t() if stored.transposed else whole.reshape(stored.whole)
