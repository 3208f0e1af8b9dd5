"""A step of several micro-batches with cached casts of weights, over the same step that repeats them, by CPU time."""

import time
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.precision import HIDDEN_512, TARGETS, TINY, training_step
from benchmarks.rotation import Row, interleaved_minima, stepping
from lightning_llm.config.compose import compose_config
from lightning_llm.precision.linear.weight_rules import kept_slots

MICRO_BATCHES = 8
STEPS = {
    "hidden 512, 8 x 1 x 256 tokens": HIDDEN_512,
    "llama_tiny, 8 x 2 x 256 tokens (the quickstart's)": replace(TINY, batch=16),
}


def keeps(recipe: str) -> bool:
    """Return whether the recipe of this name has a cast of a weight that can be cached."""
    sets = compose_config([f"precision={recipe}"]).precision.cast_sets()
    return any(kept_slots(casts) for casts in sets.values())


def measure() -> Iterator[Row]:
    """Yield each recipe's step with cached casts over the same step without."""
    for title, shape in STEPS.items():
        for name in filter(keeps, TARGETS):
            contenders = {
                kept: stepping(training_step(name, shape, MICRO_BATCHES, keeps=kept == "kept"))
                for kept in ("made", "kept")
            }
            best = interleaved_minima(contenders, rounds=3, steps=1, warmup=1, clock=time.process_time)
            yield f"{title}: {name}, kept over made each time", best["kept"] / best["made"], "< 1"
