"""Transformer Engine's kernels keep a weight's casts within a step, to the same bits, in its Python. 3 CPU seconds."""

import copy

import pytest
import torch

from lightning_llm.precision.native.transformer_engine import NativeLinear
from lightning_llm.train.quantization import Quantization
from tests.precision.native import stub_kernels
from tests.precision.native.test_native_linear import DTYPES, batch, block_of, pair, run, same
from tests.precision.native.test_transformer_engine import compute_capability
from tests.precision.recipes import load

MICRO_BATCHES = 3
CASES = [("fp8_current", 0), ("fp8_subchannel", 0), ("mxfp8", 1), ("nvfp4", 0), ("fp8_delayed", 0)]


def steps_of(model, recipe, dtype):
    """Return the results of two steps of `MICRO_BATCHES`, and the number of calls of the cast kernel in each."""
    quantization, left, casts = Quantization(recipe, 0, 2), [], []
    torch.manual_seed(0)
    for step in range(2):
        stub_kernels.LOG.clear()
        quantization.begin_step(model, step)
        with quantization.weights_held(model):
            for micro_batch in range(MICRO_BATCHES):
                quantization.begin_micro_batch(model, step, micro_batch)
                left += run(model, *batch(dtype, seed=10 * step + micro_batch))
        casts.append(sum(isinstance(each, stub_kernels.Cast) for each in stub_kernels.LOG))
        quantization.end_step(model, lambda amax: amax)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad)
            left.append(block_of(model)["up_proj"](batch(dtype)[0]))
    return left, casts


@pytest.mark.parametrize(("name", "observed"), CASES)
def test_a_kernel_casts_each_weight_once_per_step(name, observed, engine):
    """Except under delayed scales, because the cast takes the amax. Observers see the emulation's casts, as before."""
    recipe = load(name)
    engine.device(*compute_capability(recipe))
    _, plain = pair(recipe)
    keeping, seen = copy.deepcopy(plain), {"plain": [], "keeping": []}
    for label, model in (("plain", plain), ("keeping", keeping)):
        for layer in block_of(model).values():
            if observed:
                layer.observe = lambda cast, label=label: seen[label].append(cast.slot)
    Quantization(recipe, 0, 2).keep_weight_casts(keeping, {1: True})
    dtype = DTYPES[recipe.compute_dtype]
    ours, ours_cast = steps_of(keeping, recipe, dtype)
    theirs, theirs_cast = steps_of(plain, recipe, dtype)
    assert same(ours, theirs)
    saved = 0 if name == "fp8_delayed" else 2 * (MICRO_BATCHES - 1)
    assert ours_cast == [each - saved for each in theirs_cast]
    assert seen["keeping"] == seen["plain"]
    for layer in block_of(keeping).values():
        assert isinstance(layer, NativeLinear)
        assert layer._kernel[0]._fp8_workspaces == {}
