"""`--predict model=llama_1b data.tokens=20e9` -> parameters and tokens, by the configs, without torch."""

import math
from collections.abc import Sequence

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.compose import compose_config
from lightning_llm.ladder.refusal import Target
from lightning_llm.model.flops import count_parameters

TOKENS = "data.tokens"
FLAG = "--predict"


def target_of(words: Sequence[str]) -> Target:
    """Return the place that `words` name: model=NAME, further keys of the model, and data.tokens=NUMBER.

    Raises:
        ConfigError: with all that is missing or is no such word, and whatever the model's config says.
    """
    problems = [
        Problem(FLAG, f"'{word}' says neither a model (model=NAME, model.KEY=VALUE) nor {TOKENS}=NUMBER.")
        for word in words
        if not word.startswith((f"{TOKENS}=", "model=", "model."))
    ]
    model = [word for word in words if word.startswith(("model=", "model."))]
    counts = [word.partition("=")[2] for word in words if word.startswith(f"{TOKENS}=")]
    if not any(word.startswith("model=") for word in model):
        problems.append(Problem(FLAG, "names no model. Give one, say model=llama_1b: its parameters are what counts."))
    if len(counts) != 1:
        problems.append(Problem(FLAG, f"gives {len(counts)} numbers of tokens. Give one, say {TOKENS}=20e9."))
    tokens = _number(counts[0]) if counts else math.nan
    if len(counts) == 1 and not tokens >= 1:
        problems.append(Problem(FLAG, f"{TOKENS}={counts[0]} is no number of tokens. Write 20e9, say."))
    if problems:
        raise ConfigError(problems)
    config = compose_config([*model, "data=python", "logger=none"]).model
    return Target(count_parameters(config).total, round(tokens), config.name)


def _number(word: str) -> float:
    try:
        found = float(word.replace("_", ""))
    except ValueError:
        return math.nan
    return found if math.isfinite(found) else math.nan
