"""A training step of a whole model under each shipped recipe's emulation, over the same step in bf16, by CPU time."""

import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

from benchmarks.rotation import Row, interleaved_minima, stepping
from benchmarks.shape import Shape, config, random_batch
from lightning_llm.config.compose import compose_config
from lightning_llm.config.recipes import option_files
from lightning_llm.linalg import DTYPES
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import initialise
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.train.quantization import Quantization

BASELINE = "bf16"
HIDDEN_512 = Shape(hidden=512, layers=4, heads=8, ffn=1408, vocab=4096, length=256, batch=8)
TINY = Shape(hidden=192, layers=4, heads=6, ffn=512, vocab=1024, length=256, batch=8)
STEPS = {
    "hidden 512, 1 x 8 x 256 tokens": (HIDDEN_512, 1),
    "llama_tiny, 4 x 2 x 256 tokens (the quickstart's)": (TINY, 4),
}
"""Model and batch of a step, and its number of micro-batches."""
TARGETS = {
    "fp8_current": (1.25, 1.5), "fp8_delayed": (1.25, 1.5), "mxfp8": (1.25, 1.5), "fp8_subchannel": (1.5, 2.0),
    "mxfp4_sr": (1.5, 2.0), "nvfp4": (1.8, 2.5), "fp8_subchannel_fp32scales": (2.5, 3.0), "fp16_mxfp8": (2.5, 3.0),
    "quartet": (2.5, 3.0),
}  # fmt: skip


def training_step(
    recipe: str, shape: Shape, micro_batches: int, keeps: bool | None = None, model: str = "llama_tiny"
) -> Callable[[], None]:
    """Return a function that makes a training step of `model` at `shape` under `recipe`, with clipping and AdamW.

    `keeps`: whether casts of weights are cached within a step; None: if it has several micro-batches, as in `train`.
    """
    run = config(f"precision={recipe}", shape=shape, model=model)
    with torch.device("meta"):
        decoder = Decoder(run.model, DTYPES[run.precision.compute_dtype])
    quantization = Quantization(run.precision, seed=0, max_steps=1000)
    quantization.swap(decoder, run.model.num_layers, "cpu")
    if micro_batches > 1 if keeps is None else keeps:
        quantization.keep_weight_casts(decoder, dict.fromkeys(range(run.model.num_layers), True))
    decoder.to_empty(device="cpu")
    initialise(decoder, 0)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-3, fused=True)
    tokens, labels = (each.chunk(micro_batches) for each in random_batch(shape))
    made = 0

    def train() -> None:
        nonlocal made
        optimizer.zero_grad(set_to_none=True)
        quantization.begin_step(decoder, made)
        with quantization.weights_held(decoder):
            for index in range(micro_batches):
                quantization.begin_micro_batch(decoder, made, index)
                loss = next_token_loss_sum(decoder(tokens[index]), labels[index]) / shape.tokens
                loss.backward()
                quantization.end_micro_batch(decoder, lambda amax: amax)
        nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        quantization.end_step(decoder, lambda amax: amax)
        made += 1

    return train


def measure() -> Iterator[Row]:
    """Yield each recipe's step over bf16's."""
    recipes = [name for name in option_files("precision") if compose_config([f"precision={name}"]).precision.quantizes]
    for column, (title, (shape, micro_batches)) in enumerate(STEPS.items()):
        contenders = {name: stepping(training_step(name, shape, micro_batches)) for name in (BASELINE, *recipes)}
        best = interleaved_minima(contenders, rounds=3, steps=1, warmup=1, clock=time.process_time)
        yield f"{title}: bf16, CPU ms per step", best[BASELINE] * 1e3, ""
        for name in recipes:
            target = f"<= {TARGETS[name][column]}" if name in TARGETS else ""
            yield f"  {name}, CPU time over bf16's", best[name] / best[BASELINE], target
