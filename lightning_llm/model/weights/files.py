"""Tensor files of a folder (safetensors or pytorch_model.bin): headers are read at once, parts of tensors on request.

Nothing in them is executed. Names, shapes and dtypes come from the headers alone, without torch. A file is mapped only
while a part of it is read, so that earlier parts do not stay in memory.
"""

import json
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.base.integrity import unpickling_problem

if TYPE_CHECKING:
    from torch import Tensor

SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
PICKLED = "pytorch_model.bin"
PICKLED_INDEX = f"{PICKLED}.index.json"
DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
"""Supported dtypes of weights, by safetensors' names."""
LARGEST_INDEX_BYTES = 1 << 28
SHOWN = 3
"""Number of names of a kind in a message."""


@dataclass(frozen=True)
class Entry:
    """Place and shape of one stored tensor: its file, its shape, and its dtype as safetensors calls it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class TensorFiles:
    """Tensors of one safetensors file or of several, by name."""

    folder: Path
    files: tuple[Path, ...]
    entries: dict[str, Entry] = field(repr=False)

    def part(self, name: str, first: int, last: int, axis: int = 0) -> "Tensor":
        """Return indices `first` to `last` of `axis` (0 or 1) of tensor `name`, in its dtype, on the CPU.

        Raises:
            ConfigError: the file cannot be read any more.
        """
        indices = (slice(first, last),) if axis == 0 else (slice(None), slice(first, last))
        return self.indexed(name, *indices)

    def indexed(self, name: str, *indices: slice) -> "Tensor":
        """Return the part of tensor `name` that the `indices` of its first dimensions select; errors as `part`."""
        from safetensors import SafetensorError, safe_open

        file = self.entries[name].file
        try:
            with safe_open(file, framework="pt") as opened:
                whole = opened.get_slice(name)
                found: Tensor = whole[indices]
                return found
        except (SafetensorError, OSError) as error:
            raise ConfigError(Problem(str(file), f"cannot be read: {error}. {AGAIN}")) from error


@dataclass(frozen=True)
class PickledFiles(TensorFiles):
    """Tensors by name from pytorch_model.bin, read by `torch.load` with `weights_only`.

    Mapped, and not read until a part is; a file of torch before 1.6 is read whole, and stays in memory.
    """

    tensors: dict[str, Any] = field(default_factory=dict, repr=False)

    def indexed(self, name: str, *indices: slice) -> "Tensor":
        found: Tensor = self.tensors[name][indices]
        return found


def open_files(folder: Path, single: str = SINGLE) -> TensorFiles:
    """Return the tensors of the safetensors files in `folder`: `single`, or those that its index names.

    Raises:
        ConfigError: with each file that is missing, short or damaged, and each tensor that is not where it should be.
    """
    index = folder / f"{single}.index.json"
    listed = _read_index(index) if _is_file(index) else None
    _refuse_two_sets(folder / single, index, listed)
    files = _files_of(folder, single) if listed is None else sorted({folder / name for name in listed.values()})
    entries: dict[str, Entry] = {}
    problems: list[Problem] = []
    for file in files:
        with gathered(problems):
            found = dict(_header(file))
            for name in found.keys() & entries.keys():
                text = f"has {name}, which {entries[name].file.name} has, too. Remove one."
                problems.append(Problem(str(file), text))
            entries |= found
    if listed is not None and not problems:
        lost = [name for name, file in listed.items() if name not in entries or entries[name].file.name != file]
        if lost:
            text = f"gives a wrong file for {some_of(lost)}. Download the folder again."
            problems.append(Problem(str(index), text))
    if problems:
        raise ConfigError(problems)
    return TensorFiles(folder, tuple(files), entries)


def open_pickled(folder: Path) -> PickledFiles:
    """Return the tensors of pytorch_model.bin, or of those that its index names. They may only hold tensors.

    Raises:
        ConfigError: with each file that is missing, damaged, or names code (which is never run).
    """
    import torch

    index = folder / PICKLED_INDEX
    listed = _read_index(index) if _is_file(index) else None
    _refuse_two_sets(folder / PICKLED, index, listed)
    names = [PICKLED] if listed is None else sorted(set(listed.values()))
    kinds = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    problems, entries, tensors = [], {}, {}
    for file in (folder / name for name in names):
        if not _is_file(file):
            problems.append(Problem(str(file), _missing(file)))
            continue
        try:
            # Before torch 1.6 it wrote no zip file, and mapped is one alone: such files are read whole.
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=_is_zip(file))
        except pickle.UnpicklingError as error:
            text = f"{unpickling_problem(error)}. Use a complete file that contains only tensors."
            problems.append(Problem(str(file), text))
            continue
        except Exception as error:  # torch's reader raises many types for damaged bytes
            problems.append(Problem(str(file), f"cannot be read: {(str(error).splitlines() or [''])[0]}. {AGAIN}"))
            continue
        if not isinstance(loaded, dict) or not all(isinstance(each, torch.Tensor) for each in loaded.values()):
            problems.append(Problem(str(file), "is not a dict of tensors by name. Save the model's state dict."))
            continue
        for name, tensor in loaded.items():
            entries[str(name)] = Entry(file, tuple(tensor.shape), kinds.get(tensor.dtype, str(tensor.dtype)))
            tensors[str(name)] = tensor
    if problems:
        raise ConfigError(problems)
    return PickledFiles(folder, tuple(folder / name for name in names), entries, tensors)


def _refuse_two_sets(single: Path, index: Path, listed: dict[str, str] | None) -> None:
    """Raise ConfigError if an index leads to files other than the single file next to it, which transformers reads."""
    if listed is not None and _is_file(single) and set(listed.values()) != {single.name}:
        text = f"exists next to {index.name}, which lists other files. Remove the weights that should not be used."
        raise ConfigError(Problem(str(single), text))


AGAIN = "Download or copy it again."
ZIP = b"PK\x03\x04"
"""First bytes of a zip file. Like torch, look only at these: zipfile needs the end, which a damaged file may lack."""


def _is_zip(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(ZIP)) == ZIP


def _files_of(folder: Path, single: str) -> list[Path]:
    """Return the only weight file of a folder without an index."""
    if _is_file(folder / single):
        return [folder / single]
    if os.path.islink(folder / single):
        raise ConfigError(Problem(str(folder / single), _missing(folder / single)))
    parts = sorted(each.name for each in folder.glob("*.safetensors"))
    pickled = sorted(each.name for each in folder.glob("*.bin"))
    if parts:
        text = (
            f"is missing, and {some_of(parts)} {'exists' if len(parts) == 1 else 'exist'}: the files of the "
            "tensors are unknown. Download the folder again, with its index."
        )
        raise ConfigError(Problem(str(folder / f"{single}.index.json"), text))
    if pickled:
        text = (
            f"is missing, and {pickled[0]} is pickled, which is not read by slices. Make a folder of it: "
            f"lightning-llm import {folder} --output DIR."
        )
        raise ConfigError(Problem(str(folder / single), text))
    raise ConfigError(Problem(str(folder / single), _missing(folder / single)))


def _read_index(file: Path) -> dict[str, str]:
    """Return tensor -> file name. Raises ConfigError if it is no index, or names files outside the folder."""
    try:
        if file.stat().st_size > LARGEST_INDEX_BYTES:
            raise ValueError(f"it has {file.stat().st_size:,} bytes")
        listed = json.loads(file.read_bytes())["weight_map"]
        if not isinstance(listed, dict) or not listed:
            raise ValueError("weight_map is not an object of names")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(Problem(str(file), f"is not an index of weights ({why}). {AGAIN}")) from error
    out = {str(name) for name in listed.values() if not _is_plain_name(name)}
    if out:
        text = f"names {some_of(sorted(out))}, which {'is' if len(out) == 1 else 'are'} not in this folder. {AGAIN}"
        raise ConfigError(Problem(str(file), text))
    return listed


def _is_plain_name(name: Any) -> bool:
    """Return whether `name` is that of a file in the folder itself."""
    return (
        isinstance(name, str) and 0 < len(name) < 256 and name not in (".", "..") and not set(name) & {"/", "\\", "\0"}
    )


def _header(file: Path) -> Iterator[tuple[str, Entry]]:
    """Yield the tensors of one safetensors file. Raises ConfigError if it is invalid or incomplete."""
    from safetensors import SafetensorError, safe_open

    if not _is_file(file):
        raise ConfigError(Problem(str(file), _missing(file)))
    try:
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                part = opened.get_slice(name)
                yield name, Entry(file, tuple(part.get_shape()), str(part.get_dtype()))
    except (SafetensorError, OSError, ValueError, OverflowError) as error:
        raise ConfigError(Problem(str(file), f"is {_in_words(error)}. {AGAIN}")) from error


def _in_words(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    if "incomplete" in text.lower() or "not fully covered" in text.lower() or "MetadataIncompleteBuffer" in text:
        return f"shorter or longer than its header declares ({text})"
    return f"no safetensors file, or a damaged one ({text})"


def _missing(file: Path) -> str:
    if os.path.islink(file):
        return "is a link that leads nowhere, or to itself. Download the folder again."
    what = "is a folder, not a file" if _is_dir(file) else "is missing"
    return f"{what}, so there are no weights. Download or copy the folder again."


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, RuntimeError, ValueError):  # a link that leads to itself
        return False


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, RuntimeError, ValueError):
        return False


def some_of(names: list[str]) -> str:
    """Return the first few of `names` as text, with the number of all others: "a, b, c and 5 more"."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
