"""Routers in a training step: the bias rule, the figures, and counts that recomputation does not double."""

import math

import pytest
import torch

from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import ParallelConfig
from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.apply import checkpoint_blocks
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.degrees import Degrees
from lightning_llm.train.routing import FIGURES, Routing
from tests.model.model_shapes import build, llama, tokens_of

ROUTER = {"bias_update_rate": 0.25, "score": "sigmoid"}


def routed(**keys) -> tuple[Decoder, Routing]:
    kind = {"kind": "moe", "experts": 4, "per_token": 2, "ffn_hidden_size": 16, "router": ROUTER, **keys}
    config = llama(num_layers=2, blocks={"moe": {"feed_forward": kind}}, layers=["attention", "moe"])
    model = build(config)
    return model, Routing([model], config, Layout(ParallelConfig(name="single"), Degrees()))


def test_biases_follow_the_rule_over_three_steps():
    """Raised below the mean load, lowered above it, left alone at it: by hand from the counts of the batch."""
    model, routing = routed()
    router, experts = model.layers["1"].feed_forward.router, model.layers["1"].feed_forward.experts
    chosen, bias = [], torch.zeros(4)
    experts.register_forward_pre_hook(lambda _, inputs: chosen.append(inputs[1].chosen))
    for step in range(3):
        routing.begin_step()
        for micro_batch in range(2):
            model(tokens_of(model.config, seed=10 * step + micro_batch))
        routing.figures()
        routing.update_biases()
        counts = [sum((each == expert).sum().item() for each in chosen) for expert in range(4)]
        mean = sum(counts) / 4
        bias += 0.25 * torch.tensor([float((mean > each) - (mean < each)) for each in counts])
        assert torch.equal(router.correction, bias)
        chosen.clear()
    assert bias.ne(0).any()


def test_figures_are_those_of_the_counts():
    model, routing = routed()
    module = model.layers["1"].feed_forward
    module.router.correction.data = torch.tensor([0.5, -0.25, 0.0, 0.0])
    module.step_loads, module.step_dropped = torch.tensor([6, 0, 1, 1]), torch.tensor(2)
    found = {name: value.item() for name, value in routing.figures().items()}
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.125)) / math.log(4)
    expected = {"load_max": 3, "load_min": 0, "entropy": entropy, "dropped": 0.25, "dead": 1, "bias_range": 0.75}
    assert found == {f"moe/{name}": pytest.approx(value) for name, value in expected.items()}
    assert tuple(expected) == FIGURES
    assert routing.by_block["layers.1"].tolist() == pytest.approx(list(expected.values()))


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_a_recomputed_block_counts_once(mode):
    model, routing = routed()
    checkpoint_blocks(model.blocks, ParallelConfig(name="single", activation_checkpoint=mode))
    model.auxiliary.begin_step(1.0, 1.0)
    for _ in range(2):
        model(tokens_of(model.config)).sum().backward()
    assert model.layers["1"].feed_forward.step_loads.sum() == 2 * 2 * 300
    assert model.auxiliary.sums.keys() == {"balance", "router_z"}
    with torch.no_grad():
        model(tokens_of(model.config))  # a validation
    assert model.layers["1"].feed_forward.step_loads.sum() == 2 * 2 * 300
    routing.begin_step()
    assert model.layers["1"].feed_forward.step_loads is None


def test_a_dense_model_has_no_figures():
    config = compose_config(["model=llama_tiny"]).model
    model = build(llama())
    assert Routing([model], config, Layout(ParallelConfig(name="single"), Degrees())).figures() == {}
