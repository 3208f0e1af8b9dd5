"""Weights of an imported or Hugging Face folder, read by rows under this package's parameter names.

Opening a folder checks its headers. Only the requested rows are read, and nothing is executed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.base.integrity import (
    FileContent,
    content_problem,
    digest_of_file,
    parse_object,
    read_regular,
    size_problem,
    unseal,
)
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.config.weight_folders import HUGGINGFACE, IMPORTED, TOKENIZER, end_tokens_of
from lightning_llm.model.interop.architecture import Architecture
from lightning_llm.model.interop.families import StoredParameter, architecture_named, model_config_of, stored_as
from lightning_llm.model.structure import parameter_shapes, shape_problems
from lightning_llm.model.weights.files import DTYPES, TensorFiles, open_files, some_of

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
"""Of the manifest of an imported folder:
`{"format", "source", "architecture", "model", "end_tokens", "files": {name: {"bytes", "digest"}}}`."""
ADAPTER = "adapter_config.json"
ROWS = 4096
"""Rows of two tensors that are compared at once."""
MTP = "multi-token prediction (num_nextn_predict_layers)"
TORCH_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Our names of dtypes, by torch's."""
MATCH = "Use the config.json that belongs to the weights."
SHOWN_SHAPES = 6
"""Largest number of tensors with a wrong shape that a message names."""


class Weights(ABC):
    """Base class of stored weights of a decoder of `config`. `path`: location; `kind`: description of the format."""

    kind: str
    path: Path
    config: ModelConfig
    architecture: str | None
    """Class of transformers that the weights belong to, such as "LlamaForCausalLM"; None if there is none."""
    notes: tuple[str, ...] = ()
    """One line for each choice that may surprise, such as a difference to transformers."""
    end_tokens: tuple[int, ...] = ()
    """Ids of end tokens, if files next to the weights name any."""

    @abstractmethod
    def rows(self, name: str, first: int, last: int) -> "Tensor":
        """Return rows `first` to `last` (exclusive) of parameter `name` of a `Decoder`, in the stored dtype, on the
        CPU.

        Embeddings and heads have one row per token id, without padding.
        """

    @abstractmethod
    def dtype(self, name: str) -> str:
        """Return the stored dtype of parameter `name` of a `Decoder`: "fp32", "bf16" or "fp16"."""

    @abstractmethod
    def files(self) -> dict[Path, FileContent | None]:
        """Return {file: its recorded size and digest, None if unknown} of all files of the weights."""

    @abstractmethod
    def verify(self, rank: int = 0, world: int = 1) -> None:
        """Verify all files that are not yet verified; with several ranks, each verifies a share.

        Raises ConfigError if a file differs from the recorded content.
        """

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer.json in the folder, None if there is none."""
        file = self.path / TOKENIZER
        return file if file.is_file() else None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by its name in a `Decoder`, without rows that pad the vocabulary."""
        return parameter_shapes(self.config)

    def digests(self, rank: int = 0, world: int = 1) -> dict[str, str]:
        """Return 32 hex digits over the bytes of each file, by name; each of several ranks reads a share.

        Raises:
            ConfigError: a file differs from the recorded content.
        """
        found: dict[str, str] = {}
        problems = []
        largest_first = sorted(self.files().items(), key=lambda item: (-item[0].stat().st_size, item[0]))
        for file, written in largest_first[rank::world]:
            if written is None or written.digest is None:
                found[file.name] = digest_of_file(file)
            elif problem := content_problem(file, written):
                problems.append(Problem(str(file), f"{problem}. Import it again."))
            else:
                found[file.name] = written.digest
        if problems:
            raise ConfigError(problems)
        return found


def digest_of(digests: Mapping[str, str]) -> str:
    """Return one digest (32 hex digits) over the digests of all files, which identifies weights in a run's summary."""
    return sha256("\n".join(f"{name} {digest}" for name, digest in sorted(digests.items())).encode()).hexdigest()[:32]


