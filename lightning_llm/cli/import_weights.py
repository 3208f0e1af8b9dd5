"""The verb `import`: convert a Hugging Face folder, or a model on the Hub, into a folder for `model.init_from`."""

import argparse
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.base.integrity import FileContent, digest_of_file, seal
from lightning_llm.cli.parity import AnotherModelError, parity_of, parity_problems
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
from lightning_llm.model.weights.convert import as_ours
from lightning_llm.model.weights.files import INDEX, PICKLED, PICKLED_INDEX, SINGLE, open_files, open_pickled
from lightning_llm.model.weights.folder import (
    FORMAT,
    FolderWeights,
    Weights,
    open_huggingface,
    open_imported,
)
from lightning_llm.model.weights.write import output_problems, undo_killed, whole_folder, write_tensors
from lightning_llm.run.resume.weights import rows_problems

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
    """Check, convert, compare with transformers, and print a summary; return 0, or 1 if logits differ."""
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
            hand_on(folder, partial)
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


def hand_on(source: Path, target: Path, names: Iterable[str] = SIDE_FILES) -> None:
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
    """Return the sizes of the model as one line."""
    model = weights.config
    scaled = f", rope {model.rope_scaling.name}" if model.rope_scaling else ""
    tied = ", tied head" if model.tie_embeddings else ""
    return (
        f"{model.num_layers} layers of {model.hidden_size}, {model.num_heads} heads ({model.num_kv_heads} KV heads), "
        f"vocabulary {model.vocab_size:,}, {model.max_sequence_length:,} tokens{scaled}{tied}"
    )
