"""Step times predicted by `plan` against published measurements. Nothing runs, and no figure is fitted."""

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import correlation, median
from typing import Any

from benchmarks.published_steps import MEGATRON, ORDERINGS, ROWS, Published
from benchmarks.rotation import Row
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import ModelConfig
from lightning_llm.model.spec import Mixer
from lightning_llm.plan.resolve import plan_of
from lightning_llm.plan.time.operations import Cost, Operations, Passes
from lightning_llm.plan.time.step import StepTime, StepTimer

SCORE_BYTES = (13, 19)
"""Bytes per attention score of a kernel that keeps them, in fp16 with dropout, forward and backward: written by q k^T
(2), softmax (2 + 2), dropout (2 + 2 + 1), read by the product with v (2); written for dropout's gradient (2), dropout
(2 + 1 + 2), softmax (2 + 2 + 2), read for the gradients of q, k and v (3 x 2)."""


def step_time(words: Sequence[str], *, keeps_scores: bool = False) -> tuple[StepTime, ModelConfig, int]:
    """Return the time of a step of the plan of `words`, its model, and tokens of a sequence.

    Rules between keys are not checked, because other programs allow other combinations. `keeps_scores`: attention as
    computed by Megatron-LM in 2021, with all scores in memory, where `plan` assumes a fused kernel.
    """
    plan = plan_of(compose_config(list(words)))
    if plan.config.cluster is None:
        raise ValueError(f"{' '.join(words)} names no cluster")
    timer = StepTimer(plan, plan.config.cluster, as_native=True)  # torchtitan's FP8 runs natively under tp
    if keeps_scores:
        replaced: Any = timer.operations
        replaced.kernel = partial(_with_scores, timer.operations)
    return timer.time, plan.config.model, plan.config.data.sequence_length


def _with_scores(operations: Operations, mixer: Mixer) -> Passes:
    """Return attention's passes with all scores multiplied, and moved through memory."""
    config, device = operations.config, operations.device
    model, length = config.model, config.data.sequence_length
    scores = operations.tokens * length * model.num_heads / operations.degrees.tp
    flops = 4 * model.attention_head_dim * scores / (device.peak(config.precision.compute_dtype) or 1)
    forward, backward = (
        Cost({"attention": times * flops + device.bytes_seconds(moved * scores)})
        for times, moved in zip((1, 2), SCORE_BYTES, strict=True)
    )
    return Passes(forward, backward, forward)


def predicted(row: Published, *, keeps_scores: bool = False) -> tuple[float, float]:
    """Return the plan's value for `row` in its unit, and in model FLOPs per second and device."""
    step, model, length = step_time(row.words, keeps_scores=keeps_scores)
    rate = step.model_flops / (step.world * step.total)
    if row.unit == "tokens/s":
        return step.tokens_per_second, rate
    flops = megatron_flops(model, length) * step.tokens_per_second
    return (flops / 1e12 if row.unit == "TFLOP/s" else 100 * flops / step.needed.peak), rate


def megatron_flops(model: ModelConfig, length: int) -> float:
    """Return Megatron's count of FLOPs per token, including recomputation (arXiv 2104.04473, eq. 3)."""
    layers, hidden = model.num_layers, model.hidden_size
    return 96 * layers * hidden**2 * (1 + length / (6 * hidden) + model.vocab_size / (16 * layers * hidden))


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation; equal values share their rank."""
    return correlation(_ranks(one), _ranks(other))


def _ranks(values: Sequence[float]) -> list[float]:
    below = (sum(each < value for each in values) for value in values)
    return [rank + values.count(value) / 2 for rank, value in zip(below, values, strict=True)]


def measure() -> Iterator[Row]:
    """Yield published over predicted values of every row, their summary, and the orderings of figures."""
    tables: dict[str, list[tuple[float, float]]] = {}
    for row in ROWS:
        value, flops = predicted(row)
        measured = flops * row.value / value
        tables.setdefault(row.table.partition(",")[0], []).append((measured, flops))
        text = f"published {row.value:,.4g}, predicted {value:,.4g} {row.unit}"
        yield f"{row.table}: {row.name}, published over predicted", row.value / value, text
    scores = "its scores kept in memory"
    for row in MEGATRON:
        value, flops = predicted(row, keeps_scores=True)
        tables.setdefault(f"Megatron, {scores}", []).append((flops * row.value / value, flops))
        text = f"published {row.value:,.4g}, predicted {value:,.4g} {row.unit}"
        yield f"{row.table}: {row.name}, {scores}", row.value / value, text
    tables["all rows"] = [pair for name, pairs in tables.items() if scores not in name for pair in pairs]
    for name, pairs in tables.items():
        ratios = [published / value for published, value in pairs]
        if len(pairs) > 3:
            yield f"{name}: rank correlation of FLOP/s per device", rank_correlation(*zip(*pairs, strict=True)), ""
        yield f"{name}: median of published over predicted", median(ratios), f"{len(pairs)} rows"
        error = 100 * median(abs(1 / ratio - 1) for ratio in ratios)
        yield f"{name}: median error of the predicted rate, %", error, ""
    yield from _orderings()


def _orderings() -> Iterator[Row]:
    held = 0
    for ordering in ORDERINGS:
        rates = {}
        for name, words in ordering.words.items():
            step, _, _ = step_time(words)
            rates[name] = step.mfu
        fits = list(rates) == sorted(rates, key=rates.__getitem__, reverse=True)
        held += fits
        shown = " > ".join(f"{name} {rate:.1%}" for name, rate in rates.items())
        yield f"figure {ordering.figure}", float(fits), f"{'holds' if fits else 'FAILS'}: MFU {shown}"
    yield f"orderings of figures that hold, of {len(ORDERINGS)}", held, ""
