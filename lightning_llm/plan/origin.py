"""The weights and the tokenizer that a run begins with, and whether transformers has a class for its model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.schema import Config
from lightning_llm.config.weight_folders import TOKENIZER, UNNAMED
from lightning_llm.model.interop.families import architecture, without_counterpart
from lightning_llm.model.structure import parameter_shapes


def origin_facts(config: Config) -> dict[str, str | None]:
    """Return `weights` and `tokenizer` in words; `export`, the class of transformers, or `export_problem`."""
    exported, problem = None, None
    try:
        exported = architecture(config.model).class_name
    except ConfigError:
        problem = f"none: {without_counterpart(config.model)}. Its checkpoints remain (docs/weights.md)"
    return {
        "weights": weights_text(config),
        "tokenizer": tokenizer_text(config),
        "export": exported,
        "export_problem": problem,
    }


def origin_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return `origin_facts` as lines for a terminal, each a name and a text."""
    export = facts["export"] or facts["export_problem"]
    return [("weights", facts["weights"]), ("tokenizer", facts["tokenizer"]), ("export", export)]


def origin_lines(config: Config) -> list[str]:
    """Return the lines that a run prints which begins at step 0."""
    facts = origin_facts(config)
    lines = [f"begin  weights {facts['weights']}", f"begin  tokenizer {facts['tokenizer']}"]
    return lines if facts["export"] else [*lines, f"note   export to transformers: {facts['export_problem']}"]


def weights_text(config: Config) -> str:
    """Return where the first step's weights come from."""
    model = config.model
    if config.branch_from is not None:
        return f"from the checkpoint at branch_from={config.branch_from}"
    if config.resume not in (None, "auto"):
        return f"from the checkpoint at resume={config.resume}"
    if model.init_from == UNNAMED:
        return f"{UNNAMED}: train requires model.init_from=PATH, or null for random weights"
    if model.init_from is not None:
        return f"from model.init_from={model.init_from}, {len(parameter_shapes(model)):,} tensors"
    scheme = f"random: model.init={model.init}, model.init_std={model.init_std:g}, seed={config.seed}"
    return f"{scheme}; resume=auto goes on from a checkpoint if there is one" if config.resume else scheme


def tokenizer_text(config: Config) -> str:
    """Return where the tokenizer comes from."""
    tokenizer, model = config.data.tokenizer, config.model
    if tokenizer.kind == "bytes":
        return "bytes"
    if tokenizer.kind == "file":
        path, weights = Path(tokenizer.path or ""), model.init_from
        own = weights is not None and path in (Path(weights), Path(weights, TOKENIZER))
        return f"{path}, of the weights" if own else str(path)
    if model.init_from == UNNAMED and config.branch_from is None:
        return "of the weights (their tokenizer.json), unless data.tokenizer names another"
    sources = ", ".join(config.data.trained_weights)
    return f"bpe of {tokenizer.vocab_size or model.vocab_size:,} tokens, trained on the training documents of {sources}"
