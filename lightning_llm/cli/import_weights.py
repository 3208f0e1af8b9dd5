"""The verb `import`: convert a Hugging Face folder, or a model on the Hub, into a folder for `model.init_from`.

`import` and `export` compare the logits of the converted model with transformers' (`parity_of`).
"""

import argparse
import importlib.util
import io
import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.base.integrity import FileContent, digest_of_file, seal
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.config.weight_folders import (
    END_TOKENS,
    GENERATION,
    HUGGINGFACE,
    IMPORTED,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from lightning_llm.data.tokens.tokenizer import read_vocabulary
from lightning_llm.model.flops import count_parameters
from lightning_llm.model.structure import experts_by_linear
from lightning_llm.model.weights.files import INDEX, PICKLED, PICKLED_INDEX, SINGLE, open_files, open_pickled
from lightning_llm.model.weights.folder import (
    FORMAT,
    FolderWeights,
    Weights,
    open_huggingface,
    open_imported,
)
from lightning_llm.model.weights.load import state_dict_of, whole_decoder
from lightning_llm.model.weights.write import as_ours, output_problems, undo_killed, whole_folder, write_tensors
from lightning_llm.run.resume.weights import rows_problems

TOKENS = 64
LARGEST_DIFFERENCE = 1e-3
"""Tolerance in fp32, relative to the largest logit. Rounding differences are below 1e-5."""
NO_PARITY = "Skip the comparison with --no-parity."
SIDE_FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    GENERATION,
    "chat_template.jinja",
)
"""Files of the tokenizer and of generation that are copied unchanged. Only the first is read here."""
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def import_weights(arguments: argparse.Namespace) -> int:
    """Convert a model, compare its logits with transformers', and print a summary; return 0, or 1 if they differ.

    Raises:
        ConfigError: the source cannot be read or converted, or the output cannot be written.
    """
    output = Path(arguments.output).expanduser().absolute()
    folder = source_folder(arguments.source, arguments.revision)
    problems: list[Problem] = []
    weights = None
    with gathered(problems):
        weights = open_source(folder)
        weights.config = weights.config.model_copy(update={"name": Path(arguments.source).name or folder.name})
    problems += [] if weights is None else tokenizer_problems(weights)
    tensors = [] if weights is None else as_ours(weights)
    with gathered(problems):
        for line in undo_killed(output):
            print(line, file=sys.stderr)
    problems += output_problems(output, folder, arguments.force, sum(each.size_bytes for each in tensors))
    if weights is not None and not arguments.no_parity:
        problems += parity_problems(weights.config)
    if problems or weights is None:
        raise ConfigError(problems)
    kept = ", ".join(sorted({weights.dtype(name) for name in weights.shapes}))
    print(f"read         {folder}")
    print(f"architecture {weights.architecture}: {shape_line(weights)}")
    print(f"parameters   {count_parameters(weights.config).total:,} in {kept}", flush=True)
    for note in weights.notes:
        print(note, flush=True)
    logits = "not compared with transformers (--no-parity)"
    try:
        with whole_folder(output, arguments.force) as partial:
            written = write_tensors(partial, tensors)
            copy_files(folder, partial)
            _write_manifest(partial, weights, folder, [*written, *_present(partial, (INDEX, TOKENIZER))])
            if not arguments.no_parity:
                parity = parity_of(folder, open_imported(partial))
                logits = parity.line
                if not parity.holds:
                    raise AnotherModelError(logits)
    except AnotherModelError as error:
        return error.report()
    print(f"logits       {logits}")
    if weights.tokenizer is None:
        print("note         no tokenizer.json: save the tokenizer as a fast tokenizer to have it checked and used")
    print(f"written      {output}")
    print(f"start        lightning-llm train model.init_from={output} ...")
    return 0


def source_folder(named: str, revision: str | None) -> Path:
    """Return the folder at the path `named`, or the download of the Hub model with that name.

    Raises:
        ConfigError: there is neither a folder nor a model with that name, or it cannot be downloaded.
    """
    path = Path(named).expanduser().absolute()
    if path.is_dir():
        if revision is not None:
            raise ConfigError(Problem("--revision", f"needs a model on the Hub, but {path} is a folder. Remove it."))
        return path
    if path.exists() or not HUB_NAME.fullmatch(named) or named.startswith("."):
        what = "is a file" if path.exists() else "does not exist"
        text = f"{what}. Give a Hugging Face folder (config.json, model.safetensors) or a Hub model (owner/name)."
        raise ConfigError(Problem(named, text))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def download(patterns: Iterable[str]) -> Path:
        return Path(snapshot_download(named, revision=revision, allow_patterns=[*patterns]))

    try:
        print(f"download     {named} from the Hub (there is no folder {path})", file=sys.stderr)
        found = download(("*.safetensors", "*.safetensors.index.json", HUGGINGFACE, *SIDE_FILES))
        if not any(found.glob("*.safetensors")):
            found = download((f"{PICKLED.removesuffix('.bin')}*.bin", PICKLED_INDEX, HUGGINGFACE, *SIDE_FILES))
    except HFValidationError as error:
        text = f"neither a folder nor a valid name on the Hub: {error}"
        raise ConfigError(Problem(named, text)) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        text = f"not a folder, and the download from the Hub failed: {first}. Check the name, or give a folder."
        raise ConfigError(Problem(named, text)) from error
    return found


