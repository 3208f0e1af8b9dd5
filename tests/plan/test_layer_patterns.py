"""`model.layers` in plans: stages by weight, bytes and names by layer, messages about a wrong pattern."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.flops import count_parameters, flops_per_token
from lightning_llm.model.structure import linear_names
from lightning_llm.plan import stages as stages_module
from lightning_llm.plan.check import config_problems
from lightning_llm.plan.memory.units import units_of
from lightning_llm.plan.report import plan_facts, render
from lightning_llm.plan.resolve import DerivedConfig, plan_of
from lightning_llm.plan.stages import split_layers

SMALL = "model.blocks={small: {feed_forward: {kind: gelu}}, local: {mixer: {kind: attention, window: 16}}}"
BATCH = ["data.micro_batch_size=1", "data.sequence_length=128", "trainer.accelerator=cpu"]


def config_of(*words: str):
    return compose_config(["model=llama_tiny", *BATCH, *words])


def weights_of(counts, blocks, first, last):
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    weights = [sum(blocks[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    weights[0] += first
    weights[-1] += last
    return weights


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(0, 20),
    st.integers(0, 20),
)
def test_unlike_blocks_are_split_by_weight(blocks, stages, first, last):
    """Against all splits: the lightest heaviest stage, then the most even, then the fewest blocks in early stages."""
    if len(blocks) < stages:
        return
    length = len(blocks)
    every = [
        [b - a for a, b in zip((0, *cut), (*cut, length), strict=True)]
        for cut in combinations(range(1, length), stages - 1)
    ]
    ends = stages_module._even_split(tuple(blocks), stages, first, last)
    found = [end - start for start, end in zip((0, *ends), ends, strict=False)]

    def order(counts):
        weights = weights_of(counts, blocks, first, last)
        return max(weights), sum(weight**2 for weight in weights), counts

    assert found == min(every, key=order)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 50), st.integers(0, 200), st.integers(0, 200))
def test_equal_blocks_go_to_the_lightest_stage_so_far(length, stages, block, first, last):
    """The rule for equal blocks: one each, then always to the lightest stage, among equals to the last."""
    if length < stages:
        return
    counts, weights = [1] * stages, [block] * stages
    weights[0] += first
    weights[-1] += last
    for _ in range(length - stages):
        lightest = min(range(stages), key=lambda stage: (weights[stage], -stage))
        weights[lightest] += block
        counts[lightest] += 1
    ends = stages_module._even_split((block,) * length, stages, first, last)
    assert [end - start for start, end in zip((0, *ends), ends, strict=False)] == counts


def test_fewer_blocks_than_stages_make_no_split():
    with pytest.raises(ValueError, match="4 blocks cannot be split into 5 stages"):
        split_layers(config_of().model, 5)


def test_the_plan_counts_each_layer_by_its_own_kind():
    plain, small = config_of("model.num_layers=4"), config_of("model.num_layers=4", "model.activation=gelu")
    mixed = config_of("model.num_layers=4", SMALL, "model.layers=[attention, attention, attention, small]")
    configs = {"plain": plain, "small": small, "mixed": mixed}
    every = {name: plan_facts(plan_of(config)) for name, config in configs.items()}
    assert every["mixed"]["layers"] == ["attention", "attention", "attention", "small"]
    assert "layers [attention x 3, small] repeated" in render(every["mixed"])
    assert "layers" not in render(every["plain"]).splitlines()[0]
    gate = plain.model.hidden_size * plain.model.ffn_hidden_size
    assert every["plain"]["parameters"] - every["mixed"]["parameters"] == gate
    assert every["plain"]["parameters"] - every["small"]["parameters"] == 4 * gate
    assert every["plain"]["flops_per_token"] - every["mixed"]["flops_per_token"] == 6 * gate
    assert every["plain"]["memory_bytes"]["optimizer"] - every["mixed"]["memory_bytes"]["optimizer"] == 8 * gate
    names = linear_names(mixed.model)
    assert "layers.2.feed_forward.gate_proj" in names
    assert "layers.3.feed_forward.gate_proj" not in names
    sizes = [unit.shard(1) for unit in units_of(mixed.model).blocks]
    assert sizes == [sizes[0]] * 3 + [sizes[0] - gate]


def test_a_window_saves_flops_and_needs_a_mask():
    plain, local = config_of(), config_of(SMALL, "model.layers=[local, attention]")
    assert count_parameters(local.model) == count_parameters(plain.model)
    seen = flops_per_token(plain.model, 128) - flops_per_token(local.model, 128)
    assert seen == 2 * 12 * plain.model.hidden_size * (128 - 16)  # two of four layers
    kept = [plan_facts(plan_of(config))["memory_bytes"]["activations"] for config in (local, plain)]
    assert kept[0] - kept[1] == 128 * 128


@pytest.mark.parametrize(
    ("words", "masks"),
    [
        (["model.layers=[attention]"], 0),
        (["model.layers=[local, attention]"], 1),
        (["model.layers=[local, attention]", "data.document_mask=true"], 2),
        (["model.layers=[attention]", "data.document_mask=true"], 1),
        (["model.layers=[local]", "data.sequence_length=16"], 0),  # the window hides nothing
    ],
)
def test_masks_are_planned_where_the_model_makes_them(words, masks):
    config = config_of(SMALL, *words)
    length = config.data.sequence_length
    model = Decoder(config.model)
    documents = torch.zeros(1, length, dtype=torch.int64) if config.data.document_mask else None
    windows = {block.attention_kind.window for block in model.layers.values()}
    made = [model.seen_keys(torch.arange(length), documents, window) for window in windows]
    assert sum(seen.dense().numel() for seen in made if seen is not None) == masks * length**2
    plain = config.model_copy(update={"model": config_of().model})
    plain = plain.model_copy(update={"data": config.data.model_copy(update={"document_mask": False})})
    kept = [plan_facts(plan_of(each))["memory_bytes"]["activations"] for each in (config, plain)]
    assert kept[0] - kept[1] == masks * length**2


def test_module_rules_select_layers_by_name():
    words = [SMALL, "model.layers=[attention, small]", "model.num_layers=4", "precision=mxfp8"]
    fits = config_of(*words, "precision.modules.casts=[{names: ['*.gate_proj'], high: true}]")
    assert config_problems(DerivedConfig(fits)) == []
    layers = plan_facts(plan_of(fits))["precision"]["module_casts"][0]["layers"]
    assert layers == []  # those that it quantises: none, they stay high
    misses = config_of(*words, "precision.modules.exclude=['layers.[13].*.gate_proj']")
    assert [problem.key for problem in config_problems(DerivedConfig(misses))] == ["precision.modules.exclude"]


@pytest.mark.parametrize(
    ("words", "key", "text"),
    [
        (["model.layers=[atention]"], "model.layers", "'atention' is neither in model.blocks nor a mixer."),
        (
            ["model.blocks={local: {mixer: {kind: attention, windw: 8}}}"],
            "model.blocks.local.mixer.windw",
            "unknown key. Did you mean 'window'?",
        ),
        (
            ["model.blocks={local: {mixer: {kind: attnetion}}}"],
            "model.blocks.local.mixer.kind",
            "there is no mixer 'attnetion'. Did you mean 'attention'?",
        ),
        (["model.norm=rmsnrm"], "model.norm", "there is no norm 'rmsnrm'. Did you mean 'rmsnorm'?"),
        (["model.activation=gleu"], "model.activation", "there is no feed-forward network 'gleu'."),
    ],
)
def test_an_invalid_layer_pattern_is_reported_with_its_key(words, key, text):
    with pytest.raises(ConfigError) as error:
        config_of(*words)
    problems = [(problem.key, problem.text) for problem in error.value.problems]
    assert len(problems) == 1
    assert problems[0][0] == key
    assert problems[0][1].startswith(text)
