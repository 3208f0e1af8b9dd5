"""Slowdown of emulated recipes: layers and training steps of a 1B model relative to compiled bf16."""

from collections.abc import Iterator
from functools import partial

from gpu_check import setting, speed
from gpu_check.checks import MODEL, Call
from gpu_check.journal import Item, Journal, Row, judged, missing
from gpu_check.layers import EMULATED_TARGET, Baseline, emulated_rows
from gpu_check.setting import model_config, recipes
from lightning_llm.config.schema.precision import PrecisionConfig

FIRST = ("mxfp8", "nvfp4_all_blocks", "mxfp4_sr", "fp8_subchannel", "fp8_current")
"""One recipe of each family, measured before the others."""
TRAINED = ("mxfp8", "mxfp4_sr")


def items(call: Call) -> list[Item]:
    """Return items: layers of every quantizing recipe with emulated casts, and training steps of two recipes."""
    emulated = {name: recipe for name, recipe in recipes().items() if recipe.quantizes}
    emulated = {name: recipe.model_copy(update={"backend": "emulated"}) for name, recipe in emulated.items()}
    baseline = Baseline()
    names = [*FIRST, *(name for name in emulated if name not in FIRST)]
    layers = [Item(f"layers, {name}", 8, partial(emulated_rows, emulated[name], baseline)) for name in names]
    steps = [Item(f"a step, {name}", 25, partial(training, emulated[name], call.journal)) for name in TRAINED]
    return [*layers[: len(FIRST)], *steps, *layers[len(FIRST) :]]


def training(recipe: PrecisionConfig, journal: Journal) -> Iterator[Row]:
    """Yield a step's time over that of bf16 in the same loop, as measured by the check `speed`."""
    what = f"{MODEL}, a step, {recipe.name}, emulated: time over bf16's"
    base = journal.value("speed", speed.LOOP_RATE)
    if base is None:
        yield missing(what, "no bf16 baseline: speed measures it")
        return
    config = model_config(MODEL, max_sequence_length=speed.LENGTH)
    sequences = speed.sequences()
    try:
        seconds = speed.timed(speed.our_step(config, recipe, sequences, speed.LENGTH, compiled=True))
    finally:
        speed.free_memory()
    ratio = seconds * base / (sequences * speed.LENGTH)
    text = f"<= {EMULATED_TARGET}; {seconds * 1e3:.0f} ms, {speed.shape()}, {setting.here().device}"
    yield judged(what, ratio, "times", ratio <= EMULATED_TARGET, text)