def open_source(folder: Path) -> FolderWeights:
    """Return the weights of a Hugging Face folder; pickled ones only if it has no others. Raises ConfigError."""
    pickled = any((folder / name).is_file() for name in (PICKLED, PICKLED_INDEX))
    plain = any((folder / name).is_file() for name in (SINGLE, INDEX))
    return open_huggingface(folder, open_pickled if pickled and not plain else open_files)


def tokenizer_problems(weights: Weights) -> list[Problem]:
    """Return problems if the tokenizer.json next to the weights cannot be read or does not fit them."""
    if weights.tokenizer is None:
        return []
    try:
        vocabulary = read_vocabulary(weights.tokenizer)
    except (OSError, ValueError) as error:
        text = f"{error}. Save the tokenizer again, or delete the file to convert the weights without one."
        return [Problem(str(weights.tokenizer), text)]
    return list(rows_problems(vocabulary, weights))


def copy_files(source: Path, target: Path, names: Iterable[str] = SIDE_FILES) -> None:
    """Copy the files in `names` that exist in `source` to `target`."""
    for file in _present(source, names):
        shutil.copyfile(file, target / file.name)


def _present(folder: Path, names: Iterable[str]) -> list[Path]:
    return [folder / name for name in names if (folder / name).is_file()]


def _write_manifest(folder: Path, weights: FolderWeights, source: Path, files: list[Path]) -> None:
    written = {file.name: FileContent(file.stat().st_size, digest_of_file(file)) for file in files}
    values: dict[str, Any] = {
        "format": FORMAT,
        "source": str(source),
        "architecture": weights.architecture,
        "model": weights.config.model_dump(mode="json"),
        END_TOKENS: list(weights.end_tokens),
        "files": {name: {"bytes": each.size_bytes, "digest": each.digest} for name, each in written.items()},
    }
    (folder / IMPORTED).write_bytes(seal(values))


def shape_line(weights: FolderWeights) -> str:
    """Return the shape of the model as one line: layers, widths, heads, vocabulary, sequence length."""
    model = weights.config
    scaled = f", rope {model.rope_scaling.name}" if model.rope_scaling else ""
    tied = ", tied head" if model.tie_embeddings else ""
    return (
        f"{model.num_layers} layers of {model.hidden_size}, {model.num_heads} heads ({model.num_kv_heads} KV heads), "
        f"vocabulary {model.vocab_size:,}, {model.max_sequence_length:,} tokens{scaled}{tied}"
    )


class AnotherModelError(Exception):
    """The converted model and transformers compute different logits: nothing is written. Exit code 1."""

    def report(self) -> int:
        """Print the error; return the exit code."""
        text = f"error: logits {self}: the converted model is not equivalent. Nothing was written."
        print(text, file=sys.stderr)
        return 1


class Parity(NamedTuple):
    """Largest difference of a logit from transformers, and transformers' largest logit, in fp32 over `tokens`."""

    difference: float
    largest_logit: float
    tokens: int

    @property
    def holds(self) -> bool:
        """True if both models are equivalent: the difference is within the tolerance `LARGEST_DIFFERENCE`."""
        return self.difference <= LARGEST_DIFFERENCE * self.largest_logit

    @property
    def line(self) -> str:
        """The result of the comparison in one line."""
        return (
            f"differ from transformers' by at most {self.difference:.1e} (the largest logit is "
            f"{self.largest_logit:.3g}; fp32, {self.tokens} random tokens)"
        )


