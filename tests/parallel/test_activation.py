"""Recomputed blocks are compiled as others are, to the same gradients."""

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

from lightning_llm.config.schema import ModelConfig, ParallelConfig
from lightning_llm.config.schema.model import BlockConfig
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.experts.kinds import MoE
from lightning_llm.model.init import initialise
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.parallel.apply import recompute_and_compile

MODEL = ModelConfig(
    name="tiny", vocab_size=64, num_layers=2, hidden_size=32, num_heads=2, num_kv_heads=1, ffn_hidden_size=64,
    max_sequence_length=16,
)  # fmt: skip


EXPERTS = MODEL.model_copy(
    update={
        "blocks": {"moe": BlockConfig(feed_forward=MoE(experts=4, ffn_hidden_size=16, shared_experts=1))},
        "layers": ("moe",),
    }
)


def gradients(mode: str, compiled: bool, config: ModelConfig = MODEL) -> list[torch.Tensor]:
    model = Decoder(config, torch.float32)
    initialise(model, 0)
    recompute_and_compile(model.blocks, ParallelConfig(name="single", activation_checkpoint=mode, compile=compiled))
    tokens = torch.arange(32).view(2, 16)
    next_token_loss_sum(model(tokens), tokens).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("mode", [pytest.param("none", marks=pytest.mark.full), "full", "selective"])
def test_a_compiled_block_is_compiled_whatever_it_recomputes(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        captured.extend(str(node.target) for part in parts for node in part.graph.nodes)
        return lookup_backend("aot_eager")(graph, inputs)

    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: compile_module(module, backend=backend))
    torch._dynamo.reset()
    compiled = gradients(mode, compiled=True)
    assert sum("linear" in target for target in captured) >= 7  # q, k, v, output; gate, up, down
    for one, other in zip(compiled, gradients("none", compiled=False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "mode", ["full", *(pytest.param(mode, marks=pytest.mark.full) for mode in ("none", "selective"))]
)
def test_blocks_are_compiled_around_their_experts(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a number of graphs that is independent of the number of blocks."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    compile_function, counts = torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda function: compile_function(function, backend=backend))
    for layers in (1, 3):
        torch._dynamo.reset()
        graphs.clear()
        config = EXPERTS.model_copy(update={"num_layers": layers})
        compiled = gradients(mode, compiled=True, config=config)
        counts.append(len(graphs))
        for one, other in zip(compiled, gradients("none", compiled=False, config=config), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert counts[0] == counts[1] > 1
