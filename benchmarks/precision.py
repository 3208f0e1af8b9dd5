"""A training step of a whole model under each shipped recipe's emulation, over the same step in bf16, by CPU time."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.rotation import Row
from lightning_llm.config.compose import compose_config
from lightning_llm.config.recipes import option_files
from lightning_llm.config.schema import Config
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.dtypes import DTYPES
from lightning_llm.model.init import initialise
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.train.quantisation import Quantisation

BASELINE = "bf16"
ROUNDS, WARMUP = 3, 1


@dataclass(frozen=True)
class Step:
    """What is trained on in a step: `micro_batches` of `batch` sequences of 256 tokens, by a model of these words."""

    title: str
    model: tuple[str, ...]
    batch: int
    micro_batches: int


HIDDEN_512 = Step(
    "hidden 512, 1 x 8 x 256 tokens",
    (
        "model.hidden_size=512", "model.num_heads=8", "model.num_kv_heads=8", "model.ffn_hidden_size=1408",
        "model.vocab_size=4096",
    ),
    batch=8,
    micro_batches=1,
)  # fmt: skip
TINY = Step("llama_tiny, 4 x 2 x 256 tokens (the quickstart's)", (), batch=2, micro_batches=4)
TARGETS = {
    "fp8_current": (1.25, 1.5), "fp8_delayed": (1.25, 1.5), "mxfp8": (1.25, 1.5), "fp8_subchannel": (1.5, 2.0),
    "mxfp4_sr": (1.5, 2.0), "nvfp4": (1.8, 2.5), "fp8_subchannel_fp32scales": (2.5, 3.0), "fp16_mxfp8": (2.5, 3.0),
    "quartet": (2.5, 3.0),
}  # fmt: skip


def training_step(recipe: str, step: Step) -> Callable[[], None]:
    """Return a function that takes a training step of `step`'s model under `recipe`, with clipping and AdamW."""
    config: Config = compose_config(["model=llama_tiny", f"precision={recipe}", *step.model])
    with torch.device("meta"):
        model = Decoder(config.model, DTYPES[config.precision.compute_dtype])
    quantisation = Quantisation(config.precision, seed=0, max_steps=1000)
    quantisation.swap(model, config.model.num_layers, "cpu")
    model.to_empty(device="cpu")
    initialise(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(0)
    shape = (step.micro_batches, step.batch, 257)
    tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
    made = 0

    def train() -> None:
        nonlocal made
        optimizer.zero_grad(set_to_none=True)
        quantisation.begin_step(model, made)
        for index, micro_batch in enumerate(tokens):
            quantisation.begin_micro_batch(model, made, index)
            loss = next_token_loss_sum(model(micro_batch[:, :-1]), micro_batch[:, 1:]) / tokens[..., 1:].numel()
            loss.backward()
            quantisation.end_micro_batch(model, lambda amax: amax)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        quantisation.end_step(model, lambda amax: amax)
        made += 1

    return train


def cpu_seconds(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Return each step's least CPU seconds of this process; they take turns, so that a slow spell hits all alike."""
    best = dict.fromkeys(steps, float("inf"))
    for turn in range(WARMUP + ROUNDS):
        for name, step in steps.items():
            start = time.process_time()
            step()
            best[name] = min(best[name], time.process_time() - start if turn >= WARMUP else float("inf"))
    return best


def measure() -> Iterator[Row]:
    """Yield each recipe's step over bf16's."""
    recipes = [name for name in option_files("precision") if compose_config([f"precision={name}"]).precision.quantises]
    for column, step in enumerate((HIDDEN_512, TINY)):
        best = cpu_seconds({name: training_step(name, step) for name in (BASELINE, *recipes)})
        yield f"{step.title}: bf16, CPU ms per step", best[BASELINE] * 1e3, ""
        for name in recipes:
            target = f"<= {TARGETS[name][column]}" if name in TARGETS else ""
            yield f"  {name}, CPU time over bf16's", best[name] / best[BASELINE], target
