"""Tests that are marked for a GPU, and training steps of every recipe on a small model."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from gpu_check import setting
from gpu_check.checks import Call
from gpu_check.journal import Clock, Item, Journal, OutOfTimeError, Row, judged, missing
from gpu_check.machine import lacking
from gpu_check.setting import model_config, recipes
from lightning_llm.config.schema.precision import PrecisionConfig
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import initialise
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.precision.native.decide import decide
from lightning_llm.train.quantization import Quantization

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = {
    "num_layers": 3, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 4, "ffn_hidden_size": 512, "vocab_size": 512,
}  # fmt: skip
STEPS = 3
NEAR = 0.1
"""Largest difference from bf16's loss, relative."""
NEAR_OF = {"quartet": 0.2}
"""Quartet differs by 15 % after three steps, on a CPU too."""
MARK = re.compile(r"^(pytestmark =|@)\s*pytest\.mark\.gpu\b", re.MULTILINE)


def items(call: Call) -> list[Item]:
    """Return the items: tests marked `gpu`, then training steps of each recipe, first bf16, the reference."""
    names = sorted(recipes(), key=lambda name: (name != "bf16", name))
    trained = [Item(name, 3, partial(one_recipe, recipes()[name], call.journal)) for name in names]
    return [Item("tests marked gpu", 10, partial(marked_tests, call.clock)), *trained]


def one_recipe(recipe: PrecisionConfig, journal: Journal) -> Iterator[Row]:
    """Yield whether three steps of training end near bf16's loss."""
    decision, loss = decide(recipe, setting.here()), train(recipe)
    what = f"loss after {STEPS} steps, {recipe.name}"
    base = loss if recipe.name == "bf16" else journal.value("steps", f"loss after {STEPS} steps, bf16")
    if base is None:
        yield Row(what, loss, "", "measured", f"{decision.runs}; no bf16 baseline")
        return
    near = NEAR_OF.get(recipe.name, NEAR)
    holds = math.isfinite(loss) and abs(loss - base) < near * base
    yield judged(what, loss, "", holds, f"{decision.runs}; within {100 * near:g} % of bf16's {base:.4f}")


def train(recipe: PrecisionConfig) -> float:
    """Return the loss after `STEPS` steps of AdamW on random tokens, with the recipe's own loss scale."""
    device, decision = setting.DEVICE, decide(recipe, setting.here())
    quantization = Quantization(recipe.model_copy(update={"casts": "eager"}), 0, STEPS, decision)
    with torch.device("meta"):
        model = Decoder(model_config("llama_tiny", **SIZES), compute_dtype=DTYPES[recipe.compute_dtype])
    quantization.swap(model, SIZES["num_layers"], device)
    model.to(DTYPES[recipe.master_dtype]).to_empty(device=device)
    initialise(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, 512, (4, 128), generator=torch.Generator().manual_seed(0)).to(device)
    scale = recipe.loss_scaling.init_scale if recipe.loss_scaling else 1.0
    loss = torch.zeros(())
    for step in range(STEPS + 1):
        quantization.begin_step(model, min(step, STEPS - 1))
        quantization.begin_micro_batch(model, step, 0)
        loss = next_token_loss_sum(model(tokens), tokens) / tokens.numel()
        optimizer.zero_grad()
        (loss * scale).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= scale
        quantization.end_micro_batch(model, lambda amax: amax)
        optimizer.step()
        quantization.end_step(model, lambda amax: amax)
    return float(loss.item())


def marked_files() -> list[Path]:
    """Return the files with tests marked `gpu`. Other test files import packages that a GPU machine may lack."""
    return sorted(file for file in (ROOT / "tests").rglob("test_*.py") if MARK.search(file.read_text("utf-8")))


def marked_tests(clock: Clock) -> Iterator[Row]:
    """Yield the number of passed tests marked `gpu`."""
    if gone := lacking(("pytest", "pydantic", "yaml")):
        yield missing("tests marked gpu", f"{', '.join(gone)} not installed")
        return
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        *map(str, marked_files()),
    ]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins of other packages may lack dependencies
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=max(1, clock.left - 2), check=False
        )
    except subprocess.TimeoutExpired:
        raise OutOfTimeError("the tests had not ended") from None
    print(done.stdout, file=sys.stderr)  # to the log file next to the rows
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    passed = int(found[1]) if (found := re.search(r"(\d+) passed", last)) else 0
    if done.returncode == 0 and not passed:  # all skipped, each with its reason
        skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")] or [last]
        yield missing("tests marked gpu", skipped[0][:200])
        return
    yield judged("tests marked gpu: passed", passed, "", done.returncode == 0, last[:200])
