"""Bytes sent within and between machines, against a count of every transfer; consequences for
`parallel.reduction`."""

import itertools
import json
from collections import Counter

import pytest

from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.config.yaml_file import write_config
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.nodes import TREE_SCATTER, ranks_per_node, reduction_note, share_between_nodes, tree_factor
from lightning_llm.plan.resolve import plan_of
from lightning_llm.plan.traffic import bytes_sent, sent_at, traffic_bytes

PSI = 8_030_261_248  # llama_8b's parameters
ZERO3 = ["model=llama_8b", "parallel=zero3", "data.micro_batch_size=1", "world=128", "data.global_batch_size=128"]
FSDP_TP = ["parallel=fsdp_tp", "parallel.tp=8", "world=128", "trainer.devices=8"]


def transfers(ranks: list[int], kind: str, size: float, per_node: int) -> Counter[tuple[int, int]]:
    """Return the bytes on each link of a collective in which each rank sends `size` bytes, transfer by transfer."""
    links: Counter[tuple[int, int]] = Counter()
    if kind == TREE_SCATTER:
        return two_stages(ranks, per_node, size)
    if kind == "all_to_all":
        for one, other in itertools.permutations(ranks, 2):
            links[one, other] += size / (len(ranks) - 1)
        return links
    for _ in range(len(ranks) - 1):  # of a reduce-scatter or all-gather: R - 1 chunks go to the next rank
        for place, rank in enumerate(ranks):
            links[rank, ranks[(place + 1) % len(ranks)]] += size / (len(ranks) - 1)
    return links


def two_stages(ranks: list[int], per_node: int, size: float) -> Counter[tuple[int, int]]:
    """Return the links of the tree's reduce-scatter, shard by shard: each goes from every rank of a machine to the one
    that has its owner's place there, and from that one to the owner."""
    machines = [list(group) for _, group in itertools.groupby(ranks, key=lambda rank: rank // per_node)]
    links: Counter[tuple[int, int]] = Counter()
    for owner in ranks:
        (place,) = [machine.index(owner) for machine in machines if owner in machine]
        for machine in machines:
            for rank in machine:
                links[rank, machine[place]] += (rank != machine[place]) * size / (len(ranks) - 1)
            links[machine[place], owner] += (machine[place] != owner) * size / (len(ranks) - 1)
    return links


@pytest.mark.parametrize("kind", ["all_to_all", "reduce_scatter", "all_gather", TREE_SCATTER])
@pytest.mark.parametrize("axes", [["dp_shard"], ["dp_shard", "cp"], ["dp_replicate"], ["tp"], ["pp"]])
@pytest.mark.parametrize("per_node", [1, 4, 8, 64])
def test_the_share_between_machines_is_that_of_every_transfer(kind, axes, per_node):
    degrees = Degrees(pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=2)
    links: Counter[tuple[int, int]] = Counter()
    for ranks in degrees.groups(*axes):
        links += transfers(ranks, kind, 1.0, per_node)
    between = sum(size for (one, other), size in links.items() if one // per_node != other // per_node)
    assert share_between_nodes(degrees, axes, kind, per_node) == pytest.approx(between / sum(links.values()))


def test_stages_send_between_machines_where_they_lie_on_two():
    degrees = Degrees(pp=4, tp=4)
    assert share_between_nodes(degrees, ["pp"], "send", 8) == 1 / 3  # stages 0 and 1 on one machine, 2 and 3 on another
    assert share_between_nodes(degrees, ["pp"], "send", 4) == 1
    assert share_between_nodes(degrees, ["pp"], "send", 16) == 0


def test_the_tree_sends_what_a_ring_does_between_machines_of_eight():
    """Of fp32 gradients of S bytes over R ranks, 16 machines of 8 send S 15 / 16 each, S (R - 1) / R by a ring; where 6
    of 96 ranks are no subtree 6 S 15 / 16 (figures of docs/explanation/same_bits.md)."""

    def of_gradients(reduction, *more):
        plan = plan_of(compose_config([*ZERO3, f"parallel.reduction={reduction}", *more]))
        per_node = ranks_per_node(plan.config)
        gathers = bytes_sent(plan)["all_gather"] / per_node  # of rings: one of a machine's ranks sends to another
        return per_node * (traffic_bytes(plan)["between_nodes"] - gathers)

    gradients = 4 * PSI
    assert of_gradients("tree") == pytest.approx(gradients * 15 / 16, rel=1e-6)
    assert of_gradients("native") == pytest.approx(gradients * 127 / 128, rel=1e-6)
    at_once = plan_of(compose_config([*ZERO3, "parallel.reduction=tree"]))
    times = tree_factor(at_once.config, at_once.degrees, "all_to_all")
    assert times * of_gradients("native") == pytest.approx(8 * gradients * 120 / 128, rel=1e-6)
    assert round(times * of_gradients("native") / 1e9) == 241
    six = ["world=96", "data.global_batch_size=96", "trainer.devices=6"]
    assert of_gradients("tree", *six) == pytest.approx(6 * gradients * 15 / 16, rel=1e-2)  # rows are padded
    assert (round(of_gradients("tree") / 1e9), round(of_gradients("native") / 1e9)) == (30, 32)


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        (["world=128"], "native"),
        (["world=8"], "tree"),
        (["world=16", "trainer.devices=16"], "tree"),
        (["world=16", "trainer.devices=4"], "native"),
        (["world=128", "parallel.reduction=tree"], "tree"),
        (["world=8", "parallel.reduction=native"], "native"),
        (["parallel=tp", "world=8", "trainer.devices=4"], "tree"),  # no gradient is summed over machines
        (["parallel=fsdp_pp", "world=16", "trainer.devices=8"], "tree"),  # nor here: a stage is on one machine
        (["parallel=fsdp_pp", "world=32", "trainer.devices=8"], "native"),
        # One rank of each group on a machine: the tree sends as much as a ring; with 4 micro-batches a sum waits, too.
        ([*FSDP_TP, "data.global_batch_size=32"], "tree"),
        ([*FSDP_TP, "data.global_batch_size=64"], "native"),
        (["parallel=hsdp", "parallel.dp_replicate=2", "world=16", "data.global_batch_size=16"], "tree"),
        (["parallel=hsdp", "parallel.dp_replicate=4", "world=16", "data.global_batch_size=16"], "native"),
    ],
)
def test_auto_reduction_depends_on_the_layout(words, chosen):
    config = compose_config([*ZERO3, "data.global_batch_size=1024", *words])
    assert plan_of(config).config.parallel.reduction == chosen


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["parallel=ddp", "world=16"],
        ["parallel=hsdp", "parallel.dp_replicate=4", "world=32"],
        ["parallel=zero1", "world=16", "data.global_batch_size=64"],
        ["parallel=fsdp_tp", "parallel.tp=4", "world=32"],
    ],
)
def test_auto_reduction_decides_by_the_counted_traffic(words):
    def between(reduction):
        plan = plan_of(compose_config([*ZERO3, *words, f"parallel.reduction={reduction}"]))
        counted = sum(
            size * share_between_nodes(plan.degrees, axes.split(), kind, 8)
            for (kind, axes), size in sent_at(plan.config, plan.degrees, 0).items()
            if axes != "tp" and (kind != "all_gather" or axes == "dp_replicate")  # gathers of weights, and activations
        )
        return counted, tree_factor(plan.config, plan.degrees)

    (tree, factor), (native, _) = between("tree"), between("native")
    assert factor == pytest.approx(tree / native, rel=1e-3)  # but for rows that are padded


