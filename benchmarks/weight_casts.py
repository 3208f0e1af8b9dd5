"""A step of several micro-batches with casts of weights kept over the same step that makes them for each, by CPU time."""

import time
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.precision import HIDDEN_512, TINY, training_step
from benchmarks.rotation import Row, interleaved_minima, stepping
from lightning_llm.config.compose import compose_config
from lightning_llm.config.recipes import option_files
from lightning_llm.config.schema.precision import PrecisionConfig
from lightning_llm.precision.weight_cast_rules import kept_slots

MICRO_BATCHES = 8
STEPS = {
    "hidden 512, 8 x 1 x 256 tokens": HIDDEN_512,
    "llama_tiny, 8 x 2 x 256 tokens (the quickstart's)": replace(TINY, batch=16),
}


def keeps(recipe: PrecisionConfig) -> bool:
    """Return whether any cast of a weight can be kept."""
    return any(kept_slots(casts) for casts in recipe.cast_sets().values())


def measure() -> Iterator[Row]:
    """Yield each recipe's step with kept casts over the same without."""
    recipes = [name for name in option_files("precision") if keeps(compose_config([f"precision={name}"]).precision)]
    for title, shape in STEPS.items():
        for name in recipes:
            contenders = {
                kept: stepping(training_step(name, shape, MICRO_BATCHES, keeps=kept)) for kept in (False, True)
            }
            best = interleaved_minima(contenders, rounds=4, steps=1, warmup=1, clock=time.process_time)
            yield f"{title}: {name}, kept over made for each micro-batch", best[True] / best[False], "< 1"
