"""Names of the files of a folder of weights beside those of tensors, and of keys; `TOKENIZER` is in a run's, too."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.integrity import parse_object, read_regular, unseal
from lightning_llm.config.yaml_file import literal, read_mapping

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

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


OPTION = "from_weights"
KEY = "model.init_from"
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


def with_shape_of_weights(parsed: "Sequence[Override]") -> "list[Override]":
    """Return the overrides with `model=from_weights` where weights are named to start from, and no model is.

    `model.init_from=null` names none: random weights.
    """
    named = [each for each in parsed if each.key_or_group == KEY and not each.is_delete() and each.value() is not None]
    if not named or any(each.key_or_group == "model" for each in parsed):
        return list(parsed)
    from hydra.core.override_parser.overrides_parser import OverridesParser  # names of files serve where Hydra does not

    return [*parsed, OverridesParser.create().parse_override(f"model={OPTION}")]


def fill_from_weights(tree: DictConfig, typed: Sequence[str] = ()) -> None:
    """Set in `tree`, a config whose model is `from_weights`, what the weights say and nothing else does, in place.

    What is set beside it stays: another `rope_theta`, say. A tokenizer that would be trained on the data gives way to
    the weights' own, unless one of the keys `typed` is about tokenizers.

    Raises:
        ConfigError: there are no weights at `model.init_from`, or none that can be read.
    """
    model = tree.get("model")
    if not isinstance(model, DictConfig) or model.get("name") != OPTION:
        return
    if OmegaConf.is_missing(model, "init_from") or model.get("init_from") is None:
        raise ConfigError(Problem(KEY, f"a value must be given with model={OPTION}: {EXPECTED}."))
    path = weights_path(str(model.init_from))
    shape = shape_of(path)
    with open_dict(tree):
        for key, value in shape.items():
            if key not in model and key not in NOT_SHAPE and value is not None:
                model[key] = literal(value)
        model.name = literal(str(shape.get("name") or path.name))
        tokenizer = tokenizer_of(path)
        trained = OmegaConf.select(tree, "data.tokenizer.kind") == "bpe"  # what is chosen where nobody chooses
        if tokenizer is not None and trained and not any(key.startswith("data.tokenizer") for key in typed):
            OmegaConf.update(tree, "data.tokenizer.kind", "file", force_add=True)
            OmegaConf.update(tree, "data.tokenizer.path", literal(str(tokenizer)), force_add=True)
            OmegaConf.update(tree, "data.tokenizer.vocab_size", None, force_add=True)
            if (end := end_of_document_of(path)) is not None:
                OmegaConf.update(tree, "data.tokenizer.end_of_document", literal(end), force_add=True)


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
        raise ConfigError(Problem(KEY, f"{path} {what}. Give {EXPECTED}."))
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