@pytest.mark.full
def test_the_plan_notes_the_reduction_and_its_cost(capsys):
    assert main(["plan", *ZERO3]) == 0
    out = capsys.readouterr().out
    assert "native reduction" in out
    assert "over 16 machines of 8 ranks (assumed) (parallel.reduction=native)" in out.replace("by the library ", "")
    assert main(["plan", *ZERO3, "parallel.reduction=tree", "trainer.devices=8"]) == 0
    out = capsys.readouterr().out
    assert "sends 0.945 times as much of them between machines" in out
    assert "(in two stages: 8 ranks on a machine first, then between machines)" in out
    assert "(of 8 ranks)" in out
    assert main(["plan", *ZERO3, "world=12", "data.global_batch_size=12", "trainer.devices=6"]) == 0
    assert "tree, with sums that do not depend on the number of ranks, would send 3.27 times" in (
        out := capsys.readouterr().out
    )
    assert "not a power of two on every machine" in out
    assert main(["plan", "recipe=llama3_405b_3d"]) == 0  # a machine has one rank of each group that sums
    out = capsys.readouterr().out
    assert "would send as much of them between machines, and keep 2 partial sums" in out
    memory = out[out.index("memory  ") : out.index("sent  ")].splitlines()
    assert "  unsharded_gradients " in out
    assert len({len(line) - len(line.split(maxsplit=1)[1]) for line in memory}) == 1  # one column
    assert main(["plan", "--json", *ZERO3]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert sum(facts["traffic_bytes"].values()) == sum(facts["bytes_sent"].values())
    assert facts["layout"]["ranks_per_node_assumed"] is True


def test_there_is_no_reduction_note_within_a_machine():
    for words in (["world=8"], ["parallel=single", "world=1"], ["parallel=tp", "world=8"]):
        plan = plan_of(compose_config([*ZERO3, "data.global_batch_size=1024", *words]))
        assert reduction_note(plan.config, plan.degrees) is None


def test_a_runs_config_holds_the_reduction_that_it_took(tmp_path):
    """So that its file repeats the run, and a plan has the identity of the run."""
    config = plan_of(compose_config([*ZERO3, "trainer.devices=8"])).config
    write_config(config, tmp_path / "config.yaml")
    assert "reduction: native" in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("degrees", "axes", "kind", "per_node", "share"),
    [
        (Degrees(dp_shard=2, tp=8), ["tp"], "all_gather", 8, 0.0),
        (Degrees(dp_shard=24), ["dp_shard"], "all_gather", 8, 3 / 24),  # a ring enters each of three machines once
        (Degrees(dp_shard=24), ["dp_shard"], "all_to_all", 8, 16 / 23),
        (Degrees(dp_shard=24), ["dp_shard"], TREE_SCATTER, 8, 2 / 23),
        (Degrees(dp_shard=12), ["dp_shard"], TREE_SCATTER, 6, 6 / 11),  # 6 are no subtree: each sends its own
        (Degrees(pp=6), ["pp"], "send", 4, 1 / 5),
    ],
)
def test_the_share_between_machines_is_counted_over_all_ranks(degrees, axes, kind, per_node, share):
    assert share_between_nodes(degrees, axes, kind, per_node) == pytest.approx(share)
