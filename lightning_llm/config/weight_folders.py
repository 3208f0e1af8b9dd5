"""Folders of weights (imported, Hugging Face, or of a run): files, model shape, tokenizer and end tokens."""

import importlib
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.integrity import parse_object, read_regular, unseal
from lightning_llm.config.yaml_file import read_mapping

IMPORTED = "weights.json"
"""File in folders made by `import`, with the model and a manifest."""
HUGGINGFACE = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"
UNNAMED = "???"
"""`model.init_from` of a preset that starts from weights not given yet. Allowed in `plan`, not in `train`."""
NOT_SHAPE = ("name", "init_from", "parameters_published")
"""Keys of `model` that are not part of its shape."""
INIT_FROM = "model.init_from"
FAMILIES, TOKENIZERS = "lightning_llm.model.interop.families", "lightning_llm.data.tokens.tokenizer"
"""Modules that read config.json and tokenizer.json. Imported by name when needed, because they are above this
package."""
EXPECTED = (
    "a folder that `import` made, a Hugging Face folder (config.json, model.safetensors), a run's folder, or one of "
    "its checkpoints/step=N"
)
END_TOKENS, EOS = "end_tokens", "eos_token_id"
"""Keys of weights.json and of transformers' files."""
NOT_OF_WEIGHTS = (*NOT_SHAPE, "init", "init_std")
"""Keys of `model` with the name and the initialization of weights, which do not describe the model."""


def weights_path(named: str) -> Path:
    """Return the absolute path of weights given as `named`, e.g. in `model.init_from`; "~" is expanded."""
    return Path(named).expanduser().absolute()


def shape_of(path: Path) -> dict[str, Any]:
    """Return the keys of the config group `model` (shape and `name`) of the weights at `path`.

    Raises:
        ConfigError: there are none, or their config is damaged or not supported.
    """
    try:
        if (path / IMPORTED).is_file():
            found = unseal(read_regular(path / IMPORTED)).get("model")
            if not isinstance(found, dict):
                raise ValueError("names no model")
            return found
        if (path / HUGGINGFACE).is_file():
            values = parse_object(read_regular(path / HUGGINGFACE))
            return {"name": path.name, **importlib.import_module(FAMILIES).model_keys(values)}
    except (OSError, ValueError) as error:
        file = path / (IMPORTED if (path / IMPORTED).exists() else HUGGINGFACE)
        raise ConfigError(Problem(str(file), f"{getattr(error, 'strerror', None) or error}.")) from error
    run = run_of(path)
    if run is None:
        what = "contains no weights" if path.is_dir() else "is a file" if path.exists() else "does not exist"
        raise ConfigError(Problem(INIT_FROM, f"{path} {what}. Give {EXPECTED}."))
    model = read_mapping(run / "config.yaml", str(run / "config.yaml"), "It must be as its run wrote it.").get("model")
    found_in_run: Any = OmegaConf.to_container(model, resolve=True) if isinstance(model, DictConfig) else {}
    return dict(found_in_run)


def is_folder_of_files(path: Path) -> bool:
    """Return whether `path` is a folder made by `import` or a Hugging Face folder."""
    return any((path / name).is_file() for name in (IMPORTED, HUGGINGFACE))


def run_of(path: Path) -> Path | None:
    """Return the folder of the run at `path`, or of the run with the checkpoint `path`; None if it is neither."""
    above = [path, *(path.parents[1:3] if path.name.startswith("step=") else ())]
    return next((each for each in above if (each / "config.yaml").is_file()), None)


def tokenizer_of(path: Path) -> Path | None:
    """Return the tokenizer.json of the weights at `path`; None if there is none."""
    file = (run_of(path) or path) / TOKENIZER
    return file if file.is_file() else None


def end_tokens_of(path: Path) -> tuple[int, ...]:
    """Return the end-of-text token ids in the files of the imported or Hugging Face folder `path`.

    They are `eos_token_id` (one or several) of generation_config.json, or else of config.json; `import` records both in
    weights.json. Empty if there are none.

    Raises:
        ConfigError: a file cannot be read or is malformed.
    """
    for name, key in ((IMPORTED, END_TOKENS), (GENERATION, EOS), (HUGGINGFACE, EOS)):
        file = path / name
        if not file.is_file():
            continue
        try:
            if ids := read_ids(parse_object(read_regular(file)).get(key)):
                return ids
        except (OSError, ValueError) as error:
            raise ConfigError(Problem(str(file), f"{getattr(error, 'strerror', None) or f'{key} {error}'}.")) from error
    return ()


def read_ids(value: Any) -> tuple[int, ...]:
    """Return the token ids of an `eos_token_id`: a number, a list, or null. Raises ValueError."""
    several = value if isinstance(value, list) else [] if value is None else [value]
    if wrong := [each for each in several if not isinstance(each, int) or isinstance(each, bool) or each < 0]:
        raise ValueError(f"has {wrong[0]!r}, which is not a token id")
    return tuple(several)


def end_of_document_of(path: Path) -> str | None:
    """Return the value of data.tokenizer.end_of_document for the weights at `path`; None: its default is right.

    Raises:
        ConfigError: a file cannot be read.
    """
    if (run := run_of(path)) is not None:
        config = read_mapping(run / "config.yaml", str(run / "config.yaml"), "It must be as its run wrote it.")
        named = OmegaConf.select(config, "data.tokenizer.end_of_document")
        return None if named is None else str(named)
    file, ids = tokenizer_of(path), end_tokens_of(path)
    if file is None or not ids:
        return None
    try:
        found: str | None = importlib.import_module(TOKENIZERS).unusual_end_of_document(file, ids)
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(str(file), f"{getattr(error, 'strerror', None) or error}.")) from error
    return found
