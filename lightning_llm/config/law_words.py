"""`step_law` in the place of a learning rate or a batch size, and tokens in that of steps: made numbers of on reading.

`optim.learning_rate=step_law`, `data.global_batch_size=step_law`, either times a number (`step_law*0.5`);
`trainer.max_steps=20e9tokens`. A config that is read holds numbers alone, before anything is hashed or written.
"""

import importlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.base import MOST_TOKENS
from lightning_llm.config.schema.strict import Reading

RATE, BATCH, STEPS = ("optim", "learning_rate"), ("data", "global_batch_size"), ("trainer", "max_steps")
LAW = "lightning_llm.plan.step_law"
"""Counts parameters and ranks. Named and not imported, as the registries' packages are: it stands above this one."""
STAND_INS = {RATE: 1e-3, STEPS: 1}
LARGEST_FACTOR = 1e6
"""Of the law's rate or batch; the smallest is one over it. What is beyond is a slip, and may have no exponential."""
FACTOR = re.compile(r"step_law(?:\s*\*\s*(?P<factor>.*))?", re.IGNORECASE)
TOKENS = re.compile(r"(?P<tokens>[\d.]+(?:e[+-]?\d+)?)\s*tokens", re.IGNORECASE)


@dataclass(frozen=True)
class LawWords:
    """What was asked for: factors of the law's learning rate and batch, and the run's `tokens`; None: numbers stand."""

    rate: float | None = None
    batch: float | None = None
    tokens: float | None = None


def read_with_laws(
    values: dict[str, Any],
    broken: Mapping[tuple[str, ...], Problem | None],
    read: Callable[[Mapping[str, Any], Mapping[tuple[str, ...], Problem | None]], Reading],
) -> Reading:
    """Return `read(values, broken)`, laws' words in `values` made numbers.

    Words that are wrong are further entries of `broken`. Where another problem keeps the law from being worked out, its
    keys stand at a stand-in, of which nothing is said.
    """
    asked: dict[tuple[str, str], float] = {}
    found = dict(broken)
    for path in (RATE, BATCH, STEPS):
        word = _at(values, path)
        if not isinstance(word, str) or path in found:
            continue
        number, problem = _number(word, path)
        if problem:
            found[path] = problem
            values[path[0]][path[1]] = None
        elif number is not None:
            asked[path] = number
            values[path[0]][path[1]] = STAND_INS.get(path) or _at(values, ("data", "micro_batch_size"))
    if not asked:
        return read(values, found)
    reading = read(values, found)
    if reading.config is None or reading.problems:
        return reading
    words = LawWords(asked.get(RATE), asked.get(BATCH), asked.get(STEPS))
    settled, law, problems = importlib.import_module(LAW).settle(values, words, reading.config)
    if problems:
        return Reading(reading.config, tuple(problems))
    final = read(settled, found)
    if final.config is not None and law is not None:
        final.config._step_law = law
    return final


def _number(word: str, path: tuple[str, str]) -> tuple[float | None, Problem | None]:
    """Return the factor, or the tokens, that `word` asks for; (None, None) where it is no such word."""
    key = ".".join(path)
    if path == STEPS:
        match = TOKENS.fullmatch(word.strip())
        if match is None:
            return None, None
        text, which = match["tokens"], f"above 0 of tokens, {MOST_TOKENS:g} at most: 20e9tokens"
    else:
        match = FACTOR.fullmatch(word.strip())
        if match is None:
            return None, None
        text, which = (
            match["factor"] or "1",
            f"from {1 / LARGEST_FACTOR:g} to {LARGEST_FACTOR:g} of step_law: step_law*0.5",
        )
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    least, most = (0, MOST_TOKENS) if path == STEPS else (1 / LARGEST_FACTOR, LARGEST_FACTOR)
    if not (number > 0 and least <= number <= most):
        return None, Problem(key, f"is '{word}', must be a number {which}.")
    return number, None


def _at(values: Mapping[str, Any], path: tuple[str, str]) -> Any:
    group = values.get(path[0])
    return group.get(path[1]) if isinstance(group, dict) else None