class FolderWeights(Weights):
    """Weights in the tensor files of a folder; each parameter of the decoder is one of the tensors or a part of one."""

    def __init__(
        self,
        path: Path,
        kind: str,
        config: ModelConfig,
        architecture: str | None,
        files: TensorFiles,
        stored: Mapping[str, StoredParameter],
        written: Mapping[str, FileContent] | None = None,
    ):
        """Raises ConfigError if the end-of-text tokens in the folder's files are invalid."""
        self.path, self.kind, self.config, self.architecture = path, kind, config, architecture
        self.tensors, self.stored, self.written = files, dict(stored), dict(written or {})
        self.end_tokens = end_tokens_of(path)

    def rows(self, name: str, first: int, last: int) -> "Tensor":
        import torch

        where = self.stored[name]
        if where.slices > 1:
            places = where.of_slices(first, last)
            found = [self.tensors.indexed(where.name, slice(at, at + 1), slice(*rows))[0] for at, *rows in places]
            return found[0] if len(found) == 1 else torch.cat(found)
        axis = 1 if where.transposed else 0
        parts = [self.tensors.part(tensor, start, stop, axis) for tensor, start, stop in where.parts(first, last)]
        part = parts[0] if len(parts) == 1 else torch.cat(parts, axis)
        return part.t() if where.transposed else part.reshape(-1, *where.shape[1:])

    def dtype(self, name: str) -> str:
        return DTYPES[self.tensors.entries[self.stored[name].tensors[0]].dtype]

    def verify(self, rank: int = 0, world: int = 1) -> None:
        if self.written:
            self.digests(rank, world)

    def files(self) -> dict[Path, FileContent | None]:
        return {file: self.written.get(file.name) for file in self.tensors.files}


def open_huggingface(path: Path, open_tensors: Callable[[Path], TensorFiles] = open_files) -> FolderWeights:
    """Return the weights of a Hugging Face folder.

    Raises:
        ConfigError: with everything that is wrong with config.json, the files and the tensors in them.
    """
    problems: list[Problem] = []
    config, family, files = None, None, None
    try:
        values = _read_object(path / HUGGINGFACE)
        family = architecture_named(values)
        config = model_config_of(values, path.name)
        problems += [Problem(str(path / HUGGINGFACE), f"makes no model: {each}") for each in shape_problems(config)]
    except ConfigError as error:
        problems += [Problem(_under(path, each.key), each.text) for each in error.problems]
    if (path / ADAPTER).exists():
        text = "is there: transformers adds that adapter to the weights. Merge it into them, or move it away."
        problems.append(Problem(str(path / ADAPTER), text))
    with gathered(problems):
        files = open_tensors(path)
    if problems or config is None or family is None or files is None:
        raise ConfigError(problems)
    stored = _with_their_names(files, stored_as(config, family), family)
    behind = tuple(
        f"{family.block_prefix.removeprefix(prefix)}.{config.num_layers + number}."
        for number in range(family.further_blocks(values))
        for prefix in ("", family.base_prefix)
    )
    left_out = partial(_is_left_out, family, config, behind)
    if problems := list(_differences(path, files, stored, left_out)):
        raise ConfigError(problems)
    if config.tie_embeddings and (head := f"{family.ends['head']}.weight") in files.entries:
        _refuse_two_heads(path, files, stored["embedding.weight"].name, head)
    weights = FolderWeights(path, "a Hugging Face folder", config, family.class_name, files, stored)
    weights.notes = tuple(_dtype_notes(values, weights))
    if skipped := sum(name.startswith(behind) for name in files.entries) if behind else 0:
        weights.notes += (f"note   {path}: {skipped} tensors of {MTP} are left out: this decoder has none",)
    return weights


def _refuse_two_heads(path: Path, files: TensorFiles, embedding: str, head: str) -> None:
    """Raise ConfigError where the head of a tied model is not its embedding: transformers then does not tie them."""
    import torch

    rows = files.entries[embedding].shape[0]
    alike = files.entries[head].shape == files.entries[embedding].shape and all(
        torch.equal(*(files.part(name, first, min(first + ROWS, rows)).float() for name in (embedding, head)))
        for first in range(0, rows, ROWS)
    )
    if not alike:
        text = (
            f"is true or left out, which ties head and embedding, and {head} holds other numbers than {embedding}. "
            "Set it to false, or remove the tensor that is wrong."
        )
        raise ConfigError(Problem(f"{path}/{HUGGINGFACE} tie_word_embeddings", text))


def _dtype_notes(values: Mapping[str, Any], weights: FolderWeights) -> Iterator[str]:
    """Yield a note if tensors have another dtype than config.json declares."""
    said = values.get("dtype") or values.get("torch_dtype")
    kept = sorted({weights.dtype(name) for name in weights.shapes})
    if isinstance(said, str) and kept != [TORCH_DTYPES.get(said, said)]:
        yield (
            f"note   config.json of {weights.path} declares {said}, but its tensors are {', '.join(kept)}: they are "
            "read unchanged; transformers would cast them"
        )


