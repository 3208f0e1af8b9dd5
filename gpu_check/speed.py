"""Speed of a 1B model's training: `train` in compiled bf16 against a hand-written loop, and native FP8 against bf16."""

import gc
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from gpu_check import setting
from gpu_check.call import Call
from gpu_check.checks import RUN
from gpu_check.journal import Journal
from gpu_check.layers import Baseline, native_rows
from gpu_check.plain_llama import plain_step
from gpu_check.rows import Clock, Item, Row, judged, missing
from gpu_check.runs import Run, words
from gpu_check.setting import milliseconds, model_config, native_recipes, recipes
from gpu_check.targets import MFU, MODEL, NATIVE_RATIO, NATIVE_STEP
from gpu_check.wheels import lacking
from lightning_llm.base.hardware import device_name, peak_flops_per_second
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.config.schema.precision import PrecisionConfig
from lightning_llm.model.attention.kernel_choice import attention_by
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.flops import flops_per_token
from lightning_llm.model.loss import LossReduction, compiled_loss_sum, next_token_loss_sum
from lightning_llm.parallel.apply import compile_blocks
from lightning_llm.precision.native.decide import decide
from lightning_llm.train.quantisation import Quantisation

LENGTH, STEPS, WARMUP_STEPS = 2048, 40, 10
TRAIN_SECONDS = 100.0
"""Seconds of the check's time that `train` may take, most of it for start-up and compiling."""
PLAIN_TARGET = 1.0
ORDER = ("fp8_current", "fp8_subchannel", "fp8_delayed")
LOOP_RATE = f"{MODEL}, bf16, our model in a loop"
TRAIN_RATE = f"{MODEL}, bf16, train"


def items(call: Call) -> list[Item]:
    """Return items: steps in bf16, steps of three native recipes, then layers of every native recipe."""
    native = {name: recipe for name, (recipe, _) in native_recipes().items()}
    baseline = Baseline()
    first = [name for name in ORDER if name in native]
    found = [
        Item("train", 40, partial(trained, call)),
        Item("hand-written loop", 25, partial(hand_written, call.journal)),
        Item("our model in a loop", 20, partial(in_a_loop, recipes()["bf16"], call.journal)),
        *(Item(name, 20, partial(in_a_loop, native[name], call.journal)) for name in first),
        Item("our model in a loop, cudnn", 20, partial(with_cudnn, call.journal)),
    ]
    if not native:
        why = setting.here().library_problem or "this GPU has no native recipe"
        return [*found, Item("native FP8", 0, lambda: iter([missing(NATIVE_STEP, why)]))]
    behind = [*first, *(name for name in native if name not in first)]
    return [*found, *(Item(f"layers, {name}", 5, partial(native_rows, native[name], baseline)) for name in behind)]


def sequences() -> int:
    """Return the sequences of a step, one micro-batch; limited, because a hand-written loop keeps all logits."""
    return 4 if setting.is_small_device() else 8


def trained(call: Call) -> Iterator[Row]:
    """Yield tokens/s and model FLOPs utilization of `lightning-llm train`, compiled: medians over its timed steps."""
    if gone := lacking(RUN):
        yield missing(TRAIN_RATE, f"{', '.join(gone)} not installed")
        return
    overrides = words(
        call.scratch, "run", sequences(), LENGTH, STEPS, f"model={MODEL}", "precision=bf16", "trainer.compile=true",
        f"callbacks.throughput.warmup_steps={WARMUP_STEPS}",
    )  # fmt: skip
    run = Run(call.scratch / "run", overrides)
    run.finish(Clock(min(call.clock.left, TRAIN_SECONDS)), STEPS)
    rates = [record["tokens_per_second"] for record in run.timed()]
    waited = sum(record["data_seconds"] for record in run.timed())
    spread = f"{len(rates)} steps, {min(rates):.0f} to {max(rates):.0f}; {waited / len(rates) * 1e3:.1f} ms for data"
    yield from rate_rows(TRAIN_RATE, "train", statistics.median(rates), spread)


def hand_written(journal: Journal) -> Iterator[Row]:
    """Yield tokens/s of the plain model in an independent compiled loop, and the ratio of train's to them."""
    config = model_config(MODEL, max_sequence_length=LENGTH)
    try:
        step = plain_step(config, sequences(), LENGTH, setting.DEVICE, compiled=True)
        rate = sequences() * LENGTH / timed(step)
    finally:
        free_memory()
    yield Row(f"{MODEL}, bf16, hand-written loop", rate, "tokens/s", "measured", shape())
    what, ours = f"{MODEL}, bf16: train's tokens/s over a hand-written loop's", journal.value("speed", TRAIN_RATE)
    yield ratio_row(what, ours, rate, PLAIN_TARGET, "train has no tokens/s here")


