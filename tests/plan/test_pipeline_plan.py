"""Pipelines before they run: the split of layers, its lines in `plan`, misfits. 10 seconds."""

import json
from itertools import combinations
from random import Random

import pytest

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.plan.check import check_config
from lightning_llm.plan.degrees import resolve_degrees
from lightning_llm.plan.memory.rank_bytes import memory_bytes
from lightning_llm.plan.report import plan_facts
from lightning_llm.plan.resolve import plan_of
from lightning_llm.plan.stages import _even_split, chunks_in_flight, split_layers

BATCH = ["data.micro_batch_size=1", "data.sequence_length=2048"]


def config_of(*words: str):
    return compose_config([*BATCH, *words])


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("vocabulary", [256, 8192])
def test_no_other_split_has_a_lighter_heaviest_stage(stages, tied, vocabulary):
    words = ["model=llama_tiny", "model.num_layers=9", f"model.tie_embeddings={tied}", f"model.vocab_size={vocabulary}"]
    model = compose_config(words).model
    parts = split_layers(model, stages)
    assert [index for part in parts for index in part.layers] == list(range(9))
    assert [part.first for part in parts] == [True] + [False] * (stages - 1)
    assert [part.last for part in parts] == [False] * (stages - 1) + [True]
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    block, table = 4 * hidden * hidden + 3 * hidden * ffn + 2 * hidden, model.padded_vocab_size * hidden

    def heaviest(counts):
        weights = [block * count for count in counts]
        weights[0] += table
        weights[-1] += table
        return max(weights)

    every = (
        [b - a for a, b in zip((0, *cut), (*cut, 9), strict=True)] for cut in combinations(range(1, 9), stages - 1)
    )
    assert heaviest([len(part.layers) for part in parts]) == min(map(heaviest, every))


def test_ties_between_splits_are_broken_by_evenness_then_by_later_stages():
    """Blocks of unlike weights, by trying every cut."""
    draw = Random(0)
    for _ in range(200):
        blocks = tuple(draw.randint(1, 4) for _ in range(draw.randint(3, 7)))
        stages, first, last = draw.randint(1, 3), draw.randint(0, 5), draw.randint(0, 5)
        own = [first, *[0] * (stages - 2), last] if stages > 1 else [first + last]

        def weights(ends, blocks=blocks, own=own):
            parts = zip((0, *ends), ends, own, strict=False)
            return [sum(blocks[start:end]) + extra for start, end, extra in parts]

        cuts = [(*cut, len(blocks)) for cut in combinations(range(1, len(blocks)), stages - 1)]
        best = min(cuts, key=lambda ends: (max(weights(ends)), sum(each**2 for each in weights(ends)), ends))
        assert _even_split(blocks, stages, first, last) == best


def test_a_learned_table_of_positions_weighs_on_the_first_stage_alone():
    words = ["model=llama_tiny", "model.num_layers=6", "model.position=learned", "model.vocab_size=256"]
    model = compose_config([*words, "model.max_sequence_length=8192"]).model
    counts = [len(part.layers) for part in split_layers(model, 3)]
    assert counts[0] == 1  # the table of positions is as large as three blocks
    assert counts == [1, 3, 2]


def test_published_models_are_split_as_published():
    """Llama 3 405B has one layer less on its first and last stage (arXiv 2407.21783, section 3.3.2: 16 stages here)."""
    counts = [len(part.layers) for part in split_layers(compose_config(["model=llama_405b"]).model, 16)]
    assert counts == [7, *[8] * 14, 7]
    counts = [len(part.layers) for part in split_layers(compose_config(["model=gpt3_175b"]).model, 8)]
    assert counts == [12] * 8


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "expected"),
    [("gpipe", 1, [8, 8, 8, 8]), ("1f1b", 1, [4, 3, 2, 1]), ("interleaved_1f1b", 2, [11, 9, 7, 5])],
)
def test_micro_batches_in_flight(schedule, virtual_stages, expected):
    """Of 8 over 4 ranks; an interleaved rank counts each of its stages by itself."""
    config = config_of(f"parallel.schedule={schedule}", f"parallel.virtual_stages={virtual_stages}")
    assert [chunks_in_flight(config.parallel, 4, place, 8) for place in range(4)] == expected