def open_imported(path: Path) -> FolderWeights:
    """Return the weights of a folder written by `import`.

    Raises:
        ConfigError: with everything that is not as it was written.
    """
    values = read_manifest(path)
    try:
        config = ModelConfig.model_validate(values["model"])
        written = {name: FileContent(int(each["bytes"]), str(each["digest"])) for name, each in values["files"].items()}
        named = values.get("architecture")
    except (KeyError, TypeError, ValueError, AttributeError, ValidationError) as error:
        text = f"is of another version ({type(error).__name__}). Import the weights again."
        raise ConfigError(Problem(str(path / IMPORTED), text)) from error
    problems = [
        Problem(str(path / name), f"{what}. Import the weights again.")
        for name, each in written.items()
        if (what := size_problem(path / name, each))
    ]
    if problems:
        raise ConfigError(problems)
    files = open_files(path)
    stored = {name: StoredParameter(name, shape, shape) for name, shape in parameter_shapes(config).items()}
    if problems := list(_differences(path, files, stored, lambda name: False)):
        raise ConfigError(problems)
    return FolderWeights(
        path, "an imported folder", config, None if named is None else str(named), files, stored, written
    )


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of an imported folder. Raises ConfigError if it was changed."""
    file = path / IMPORTED
    try:
        values = unseal(read_regular(file))
        if values.get("format") != FORMAT:
            raise ValueError(f"has format {values.get('format')}: this release reads format {FORMAT}")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(Problem(str(file), f"{why}. Import the weights again.")) from error
    return values


def _read_object(file: Path) -> dict[str, Any]:
    try:
        return parse_object(read_regular(file))
    except OSError as error:
        raise ConfigError(Problem(HUGGINGFACE, f"cannot be read ({error.strerror}). Make it readable.")) from error
    except ValueError as error:
        raise ConfigError(Problem(HUGGINGFACE, f"{error}. Download or copy it again.")) from error


def _under(path: Path, key: str) -> str:
    return f"{path}/{key}" if key.startswith(HUGGINGFACE) else key


def _with_their_names(
    files: TensorFiles, stored: Mapping[str, StoredParameter], family: Architecture
) -> dict[str, StoredParameter]:
    """Return `stored` under the names in `files`, which lack a prefix where the model was saved without its head."""
    bare = {name: replace(each, name=each.name.removeprefix(family.base_prefix)) for name, each in stored.items()}
    as_is, without = (
        {tensor for each in names.values() for tensor in each.tensors} & files.entries.keys()
        for names in (stored, bare)
    )
    return bare if len(without) > len(as_is) else dict(stored)


def _is_left_out(family: Architecture, config: ModelConfig, behind: tuple[str, ...], name: str) -> bool:
    """Return whether a tensor of a file is no weight, of a block `behind` the decoder's, or the tied head."""
    if name.endswith(family.buffers) or (behind and name.startswith(behind)):
        return True
    return config.tie_embeddings and name == f"{family.ends['head']}.weight"


def _differences(
    path: Path, files: TensorFiles, stored: Mapping[str, StoredParameter], left_out: Callable[[str], bool]
) -> Iterator[Problem]:
    """Yield a problem for each difference between the tensors in the files and those of the config."""
    wanted = {tensor: each.whole for each in stored.values() for tensor in each.tensors}
    found = {name: entry for name, entry in files.entries.items() if not left_out(name)}
    if missing := [name for name in wanted if name not in found]:
        yield Problem(str(path), f"has no tensor {some_of(missing)}, which its config requires. {MATCH}")
    if extra := [name for name in found if name not in wanted]:
        yield Problem(str(path), f"has the tensor {some_of(extra)}, which its config does not define. {MATCH}")
    others = [name for name, shape in wanted.items() if name in found and found[name].shape != shape]
    for name in others[:SHOWN_SHAPES]:
        entry = found[name]
        text = f"{name} has shape {entry.shape} in {entry.file.name}, and {wanted[name]} by its config. {MATCH}"
        yield Problem(str(path), text)
    if len(others) > SHOWN_SHAPES:
        text = f"{len(others) - SHOWN_SHAPES} more tensors have shapes that differ from its config. {MATCH}"
        yield Problem(str(path), text)
    odd = [f"{name} ({entry.dtype})" for name, entry in found.items() if name in wanted and entry.dtype not in DTYPES]
    if odd:
        yield Problem(
            str(path), f"keeps {some_of(odd)}; weights are read in {', '.join(DTYPES.values())}. Convert them first."
        )
