"""Folders of weights (imported, of Hugging Face, of a run): their files, model shape, tokenizer and end tokens."""

import importlib
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.integrity import parse_object, read_regular, unseal
from lightning_llm.config.yaml_file import read_mapping

IMPORTED = "weights.json"
"""Of a folder that `import` made: what the weights are, and what was written."""
HUGGINGFACE = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"
UNNAMED = "???"
"""`model.init_from` of a recipe that continues from weights: not named yet. `plan` takes it, `train` does not."""
NOT_SHAPE = ("name", "init_from", "parameters_published")
"""Keys of `model` that say nothing of its shape."""
INIT_FROM = "model.init_from"
FAMILIES, TOKENIZERS = "lightning_llm.model.interop.families", "lightning_llm.data.tokens.tokenizer"
"""Read a config.json, and a tokenizer.json. Named and not imported, as the registries' packages are: they stand above
this one."""
EXPECTED = (
    "a folder that `import` made, a Hugging Face folder (config.json, model.safetensors), a run's folder, or one of "
    "its checkpoints/step=N"
)
END_TOKENS, EOS = "end_tokens", "eos_token_id"
"""Keys of weights.json, and of transformers' files."""
NOT_OF_WEIGHTS = (*NOT_SHAPE, "init", "init_std")
"""Keys of `model` that say what weights are called and how they began, not what model they are of."""


def weights_path(named: str) -> Path:
    """Return where `model.init_from` leads: an absolute path."""
    return Path(named).expanduser().absolute()


def shape_of(path: Path) -> dict[str, Any]:
    """Return the `model` keys of the weights at `path`, `name` among them.

    Raises:
        ConfigError: there are none, or their config is damaged or not one that can be computed here.
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
        what = "holds no weights" if path.is_dir() else "is a file" if path.exists() else "does not exist"
        raise ConfigError(Problem(INIT_FROM, f"{path} {what}. Give {EXPECTED}."))
    model = read_mapping(run / "config.yaml", str(run / "config.yaml"), "It must be as its run wrote it.").get("model")
    found_in_run: Any = OmegaConf.to_container(model, resolve=True) if isinstance(model, DictConfig) else {}
    return dict(found_in_run)


def is_folder_of_files(path: Path) -> bool:
    """Return whether `path` is a folder that `import` made, or a Hugging Face folder: weights that are no run's."""
    return any((path / name).is_file() for name in (IMPORTED, HUGGINGFACE))


def run_of(path: Path) -> Path | None:
    """Return the folder of the run that `path` is, or is a checkpoint of; None where it is neither."""
    above = [path, *(path.parents[1:3] if path.name.startswith("step=") else ())]
    return next((each for each in above if (each / "config.yaml").is_file()), None)


def tokenizer_of(path: Path) -> Path | None:
    """Return the tokenizer.json of the weights at `path`, None where they bring none."""
    file = (run_of(path) or path) / TOKENIZER
    return file if file.is_file() else None


def end_tokens_of(path: Path) -> tuple[int, ...]:
    """Return the ids that a model writes at its end, by the files of the imported or Hugging Face folder `path`.

    The `eos_token_id`, a number or several, of generation_config.json, else of config.json, where import has put down
    what both said; none where neither says.

    Raises:
        ConfigError: a file cannot be read, or says something else.
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
    """Return token ids as an `eos_token_id` gives them: a number, several, or null. Raises ValueError."""
    several = value if isinstance(value, list) else [] if value is None else [value]
    if wrong := [each for each in several if not isinstance(each, int) or isinstance(each, bool) or each < 0]:
        raise ValueError(f"holds {wrong[0]!r}, which is no token's id")
    return tuple(several)


def end_of_document_of(path: Path) -> str | None:
    """Return what data.tokenizer.end_of_document is for the weights at `path`; None: the tokenizer's usual name says.

    Raises:
        ConfigError: a file that says so cannot be read.
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
