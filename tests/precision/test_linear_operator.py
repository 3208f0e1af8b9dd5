"""A quantised linear layer within a compiled block: one operator of its graph, to the bits of the layer by itself.

Graphs run by torch's own operators here (aot_eager), so that nothing else in a block rounds otherwise. 6 CPU seconds.
"""

import itertools
from collections import Counter
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

from lightning_llm.base.keyed_hash import StepKey
from lightning_llm.config.schema import ModelConfig, ParallelConfig, PrecisionConfig
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import initialise
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.parallel.apply import checkpoint_blocks, compile_blocks
from lightning_llm.precision.linear.delayed import delayed_state, update_delayed
from lightning_llm.precision.linear.module import (
    QuantizedLinear,
    high_precision_forward,
    quantized_layers,
    set_recipe,
    set_step_key,
)
from lightning_llm.precision.linear.operands import LinearCall
from lightning_llm.precision.linear.swap import swap_linears
from tests.precision.recipes import RECIPES, load

LAYERS = 3
MODEL = ModelConfig(
    name="tiny", vocab_size=64, num_layers=LAYERS, hidden_size=64, num_heads=2, num_kv_heads=2, ffn_hidden_size=128,
    max_sequence_length=64, bias=True,
)  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Trained(NamedTuple):
    """Results of some steps: equal for compiled blocks, except the number of operands `made`.

    `ways`: of blocks of each kind to run: to train, to validate, and to validate without the casts that there are.
    """

    gradients: list[Tensor]
    delayed: dict[str, Tensor]
    logits: list[Tensor]
    observed: Counter[str]
    made: Counter[str]
    ways: int
    layers: int


@pytest.fixture
def graphs(monkeypatch):
    """Compile blocks by torch's own operators, and return the graphs that are made."""
    seen: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        seen.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    counters.clear()
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: compile_module(module, backend=backend))
    return seen


def trained(recipe: PrecisionConfig, mode: str, compiled: bool) -> Trained:
    """Make three steps of two micro-batches, both of them under way at once: one is observed, the last is a phase's."""
    observed, made, operand = Counter(), Counter(), LinearCall.operand

    def counted(call: LinearCall, x: Tensor, slot: str, axis: int) -> Any:
        made[slot] += 1
        return operand(call, x, slot, axis)

    model = Decoder(MODEL, DTYPES[recipe.compute_dtype])
    initialise(model, 0)
    swap_linears(model, recipe, LAYERS, "cpu", "eager")
    kinds = {tuple(map(type, block.modules())) for block in model.blocks.values()}
    ways = sum(3 if QuantizedLinear in kind else 2 for kind in kinds)
    layers = sum(len(quantized_layers(block)) for block in model.blocks.values())
    checkpoint_blocks(model.blocks, ParallelConfig(name="single", activation_checkpoint=mode))
    if compiled:
        compile_blocks(model.blocks)
    with patch.object(LinearCall, "operand", counted):
        tokens = torch.arange(128).view(2, 1, 64) % 61
        for step in range(3):
            for layer in quantized_layers(model):
                layer.observe = (lambda seen: observed.update([seen.slot])) if step == 1 else None
            if step == 2:
                set_recipe(model, load("fp16" if recipe.compute_dtype == "fp16" else "bf16"), LAYERS)
            losses = []
            for micro_batch, own in enumerate(tokens):
                set_step_key(model, StepKey(3, step, micro_batch))
                losses.append(next_token_loss_sum(model(own), own))
            for loss in losses:
                loss.backward()
            update_delayed(model)
    set_recipe(model, recipe, LAYERS)
    with torch.no_grad():
        logits = [model(tokens[0])]
        with high_precision_forward(model):
            logits.append(model(tokens[0]))
    state = {f"{name}.{key}": each for name, its in delayed_state(model).items() for key, each in its.items()}
    return Trained([parameter.grad for parameter in model.parameters()], state, logits, observed, made, ways, layers)


MODES = ("none", "full", "selective")
FEW = [("fp8_delayed", "selective")]
QUANTIZING = [name for name in RECIPES if load(name).quantizes or load(name).compute_dtype == "fp16"]


PAIRED = zip(QUANTIZING, itertools.cycle(MODES), strict=False)
OTHERS = [each for each in PAIRED if each not in FEW]


@pytest.mark.full
@pytest.mark.parametrize(("name", "mode"), [*FEW, *(pytest.param(*each, marks=pytest.mark.full) for each in OTHERS)])
def test_a_compiled_block_trains_to_the_bits_of_its_casts_by_themselves(name, mode, graphs):
    """In one graph for each kind of block and way to run it: a recipe's phases need no others."""
    plain = trained(load(name), mode, compiled=False)
    assert graphs == []
    ours = trained(load(name), mode, compiled=True)
    assert {"graphs": len(graphs), "breaks": counters["graph_break"]} == {"graphs": plain.ways, "breaks": {}}
    same = map(torch.equal, ours.gradients + ours.logits, plain.gradients + plain.logits)
    assert all(same)
    assert ours.delayed.keys() == plain.delayed.keys()
    assert all(torch.equal(ours.delayed[name], plain.delayed[name]) for name in plain.delayed)
    assert ours.observed == plain.observed  # a recomputation is not observed
    # Of six micro-batches: a selective recomputation keeps what operators return, a whole one needs not a block's last.
    spared = plain.made["fprop.x"] - ours.made["fprop.x"]
    assert spared in {"none": [0], "full": range(6 * LAYERS + 1), "selective": [6 * plain.layers]}[mode]