def test_plan_prints_the_stages_and_the_bubble(capsys):
    words = ["model=llama_8b", "parallel=pp", "world=4", "data.global_batch_size=8", *BATCH]
    assert main(["plan", *words]) == 0
    lines = dict(line.strip().split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["pipeline"] == "1f1b, bubble 27.3%, most memory on stage 0"
    assert lines["stages"] == "[embedding, layers 0-6] [layers 7-15] [layers 16-24] [layers 25-31, norm, head]"
    words = ["model=llama_8b", "parallel=pp_interleaved", "world=4", "data.global_batch_size=8", *BATCH]
    assert main(["plan", "--json", *words]) == 0
    facts = json.loads(capsys.readouterr().out)
    pipeline = facts["layout"]["pipeline"]
    assert pipeline["bubble_fraction"] == 3 / 19
    assert [stage["pp_rank"] for stage in pipeline["stages"]] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert sum(last - first + 1 for first, last in (stage["layers"] for stage in pipeline["stages"])) == 32
    assert facts["layout"]["bitwise"] is True
    assert facts["bytes_sent"]["send"] == 8 * 2 * 2048 * 4096 * 4  # of rank 1, which sends both ways
    assert pipeline["peak_memory_pp_rank"] == 1  # as many blocks as others, most of them in its first stage


def test_stages_have_their_part_of_the_persistent_state():
    """Each stage has its own layers' bytes; the largest is the one that `plan` prints."""
    whole = memory_bytes(plan_of(config_of("model=llama_8b", "world=1", "data.global_batch_size=8")))
    staged = memory_bytes(plan_of(config_of("model=llama_8b", "parallel=pp", "world=4", "data.global_batch_size=8")))
    assert whole["parameters"] / 4 < staged["parameters"] < whole["parameters"] / 3.6
    gpipe = memory_bytes(
        plan_of(
            config_of(
                "model=llama_8b", "parallel=pp", "parallel.schedule=gpipe", "world=4", "data.global_batch_size=32"
            )
        )
    )
    one = memory_bytes(plan_of(config_of("model=llama_8b", "parallel=pp", "world=4", "data.global_batch_size=32")))
    assert gpipe["activations"] > 7 * one["activations"]  # 32 in flight, not at most 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["parallel=pp", "data.global_batch_size=2"], ["2 micro-batches per rank and step", "at least pp=4"]),
        (
            ["parallel=pp_interleaved", "data.global_batch_size=6"],
            ["needs a multiple of pp=4. Set it to a multiple of 4"],
        ),
        (["parallel=pp", "model.num_layers=3"], ["pp=4 x virtual_stages=1 makes 4 stages"]),
        (["parallel=pp", "parallel.virtual_stages=2"], ["one stage per rank"]),
        (["parallel=pp", "parallel.schedule=interleaved_1f1b"], ["Set it to 2 or more, or schedule=1f1b"]),
        (["parallel=pp", "parallel.schedule=zbv_zero_bubble"], ["twice, which doubles its gradients"]),
        (["parallel=ddp", "parallel.virtual_stages=2"], ["parallel.pp is 1"]),
        (["parallel=pp", "model.num_layers=2", "data.global_batch_size=1"], ["makes 4 stages", "at least pp=4"]),
        (["parallel=fsdp_pp", "parallel.cp=2"], ["pp=2"]),
    ],
)
def test_pipelines_that_do_not_fit_are_refused_with_the_arithmetic(words, said):
    config = compose_config(["model=llama_tiny", "trainer.devices=4", "data.micro_batch_size=1",
                             "data.global_batch_size=8", *words])  # fmt: skip
    with pytest.raises(ConfigError) as error:
        check_config(config)
    for text in said:
        assert text in str(error.value)


def test_gpipe_takes_any_number_of_micro_batches():
    words = ["parallel=pp", "parallel.schedule=gpipe", "trainer.devices=4", "data.micro_batch_size=1"]
    check_config(compose_config(["model=llama_tiny", "data.global_batch_size=3", *words]))


def test_as_many_micro_batches_and_layers_as_stages_are_enough():
    words = ["parallel=pp", "trainer.devices=4", "data.micro_batch_size=1", "data.global_batch_size=4"]
    check_config(compose_config(["model=llama_tiny", "model.num_layers=4", *words]))


def test_layouts_work_at_two_ranks_per_axis():
    for layout, world in (("pp", 2), ("pp_interleaved", 2), ("fsdp_pp", 4), ("ddp_pp", 4)):
        words = [
            f"parallel={layout}",
            f"trainer.devices={world}",
            "data.micro_batch_size=1",
            "data.global_batch_size=8",
        ]
        config = compose_config(["model=llama_tiny", *words])
        check_config(config)
        assert resolve_degrees(config.parallel, world).pp == 2
        assert plan_facts(plan_of(config))["layout"]["pipeline"]["bubble_fraction"] > 0