def loop_rate(recipe: PrecisionConfig) -> float:
    """Return the tokens/s of our model in a hand-written loop with compiled blocks."""
    config = model_config(MODEL, max_sequence_length=LENGTH)
    try:
        return sequences() * LENGTH / timed(our_step(config, recipe, sequences(), LENGTH, compiled=True))
    finally:
        free_memory()


def in_a_loop(recipe: PrecisionConfig, journal: Journal) -> Iterator[Row]:
    """Yield the rows of `loop_rate`; for recipes other than bf16 also bf16's time over theirs."""
    rate = loop_rate(recipe)
    if not recipe.quantises:
        yield from rate_rows(LOOP_RATE, "our model in a loop", rate, shape())
        return
    yield Row(f"{MODEL}, {recipe.name}, native, our model in a loop", rate, "tokens/s", "measured", shape())
    base = journal.value("speed", LOOP_RATE)
    yield ratio_row(f"{NATIVE_STEP} {recipe.name}", rate, base, NATIVE_RATIO, "no bf16 baseline")


def with_cudnn(journal: Journal) -> Iterator[Row]:
    """Yield the bf16 loop's tokens/s with cuDNN's attention, over those with torch's default choice."""
    with attention_by("cudnn"):
        rate = loop_rate(recipes()["bf16"])
    base = journal.value("speed", LOOP_RATE)
    what = f"{MODEL}, bf16, trainer.attention_kernel=cudnn: tokens/s over torch's choice"
    if base is None:
        yield missing(what, "no bf16 baseline")
        return
    yield Row(what, rate / base, "times", "measured", f"{rate:.0f} tokens/s")


def ratio_row(what: str, rate: float | None, base: float | None, target: float, why_missing: str) -> Row:
    """Return `rate` over `base` as a row judged by `target`, or a row with the reason if one is missing."""
    if rate is None or base is None:
        return missing(what, why_missing)
    return judged(what, rate / base, "times", rate / base >= target, f">= {target}")


def rate_rows(what: str, whose: str, rate: float, note: str) -> Iterator[Row]:
    """Yield tokens/s, and their share of the device's bf16 peak if that is known.

    See `lightning_llm.base.hardware` and `lightning_llm.model.flops`.
    """
    yield Row(what, rate, "tokens/s", "measured", note)
    peak = peak_flops_per_second(device_name(torch.device(setting.DEVICE)), "bf16")
    config = model_config(MODEL, max_sequence_length=LENGTH)
    if peak is None:
        yield missing(f"{MFU} {whose}", "no table has this device's peak in bf16")
        return
    per_token = flops_per_token(config, LENGTH)
    text = f"of {peak / 1e12:.4g} TFLOP/s dense; {per_token:.4g} FLOPs a token"
    yield Row(f"{MFU} {whose}", 100 * rate * per_token / peak, "%", "measured", text)


def shape() -> str:
    """Return a description of a step."""
    return f"{sequences()} x {LENGTH} tokens a step"


def timed(step: Callable[[], None]) -> float:
    """Return the seconds of a step."""
    return milliseconds({"step": step}, repeats=3, rounds=3)["step"] * 1e-3


def free_memory() -> None:
    """Free a model's memory: compiled blocks are in reference cycles, and the compiler's caches keep them."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def our_step(
    config: ModelConfig, recipe: PrecisionConfig, sequences: int, length: int, compiled: bool
) -> Callable[[], None]:
    """Return a function that makes one step of a hand-written loop over our model: forward, backward, clipping, fused
    AdamW. With `compiled`, its blocks and loss are compiled; emulated casts are compiled separately, as in a run."""
    quantisation = Quantisation(recipe, 0, 100, decide(recipe, setting.here()))
    with torch.device("meta"):
        model = Decoder(config, compute_dtype=torch.bfloat16)
    quantisation.swap(model, model.config.num_layers, setting.DEVICE)
    if compiled:
        compile_blocks(model.blocks)
    model.to_empty(device=setting.DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(0, model.config.vocab_size, (sequences, length), device=setting.DEVICE)
    loss_sum = compiled_loss_sum() if compiled else next_token_loss_sum
    scale = torch.full((), 1 / tokens.numel(), device=setting.DEVICE)
    taken = 0

    def step() -> None:
        nonlocal taken
        quantisation.begin_step(model, 0)
        quantisation.begin_micro_batch(model, taken, 0)
        optimizer.zero_grad(set_to_none=True)
        (model(tokens, loss=LossReduction(tokens, loss_sum, scale)) / tokens.numel()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        quantisation.end_micro_batch(model, lambda amax: amax)
        optimizer.step()
        quantisation.end_step(model, lambda amax: amax)
        taken += 1

    return step
