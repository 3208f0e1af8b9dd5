"""Record golden curves with one CPU's kernels and check them with another's: the table of the page on golden curves.

`python docs/internals/golden_on_other_kernels.py [RECIPE ...]` records ten steps of a small model, with five perturbed
repeats, with the kernels that torch chooses on this machine. A second process, limited to AVX2, checks them: once
unchanged, and once per linear layer with a weight gradient computed from the wrong tensor. Three minutes on one core.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
RECIPES = ["fp32", "bf16", "fp8_delayed", "mxfp8", "mxfp4_sr"]
STEPS, REPEATS, LAYERS = 10, 5, 3
LINEARS = 7 * LAYERS
"""Those of the blocks, in the order of the forward pass; the head is one more call where nothing is quantised."""
OTHER_KERNELS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
WORDS = [
    "model=llama_tiny", f"model.num_layers={LAYERS}", "model.hidden_size=64", "model.num_heads=1",
    "model.num_kv_heads=1", "model.ffn_hidden_size=128", "model.vocab_size=320",
    "data=text", f"data.sources.text.path={ROOT / 'tests' / 'golden' / 'corpus.txt'}",
    "data.sources.text.sample_by=paragraph", "data.tokenizer.kind=bytes", "data.tokenizer.vocab_size=null",
    "data.validation.fraction=0", "data.sequence_length=64", "data.micro_batch_size=2", "data.global_batch_size=4",
    "precision.casts=eager", "optim.learning_rate=1e-2", "schedule.warmup_steps=2", f"trainer.max_steps={STEPS}",
    "trainer.validate_every_steps=null", "trainer.accelerator=cpu", "trainer.threads=1",
]  # fmt: skip


def curve_of(recipe: str, cache: Path, steps: int, nudge: int | None = None):
    """Return the first steps under a precision recipe, in this process."""
    from lightning_llm.config.compose import compose_config
    from lightning_llm.golden.curve import Curve
    from lightning_llm.golden.measure import measure
    from lightning_llm.plan.check import check_config

    plan = check_config(compose_config([*WORDS, f"precision={recipe}", f"data.cache_dir={cache}"]))
    with open(os.devnull, "w") as nobody, redirect_stderr(nobody):
        return Curve.of(measure(plan, steps, nudge).figures)


def check(recipe: str, cache: Path, recorded: list[dict]) -> None:
    """Print the row of one recipe, by the kernels of this process."""
    from lightning_llm.golden.comparison import first_difference
    from lightning_llm.golden.curve import LEARNING_RATE, Band, Curve, Noise

    curves = [Curve.from_data(each) for each in recorded]
    band, here = Band(Noise.of(curves, nudged=True), false_alarms=0.01), curve_of(recipe, cache, STEPS)
    bits, outside = (first_difference(curves[0], here, each) for each in (None, band))
    shares = [0.0]
    for step, name, number in here.numbers():
        if name != LEARNING_RATE and (allowed := band.interval(name, step)) and allowed[1]:
            shares.append(abs(number - allowed[0]) / allowed[1])
    named = 0
    for linear in range(LINEARS):
        with wrong_wgrad(recipe, linear):
            first = first_difference(curves[0], curve_of(recipe, cache, 1), band)
        named += first is not None and (first.step, first.quantity) == (1, "gradient_norm")
    differ = "none" if bits is None else f"step {bits.step}"
    passed = "within" if outside is None else f"outside at step {outside.step}"
    print(f"| `{recipe}` | {differ} | {passed} ({max(shares):.2f} of it) | {named} of {LINEARS} |", flush=True)


@contextmanager
def wrong_wgrad(recipe: str, linear: int) -> Iterator[None]:
    """Plant a weight gradient from the wrong tensor in one linear layer of the blocks."""
    sys.path.insert(0, str(ROOT / "tests"))
    from planted import wgrad_of_wrong_tensor

    from lightning_llm.model.linear import Linear
    from lightning_llm.precision.linear.operands import LinearCall

    calls, right = iter(range(10**6)), LinearCall.operand

    def operand(self, x, slot: str, axis: int):
        wrong = slot == "wgrad.x" and next(calls) % LINEARS == linear
        return right(self, x.roll(1, dims=0) if wrong else x, slot, axis)

    multiply: Callable = wgrad_of_wrong_tensor(Linear.multiply, lambda call: call % (LINEARS + 1) == linear)
    if recipe in ("fp32", "bf16"):
        with patch.object(Linear, "multiply", multiply):
            yield
    else:
        with patch.object(LinearCall, "operand", operand):
            yield


def main(recipes: list[str]) -> None:
    """Record each recipe here, and check it by other kernels."""
    print("| recipe | bits differ from | the unchanged program | wrong weight gradients named at step 1 |")
    print("|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for recipe in recipes or RECIPES:
            nudges = [None, *range(REPEATS)]
            curves = [curve_of(recipe, Path(folder), STEPS, nudge).as_data() for nudge in nudges]
            words = [sys.executable, __file__, "--check", recipe, folder]
            subprocess.run(words, input=json.dumps(curves), text=True, check=True, env={**os.environ, **OTHER_KERNELS})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Check golden curves of one CPU's kernels with another's.")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="precision recipes (the shipped ones)")
    parser.add_argument("--check", nargs=2, help=argparse.SUPPRESS)  # in the process that may use AVX2 alone
    asked = parser.parse_args()
    if asked.check:
        check(asked.check[0], Path(asked.check[1]), json.load(sys.stdin))
    else:
        main(asked.recipes)
