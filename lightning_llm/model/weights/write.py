"""Tensors to a folder of safetensors files, and such a folder under its name only when it is whole."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_llm.errors import ConfigError, Problem
from lightning_llm.model.weights.files import INDEX, SINGLE

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 5 * 10**9
"""Of a file, unless one tensor alone has more: transformers' default."""
OURS = re.compile(
    r"(model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|[\w.-]+\.json|README\.md|loss\.png|tokenizer\.model|"
    r"merges\.txt|vocab\.txt|chat_template\.jinja|LICENSE[\w.]*)"
)
"""Names of files that `import` and `export` write: what --force may replace holds nothing else."""


@dataclass(frozen=True)
class ToWrite:
    """One tensor: its name and bytes, and what makes it when its file is written."""

    name: str
    size_bytes: int
    make: "Callable[[], Tensor]"


def write_tensors(folder: Path, tensors: Sequence[ToWrite], shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write `tensors` to model.safetensors, or to several files and their index; return the files of tensors.

    No more than one file's tensors are held at a time. Raises OSError where one cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    shards: list[list[ToWrite]] = [[]]
    for each in tensors:
        if shards[-1] and sum(one.size_bytes for one in shards[-1]) + each.size_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(each)
    names = [SINGLE] if len(shards) == 1 else [_shard_name(i, len(shards)) for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        made = {each.name: _own(each.make()) for each in shard}
        try:
            save_file(made, folder / name, metadata={"format": "pt"})
        except SafetensorError as error:  # in which it wraps what the system says of a full disk
            raise OSError(str(error)) from error
    if len(shards) > 1:
        where = {each.name: name for name, shard in zip(names, shards, strict=True) for each in shard}
        total = sum(each.size_bytes for each in tensors)
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return [folder / name for name in names]


def _own(tensor: "Tensor") -> "Tensor":
    """Return a copy that shares memory with nothing: parts of one tensor may be written as several."""
    import torch

    return tensor.clone(memory_format=torch.contiguous_format)


def _shard_name(number: int, count: int) -> str:
    return SINGLE.replace(".safetensors", f"-{number:05d}-of-{count:05d}.safetensors")


def output_problems(output: Path, source: Path, force: bool, needed_bytes: int = 0) -> list[Problem]:
    """Return why `output` cannot be written: it is there, and not to be replaced, is `source`, or there is no room."""
    if source.resolve() in (output.resolve(), *output.resolve().parents):
        return [Problem("--output", f"{output} lies in the folder that is read. Choose another.")]
    if os.path.lexists(output):
        if not force:
            return [Problem("--output", f"{output} is there already. Choose another, or say --force to replace it.")]
        if output.is_symlink() or not output.is_dir():
            return [Problem("--output", f"{output} is no folder, and --force replaces only those. Choose another.")]
        if others := sorted(each.name for each in output.iterdir() if each.is_dir() or not OURS.fullmatch(each.name)):
            text = (
                f"{output} holds {others[0]}, which is no part of weights, and --force would delete it. Choose another."
            )
            return [Problem("--output", text)]
    above = next(each for each in output.parents if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        return [Problem("--output", f"{output} cannot be written ({above} refuses). Choose another.")]
    free = shutil.disk_usage(above).free
    if needed_bytes > free:
        sizes = f"{output} needs {needed_bytes / 1e9:.1f} GB, and {above} has {free / 1e9:.1f} GB free"
        return [Problem("--output", f"{sizes}. Make room, or choose another.")]
    return []


@contextmanager
def whole_folder(output: Path) -> Iterator[Path]:
    """Give a folder beside `output` to write into; it takes that name, in one move, when the block has ended well.

    What was there before under the name is deleted then, and only then. A killed process leaves `.NAME.partial` behind,
    which the next one deletes.

    Raises:
        ConfigError: it cannot be written.
    """
    partial, old = output.with_name(f".{output.name}.partial"), output.with_name(f".{output.name}.replaced")
    try:
        for left in (partial, old):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for path in [*partial.iterdir(), partial]:
            _sync(path)
        if output.exists():
            os.rename(output, old)
        os.rename(partial, output)
        shutil.rmtree(old, ignore_errors=True)
        _sync(output.parent)
    except OSError as error:
        text = f"{output} cannot be written ({error.strerror or error}). Make room, or choose another."
        raise ConfigError(Problem("--output", text)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
