"""What the models of runs are called: a shipped file's name, with the keys in which a run's model is another."""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from lightning_llm.config.config_hash import flatten
from lightning_llm.config.recipes import option_files
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.config.weight_folders import NOT_SHAPE
from lightning_llm.tracking.reading import Run

GROUP = "model"
MOST_KEYS = 8
"""Named of a model that has little in common with its file."""


def models_of(runs: Iterable[Run]) -> list[str]:
    """Return what the runs' models are called, each once, in order of the runs."""
    return list(dict.fromkeys(name for run in runs if (name := _called(run.config)) is not None))


def _called(config: Mapping[str, Any]) -> str | None:
    """Return "llama_tiny", or "llama_tiny with num_layers=2, hidden_size=64" where keys of the file were overridden.

    A model without a shipped file (of a --config-dir, or of weights) has its name alone.
    """
    name = config.get(f"{GROUP}.name")
    if name is None:
        return None
    file = _values_of_file(str(name))
    changed = {
        key: config[f"{GROUP}.{key}"]
        for key, value in file.items()
        if key not in NOT_SHAPE and f"{GROUP}.{key}" in config and config[f"{GROUP}.{key}"] != value
    }
    words = [f"{key}={_word(value)}" for key, value in list(changed.items())[:MOST_KEYS]]
    if more := len(changed) - len(words):
        words.append(f"{more} more")
    return f"{name} with {', '.join(words)}" if words else str(name)


def _word(value: Any) -> str:
    return json.dumps(value, default=str).replace('"', "")


@cache
def _values_of_file(name: str) -> dict[str, Any]:
    """Return the flat values of the shipped model `name`, with the defaults of what it leaves out; {} without one."""
    file = option_files(GROUP).get(name)
    if file is None or name == "from_weights":
        return {}
    values: Any = OmegaConf.to_container(OmegaConf.create(file.read_text(encoding="utf-8")))
    return flatten(ModelConfig.model_validate(values).model_dump(mode="json"))
