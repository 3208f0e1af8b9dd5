"""Blocks compile to one graph per kind, independent of their number and of the mesh axes. 10 seconds.

What the graphs compute is compared in test_model_parallel.py (test_compiled_blocks_train_as_one_rank_does).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

from lightning_llm.base.keyed_hash import StepKey
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config, ModelConfig, ParallelConfig, PrecisionConfig
from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.apply import apply_parallel
from lightning_llm.parallel.cp import SequenceSharder
from lightning_llm.parallel.gradient_sync import GradientSync
from lightning_llm.parallel.layout import Layout
from lightning_llm.precision.linear.module import set_step_key
from lightning_llm.precision.linear.swap import swap_linears
from tests.parallel.rank_group import RankGroup
from tests.parallel.traced_run import layout_here, run_with
from tests.precision.recipes import load

LAYERS, TOKENS = 12 if "LAYOUT_STEPS" in os.environ else 4, 32
"""`make test-full` uses more blocks than the 8 recompilations that torch allows per function. Four blocks are enough to
see a graph that is not shared by the blocks of its kind."""
BF16 = PrecisionConfig(name="bf16", compute_dtype="bf16")
LLAMA: dict[str, Any] = {}
GLA = {"layers": ("gla",)}
GPT = {"norm": "layernorm", "bias": True, "position": "learned", "activation": "gelu", "tie_embeddings": True}


@contextmanager
def counted_graphs() -> Iterator[dict[str, int]]:
    """Yield what blocks that are compiled meanwhile came to: `graphs`, `breaks`, and how often one `ran`."""
    found = {"graphs": 0, "breaks": 0, "ran": 0}

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        found["graphs"] += 1
        run = lookup_backend("aot_eager")(graph, inputs)

        def counted(*arguments: Any) -> Any:
            found["ran"] += 1
            return run(*arguments)

        return counted

    torch._dynamo.reset()
    counters.clear()
    compile_module = nn.Module.compile
    with patch.object(nn.Module, "compile", lambda module: compile_module(module, backend=backend)):
        yield found
    found["breaks"] = sum(counters["graph_break"].values())


def compiled_blocks(parallel: ParallelConfig, shape: dict[str, Any], recipe: PrecisionConfig) -> dict[str, int]:
    """Return `counted_graphs` of all blocks in a forward and a backward pass."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 64}
    config = ModelConfig(name="tiny", num_layers=LAYERS, max_sequence_length=TOKENS, **sizes, **shape)
    layout, device = layout_here(parallel), torch.device("cpu")
    with torch.device("meta"):
        model = Decoder(config, torch.bfloat16)
        swap_linears(model, recipe, LAYERS, "cpu", "eager")
    with counted_graphs() as found:
        (sync,) = apply_parallel(model, layout, recipe, 0, TOKENS, device)
        _pass(model, layout, sync)
    return found


def _pass(model: Decoder, layout: Layout, sync: GradientSync) -> None:
    """Run one micro-batch forward and backward, and sum its gradients."""
    set_step_key(model, StepKey(0, 0, 0))
    tokens = torch.arange(TOKENS)[None]
    own, _, positions, _ = SequenceSharder(layout)(tokens, tokens, None)
    sync.before_backward(0, last=True)
    model(own, positions).float().sum().backward()
    sync.after_backward(0, last=True)
    sync.finish()
    assert all(parameter.grad is not None for parameter in model.parameters())


ALONE = [
    ({"tp": 2, "sequence_parallel": False}, GPT, 1),
    ({"tp": 2}, LLAMA, 1),
    ({"tp": 2, "activation_checkpoint": "full"}, LLAMA, 1),
    ({"tp": 2, "activation_checkpoint": "selective", "activation_checkpoint_every": 2}, LLAMA, 2),
    ({"tp": 2, "activation_checkpoint": "selective"}, GLA, 1),
    ({"cp": 2}, LLAMA, 1),
    ({"dp_replicate": 2}, LLAMA, 1),
    ({"dp_shard": 2, "zero_stage": 3, "activation_checkpoint": "full"}, LLAMA, 1),
    ({"dp_shard": 2, "zero_stage": 1}, LLAMA, 1),
]
CASES = [
    pytest.param(2, {"tp": 2}, LLAMA, 1, marks=pytest.mark.full),
    *(pytest.param(2, *case, marks=pytest.mark.full) for case in ALONE if case[0] != {"tp": 2}),
    pytest.param(4, {"dp_shard": 2, "tp": 2, "zero_stage": 3}, LLAMA, 1, marks=pytest.mark.full),
    pytest.param(4, {"cp": 2, "tp": 2}, GPT, 1, marks=pytest.mark.full),
    pytest.param(4, {"dp_shard": 2, "cp": 2, "zero_stage": 3}, LLAMA, 1, marks=pytest.mark.full),
    pytest.param(4, {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3}, LLAMA, 1, marks=pytest.mark.full),
]