def parity_problems(config: ModelConfig, codes: bool = False) -> list[Problem]:
    """Return problems that prevent the comparison: a library is missing, or the model is too large for memory.

    `codes`: the folder has codes, which transformers reads by compressed-tensors.
    """
    if importlib.util.find_spec("transformers") is None:
        text = "is not installed, and the weights are compared with it. pip install transformers, or use --no-parity."
        return [Problem("transformers", text)]
    if codes and importlib.util.find_spec("compressed_tensors") is None:
        text = (
            "is not installed, by which transformers reads codes. pip install compressed-tensors, or use --no-parity."
        )
        return [Problem("compressed-tensors", text)]
    needed, free = 2 * 4 * count_parameters(config, padded=True).total, psutil.virtual_memory().available
    if needed <= free:
        return []
    text = (
        f"needs two copies of the model in fp32, {needed / 1e9:.1f} GB, but only {free / 1e9:.1f} GB of memory are "
        "free. Skip it with --no-parity."
    )
    return [Problem("comparison with transformers", text)]


@torch.no_grad()
def parity_of(folder: Path, weights: Weights, codes: bool = False) -> Parity:
    """Return the comparison of the fp32 logits of our decoder with `weights` and of transformers' model in `folder`.

    `codes`: the folder has codes, which transformers reads as bf16 numbers. All weights are rounded to bf16 then. It
    stacks the weights of experts and reads no codes of them, so those are read by compressed-tensors before.

    Raises:
        ConfigError: transformers cannot load the folder or compute the logits.
    """
    config = weights.config
    length = min(TOKENS, config.max_sequence_length)
    tokens = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))  # [1, T]
    if codes and experts_by_linear(config):
        with TemporaryDirectory() as plain, _transformers_may_fail("cannot read the codes", NO_PARITY):
            _decompress(folder, Path(plain))
            theirs = _theirs(Path(plain), tokens, codes)
    else:
        theirs = _theirs(folder, tokens, codes)  # [1, T, V]
    ours = _ours(weights, tokens, codes)  # [1, T, V]
    return Parity(float((ours - theirs).abs().max()), float(theirs.abs().max()), length)


def _ours(weights: Weights, tokens: Tensor, codes: bool) -> Tensor:
    state = {name: each.bfloat16() if codes else each for name, each in state_dict_of(weights).items()}
    logits: Tensor = whole_decoder(weights.config, state)(tokens)[..., : weights.config.vocab_size]
    return logits


def _decompress(folder: Path, plain: Path) -> None:
    """Write the weights of `folder` to the folder `plain` as compressed-tensors reads its codes: bf16 numbers."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file, save_file

    entries = json.loads((folder / HUGGINGFACE).read_text(encoding="utf-8"))
    found = QuantizationConfig.model_validate(entries.pop("quantization_config"))
    (scheme,) = found.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(found.format)
    state = {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}
    for linear in [name.removesuffix(".weight_scale") for name in state if name.endswith(".weight_scale")]:
        names = [name for name in state if name.rpartition(".")[0] == linear]
        parts = {name.rpartition(".")[2]: state.pop(name) for name in names}
        state[f"{linear}.weight"] = compressor.decompress(parts, scheme)["weight"].bfloat16()
    save_file(state, plain / SINGLE, metadata={"format": "pt"})
    (plain / HUGGINGFACE).write_text(json.dumps(entries), encoding="utf-8")


def _theirs(folder: Path, tokens: Tensor, codes: bool) -> Tensor:
    quiet: Any = redirect_stderr(io.StringIO()) if codes else nullcontext()  # compressed-tensors draws bars
    with quiet, _transformers_may_fail("cannot load the model", NO_PARITY):
        from transformers import AutoModelForCausalLM, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16 if codes else torch.float32,
            attn_implementation="eager",  # others do not support capped attention scores
            local_files_only=True,
            trust_remote_code=False,
        )
        if codes:
            model.eval()(tokens)  # the first pass replaces codes by numbers, in bf16
            nn.Module.float(model)
        logits: Tensor = model.eval()(tokens).logits
    return logits


def check_accepted(entries: Mapping[str, Any]) -> None:
    """Raise ConfigError if transformers is installed and rejects a config.json with these `entries`."""
    if importlib.util.find_spec("transformers") is None:
        return
    with _transformers_may_fail("rejects the config.json of this model", "Its checkpoints are kept."):
        from transformers import AutoConfig

        AutoConfig.for_model(**entries)


@contextmanager
def _transformers_may_fail(what: str, remedy: str) -> Iterator[None]:
    """Turn any exception of transformers into a one-line ConfigError; exception classes differ between versions."""
    try:
        yield
    except Exception as error:
        name = f"transformers {metadata.version('transformers')}"
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # Validators of transformers name the field in the first line and the reason in the last.
        why = ": ".join([type(error).__name__, *dict.fromkeys([*lines[:1], *lines[-1:]])]).rstrip(".")
        raise ConfigError(Problem(name, f"{what}: {why}. {remedy}")) from error
