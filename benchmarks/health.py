"""Cost of quantization health: an observed step over an unobserved one."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.rotation import Row
from lightning_llm.__main__ import main

EVERY, STEPS, WARMUP, DEFAULT_EVERY = 4, 40, 8, 100
RECIPES = ("mxfp8", "nvfp4_all_blocks")


def step_seconds(recipe: str) -> list[float]:
    """Return the seconds of every step of a quickstart run that observes every fourth."""
    folder = Path(tempfile.mkdtemp(prefix="lightning-llm-bench-"))
    main([
        "train", "recipe=quickstart", f"precision={recipe}", "callbacks=health",
        f"callbacks.quantisation_health.every_steps={EVERY}", "callbacks.sample=null", f"trainer.max_steps={STEPS}",
        f"trainer.validate_every_steps={STEPS}", "schedule.warmup_steps=5", "checkpoint.every_steps=null",
        "logger=none", f"run.root={folder}", f"run.dir={folder / 'run'}",
    ])  # fmt: skip
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [record["step_seconds"] for record in records if "step_seconds" in record]


def measure() -> Iterator[Row]:
    """Yield the cost of an observed step in plain steps, by fastest steps, and the cost at the default interval.

    Some of the writing happens in the following step, so both are counted.
    """
    for recipe in RECIPES:
        seconds = step_seconds(recipe)
        by_turn = [min(seconds[step - 1] for step in range(WARMUP + turn, STEPS + 1, EVERY)) for turn in range(EVERY)]
        looked, after, plain = by_turn[0], by_turn[1], min(by_turn[2:])
        extra = (looked + max(after, plain) - 2 * plain) / plain
        yield f"{recipe}: a look costs, in steps that are not looked at", extra, ""
        yield f"  at every {DEFAULT_EVERY}th step, per cent of training", 100 * extra / DEFAULT_EVERY, "<= 2"