def compiled_steps(config: Config) -> dict[str, int]:
    """Return `counted_graphs` of a run, on whichever rank they are most."""
    with counted_graphs() as found:
        run_with(config, saves=False)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, found)
    return {key: max(each[key] for each in everyones) for key in found}


@pytest.fixture(scope="module")
def one_of_two() -> Iterator[RankGroup]:
    group = RankGroup(2, fake=True)
    yield group
    group.close()


@pytest.mark.parametrize(("world", "keys", "shape", "kinds"), CASES)
def test_blocks_share_one_graph_per_kind(world, keys, shape, kinds, ranks):
    parallel = ParallelConfig(name="compiled", compile=True, **keys)
    found = ranks(world).call(compiled_blocks, parallel, shape, BF16)
    assert found == {"graphs": kinds, "breaks": 0, "ran": LAYERS}


COVERING = [ALONE[number] for number in (3, 5)]
"""Cases that cover every axis and kind of block; the other cases compile the same kinds of graphs."""


@pytest.mark.parametrize(
    ("keys", "shape", "kinds"),
    [case if case in COVERING else pytest.param(*case, marks=pytest.mark.full) for case in ALONE],
)
def test_blocks_of_one_rank_share_one_graph_per_kind(keys, shape, kinds, one_of_two):
    """Graphs are made by each rank for itself: half the time without the other's."""
    parallel = ParallelConfig(name="compiled", compile=True, **keys)
    found = one_of_two.call(compiled_blocks, parallel, shape, BF16)
    assert found == {"graphs": kinds, "breaks": 0, "ran": LAYERS}


@pytest.mark.parametrize(
    ("keys", "recipe"),
    [
        ({"tp": 2, "activation_checkpoint": "full"}, "nvfp4_all_blocks"),
        *(
            pytest.param(keys, recipe, marks=pytest.mark.full)
            for recipe in ("nvfp4_all_blocks", "fp8_delayed", "mxfp8", "fp8_subchannel")
            for keys in (
                {"tp": 2},
                {"cp": 2},
                {"cp": 2, "activation_checkpoint": "selective"},
                {"dp_replicate": 2},
                {"dp_shard": 2, "zero_stage": 3},
                {"dp_shard": 2, "zero_stage": 3, "activation_checkpoint": "full"},
            )
        ),
    ],
)
def test_emulated_casts_are_in_their_blocks_graph(keys, recipe, one_of_two):
    """Also with amaxes of whole tensors, which the operator reduces over ranks when it runs."""
    parallel = ParallelConfig(name="compiled", compile=True, **keys)
    found = one_of_two.call(compiled_blocks, parallel, LLAMA, load(recipe))
    assert found == {"graphs": 1, "breaks": 0, "ran": LAYERS}


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "world"), [("pp", 2), ("pp_interleaved", 2), ("ddp_pp", 4), ("fsdp_pp", 4), ("pp_tp", 4)]
)
def test_stages_of_a_pipeline_share_one_graph(layout, world, ranks, small_run, tmp_path):
    """Over two steps of four micro-batches: tensors from another stage cause no recompilation."""
    words = [f"parallel={layout}", f"trainer.devices={world}", "trainer.compile=true", "precision=bf16"]
    words += ["model.num_layers=4", "model.num_kv_heads=2", "trainer.max_steps=2", "schedule.warmup_steps=1"]
    words += ["data.micro_batch_size=1", f"data.global_batch_size={4 * world // (4 if layout == 'pp_tp' else 2)}"]
    words += ["data.validation.fraction=0", "trainer.validate_every_steps=null", "checkpoint.every_steps=null"]
    found = ranks(world).call(compiled_steps, compose_config(small_run(tmp_path, *words)))
    assert found == {"graphs": 1, "breaks": 0, "ran": 2 * 2 * 4}  # two blocks on a rank
