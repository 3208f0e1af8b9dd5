"""`model=from_weights`: the model's shape, and the tokenizer, taken from the weights at `model.init_from`.

`model.init_from=PATH` typed without a `model=` means it. Imports no torch.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_llm.config.yaml_file import read_mapping
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.integrity import parse_object, unseal

OPTION = "from_weights"
KEY = "model.init_from"
IMPORTED, HUGGINGFACE, TOKENIZER = "weights.json", "config.json", "tokenizer.json"
FAMILIES = "lightning_llm.model.interop.families"
"""Reads a config.json. Named and not imported, as the registries' packages are: it stands above this one."""
EXPECTED = (
    "a folder that `import` made, a Hugging Face folder (config.json, model.safetensors), a run's folder, or one of "
    "its checkpoints/step=N"
)
NOT_SHAPE = ("name", "init_from", "parameters_published")


def with_shape_of_weights(parsed: Sequence[Override]) -> list[Override]:
    """Return the overrides with `model=from_weights` where weights are named to start from, and no model is."""
    named = [each for each in parsed if each.key_or_group == KEY and not each.is_delete()]
    if not named or any(each.key_or_group == "model" for each in parsed):
        return list(parsed)
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
                model[key] = value
        model.name = str(shape.get("name") or path.name)
        tokenizer = tokenizer_of(path)
        trained = OmegaConf.select(tree, "data.tokenizer.kind") == "bpe"  # what is chosen where nobody chooses
        if tokenizer is not None and trained and not any(key.startswith("data.tokenizer") for key in typed):
            OmegaConf.update(tree, "data.tokenizer.kind", "file", force_add=True)
            OmegaConf.update(tree, "data.tokenizer.path", str(tokenizer), force_add=True)
            OmegaConf.update(tree, "data.tokenizer.vocab_size", None, force_add=True)


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
            found = unseal((path / IMPORTED).read_bytes()).get("model")
            if not isinstance(found, dict):
                raise ValueError("names no model")
            return found
        if (path / HUGGINGFACE).is_file():
            values = parse_object((path / HUGGINGFACE).read_bytes())
            return {"name": path.name, **importlib.import_module(FAMILIES).model_keys(values)}
    except (OSError, ValueError) as error:
        file = path / (IMPORTED if (path / IMPORTED).exists() else HUGGINGFACE)
        raise ConfigError(Problem(str(file), f"{getattr(error, 'strerror', None) or error}.")) from error
    run = run_of(path)
    if run is None:
        what = "holds no weights" if path.is_dir() else "is a file" if path.exists() else "does not exist"
        raise ConfigError(Problem(KEY, f"{path} {what}. Give {EXPECTED}."))
    model = read_mapping(run / "config.yaml", str(run / "config.yaml"), "It must be as its run wrote it.").get("model")
    found_in_run: Any = OmegaConf.to_container(model) if isinstance(model, DictConfig) else {}
    return dict(found_in_run)


def run_of(path: Path) -> Path | None:
    """Return the folder of the run that `path` is, or is a checkpoint of; None where it is neither."""
    above = [path, *(path.parents[1:3] if path.name.startswith("step=") else ())]
    return next((each for each in above if (each / "config.yaml").is_file()), None)


def tokenizer_of(path: Path) -> Path | None:
    """Return the tokenizer.json of the weights at `path`, None where they bring none."""
    file = (run_of(path) or path) / TOKENIZER
    return file if file.is_file() else None
