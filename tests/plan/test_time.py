"""The seconds of a step against sums by hand, the bytes of `plan.traffic`, bounds, and published ratios."""

import json
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import ClusterConfig, Config
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.nodes import TREE_SCATTER
from lightning_llm.plan.resolve import plan_of
from lightning_llm.plan.time.cost import PARTS
from lightning_llm.plan.time.device import Device
from lightning_llm.plan.time.links import Links
from lightning_llm.plan.time.stage import exposed_backward, exposed_forward
from lightning_llm.plan.time.step import ONCE_BESIDE, StepTime, StepTimer
from lightning_llm.plan.traffic import SHARDS, sent_at

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "plan.md"
BATCH = ["data.micro_batch_size=1", "data.global_batch_size=64", "data.sequence_length=4096"]
SMALL = ["model=llama_1b", "cluster=h100_dgx", "precision=bf16", *BATCH]
PEAK = 989.5e12


def config_of(*words: str) -> Config:
    return compose_config([*SMALL, *words])


def cluster_of(name: str = "h100_dgx", *words: str) -> ClusterConfig:
    return compose_config([f"cluster={name}", *words]).cluster


CLUSTER = cluster_of()


def step_of(*words: str) -> StepTime:
    config = compose_config(list(words))
    return StepTimer(plan_of(config), config.cluster).time


def test_a_gemm_of_one_wave_runs_at_the_peak_and_one_tile_more_takes_another():
    device, rows, columns, summed = Device(CLUSTER), 12 * 256, 11 * 128, 8192
    one = device.gemm_seconds(rows, columns, summed, "bf16")  # a tile for each of 132 multiprocessors
    assert one == pytest.approx(2 * rows * columns * summed / PEAK)
    two = device.gemm_seconds(2 * rows, columns, summed, "bf16")
    assert one < device.gemm_seconds(rows + 1, columns, summed, "bf16") < two
    assert two == pytest.approx(2 * one)


def test_a_thin_gemm_takes_what_its_weight_takes_to_read():
    device = Device(CLUSTER)
    assert device.gemm_seconds(1, 8192, 8192, "bf16") == pytest.approx(2 * (8192**2 + 2 * 8192) / 3350e9)


def test_a_unit_that_the_device_lacks_is_an_error():
    with pytest.raises(ValueError, match="a100 multiplies no fp8"):
        Device(cluster_of("a100_dgx")).gemm_seconds(128, 128, 128, "fp8")


@given(*(st.integers(1, 20_000) for _ in range(3)), st.sampled_from(["bf16", "fp8"]))
def test_no_gemm_beats_the_roofline(rows, columns, summed, number_format):
    device = Device(CLUSTER)
    width, peak = {"bf16": (2, PEAK), "fp8": (1, 1979e12)}[number_format]
    seconds = device.gemm_seconds(rows, columns, summed, number_format)
    assert seconds >= 2 * rows * columns * summed / peak * (1 - 1e-12)
    assert seconds >= (width * summed * (rows + columns) + 2 * rows * columns) / 3350e9 * (1 - 1e-12)


@pytest.mark.parametrize(
    ("degrees", "kind", "axes", "seconds"),
    [
        # 450 GB/s within, 50 between, 14 us to start, 1.9 and 4 us a hop
        (Degrees(tp=8), "all_gather", "tp", 9e9 / 450e9 + (14 + 7 * 1.9) * 1e-6),
        (Degrees(tp=8), "all_reduce", "tp", 9e9 / 450e9 + (14 + 2 * 7 * 1.9) * 1e-6),
        # two machines of eight: each rank's NIC carries an eighth of the ring's bytes, and NVLink all of them
        (Degrees(dp_shard=16), "all_gather", "dp_shard", 9e9 / 400e9 + (14 + 14 * 1.9 + 4) * 1e-6),
        # one rank on each of two machines
        (Degrees(dp_shard=2, tp=8), "all_gather", "dp_shard", 9e9 / 50e9 + (14 + 4) * 1e-6),
        # to each of 15 others as much, 8 of them on the other machine
        (Degrees(dp_shard=16), "all_to_all", "dp_shard", 9e9 * 8 / 15 / 50e9 + (14 + 4) * 1e-6),
        # the same in two: 7 of 15 to each of 8 on the machine, then an eighth of the whole to the other one
        (Degrees(dp_shard=16), TREE_SCATTER, "dp_shard", 9e9 / 15 * (14 / 450e9 + 1 / 50e9) + 2 * (14 + 4) * 1e-6),
        (Degrees(dp_shard=8), TREE_SCATTER, "dp_shard", 9e9 / 450e9 + (14 + 1.9) * 1e-6),
        (Degrees(pp=2, tp=8), "send", "pp", 9e9 / 50e9 + (14 + 4) * 1e-6),
        (Degrees(pp=8), "send", "pp", 9e9 / 450e9 + (14 + 1.9) * 1e-6),
        (Degrees(tp=1), "all_gather", "tp", 0.0),
    ],
)
def test_collectives_take_what_their_slowest_link_takes(degrees, kind, axes, seconds):
    assert Links(CLUSTER, degrees, min(8, degrees.world)).seconds(kind, axes, 9e9) == pytest.approx(seconds)


def test_two_dies_of_a_package_are_closer():
    links = Links(cluster_of("frontier"), Degrees(dp_shard=4, tp=2), 8)
    assert links.seconds("all_gather", "tp", 1e9) == pytest.approx(1e9 / 200e9 + 15.9e-6)
    assert links.seconds("all_gather", "dp_shard", 1e9) == pytest.approx(1e9 / 50e9 + (14 + 3 * 1.9) * 1e-6)


def test_gathers_hide_behind_the_computation_before_them():
    assert exposed_forward([(1.0, 2.0), (1.0, 2.0), (3.0, 2.0)], overlap=True) == 1.0 + 0.0 + 1.0
    assert exposed_forward([(1.0, 2.0), (1.0, 2.0), (3.0, 2.0)], overlap=False) == 5.0


def test_reductions_hide_behind_the_computation_after_them():
    backward = [(0.0, 2.0, 1.0), (1.0, 2.0, 1.0), (1.0, 2.0, 1.0)]
    assert exposed_backward(backward, overlap=True, tail=1.0) == (0.0, 1.0)
    assert exposed_backward(backward, overlap=True, tail=0.0) == (0.0, 0.0)
    assert exposed_backward(backward, overlap=False, tail=1.0) == (2.0, 3.0)


@given(st.lists(st.tuples(*(st.floats(0, 10) for _ in range(3))), min_size=1, max_size=8))
def test_overlap_saves_time_and_takes_none(timeline):
    forward = [(gather, seconds) for gather, seconds, _ in timeline]
    assert -1e-9 <= exposed_forward(forward, True) <= exposed_forward(forward, False) + 1e-9
    together, apart = (sum(exposed_backward(timeline, overlap, 1.0)) for overlap in (True, False))
    assert -1e-9 <= together <= apart + 1e-9


LAYOUTS = [
    ["parallel=zero3", "world=16", "parallel.reduction=native"],
    ["parallel=zero3", "world=16", "parallel.reduction=tree"],
    ["parallel=zero2", "world=8"],
    ["parallel=zero1", "world=8"],
    ["parallel=ddp", "world=16", "parallel.reduction=tree"],
    ["parallel=hsdp_tp", "parallel.dp_replicate=2", "world=16"],
    ["parallel=fsdp_cp_tp", "world=16", "parallel.activation_checkpoint=full"],
    ["parallel=tp", "parallel.tp=4", "world=4", "parallel.activation_checkpoint=selective"],
    ["parallel=tp", "parallel.tp=4", "world=4", "parallel.sequence_parallel=false"],
    ["parallel=cp", "parallel.cp=2", "world=2"],
    ["parallel=fsdp_pp_tp", "world=16"],
    ["parallel=pp_interleaved", "world=4", "parallel.activation_checkpoint=full"],
]
AFTER = {
    (TREE_SCATTER, "dp_replicate"), ("all_gather", "dp_replicate"), ("all_reduce", "dp_replicate"),
    ("all_reduce", "tp"), ("broadcast", "tp"), ("all_reduce", "cp"),
}  # fmt: skip
"""What ranks send once per step, of which passes count the time alone."""


@pytest.mark.parametrize("words", LAYOUTS, ids=" ".join)
def test_passes_send_the_bytes_that_traffic_counts(words):
    """But what is sent once per step, and hidden states, which are timed where a pass waits for them."""
    plan = plan_of(config_of(*words))
    timer = StepTimer(plan, plan.config.cluster)
    for pp_rank in range(plan.degrees.pp):
        total, own = sent_at(plan.config, plan.degrees, pp_rank), timer.passes[pp_rank].sent
        rest = Counter({key: size - own[key] for key, size in total.items()})
        assert {key for key, size in rest.items() if size} - {("send", "pp")} <= AFTER
        assert min(rest.values()) >= 0
        assert own.keys() <= total.keys()
        if plan.degrees.tp > 1:
            assert own["all_gather", "tp"] + own["all_reduce", "tp"] > 0
        if "parallel=zero3" in words:
            assert own["all_gather", SHARDS] > 0


@pytest.mark.parametrize("words", LAYOUTS, ids=" ".join)
def test_a_step_is_its_parts_and_faster_on_faster_machines(words):
    plan = plan_of(config_of(*words))
    step = StepTimer(plan, CLUSTER).time
    assert step.total == pytest.approx(sum(step.seconds.values()))
    assert 0 < step.mfu < 1
    assert 0 <= step.bubble_fraction < 1
    assert min(step.seconds.values()) > 0
    faster = CLUSTER.within_node.model_copy(update={"gb_per_second": 900.0})
    slower = CLUSTER.between_nodes.model_copy(update={"gb_per_second": 25.0})
    for change, sign in (
        ({"memory_gb_per_second": 6700.0}, 1),
        ({"within_node": faster}, 1),
        ({"between_nodes": slower}, -1),
        ({"overlap": False}, -1),
        ({"operator_microseconds": 10.0}, -1),
    ):
        other = StepTimer(plan, CLUSTER.model_copy(update=change)).time.total
        assert sign * other <= sign * step.total * (1 + sign * 1e-9), change


def test_sums_over_replicas_hide_behind_the_last_backward_pass():
    """Of 16 replicas all is sent by the last pass; what it does not hide is what is left when the embedding is done."""
    plan = plan_of(config_of("parallel=ddp", "world=16", "parallel.reduction=tree"))
    timer = StepTimer(plan, CLUSTER.model_copy(update={"overlap": False}))
    sent = timer.sent[0][TREE_SCATTER, "dp_replicate"]
    assert sent == timer.sent[0]["all_gather", "dp_replicate"]
    buckets = -(-sent // (25 * 2**20))
    both = [timer.links.seconds(kind, "dp_replicate", sent, buckets) for kind in (TREE_SCATTER, "all_gather")]
    assert timer.time.seconds["reductions"] == pytest.approx(sum(both))
    hidden = StepTimer(plan, CLUSTER).time.seconds["reductions"]
    assert sum(both) / 18 < hidden < sum(both)  # root, embedding, 16 blocks and the head: a 19th each, the last is bare


def test_the_stages_of_a_rank_share_its_sums_over_replicas():
    """Two stages of a rank each hide and send a half: all is sent once, however the layers are cut."""
    words = ["parallel=pp_interleaved", "parallel.dp_replicate=2", "world=8", "parallel.reduction=tree"]
    plan = plan_of(config_of(*words))
    timer = StepTimer(plan, CLUSTER.model_copy(update={"overlap": False}))
    for pp_rank, parts in enumerate(timer.parts):
        assert len(parts) == 2
        sent = timer.sent[pp_rank]
        assert sent[TREE_SCATTER, "dp_replicate"] > 0
        whole = sum(
            timer.links.seconds(kind, axes, sent[kind, axes], -(-sent[kind, axes] // (25 * 2**20)))
            for kind, axes in ONCE_BESIDE
        )
        assert timer.passes[pp_rank].seconds["reductions"] == pytest.approx(whole)


def test_interleaving_pays_as_torchtitan_measured():
    """128 against 100 tokens/s per GPU, table 5 of pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md."""
    words = ["recipe=llama3_405b_3d", "cluster=h100_dgx"]
    plain = step_of(*words, "parallel.schedule=1f1b", "parallel.virtual_stages=1")
    assert plain.total / step_of(*words).total == pytest.approx(1.28, rel=0.03)


def test_formats_that_the_device_has_are_timed_on_their_units():
    words = ["model=llama_8b", "parallel=zero3", "world=64", "cluster=h100_dgx", "parallel.reduction=native", *BATCH]
    bf16, fp8 = step_of(*words, "precision=bf16"), step_of(*words, "precision=fp8_current")
    assert fp8.seconds["gemm"] < 0.65 * bf16.seconds["gemm"]
    assert fp8.seconds["memory_bound"] > bf16.seconds["memory_bound"]  # casts
    fp4 = step_of(*words, "precision=mxfp4_sr")  # no unit on an H100
    assert fp4.seconds["gemm"] == bf16.seconds["gemm"]


def test_a_plan_prints_times_and_what_they_rest_on(capsys):
    words = ["plan", *SMALL, "parallel=zero3", "world=64", "precision=fp8_current", "precision.backend=emulated"]
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    time = facts["time"]
    assert time["cluster"] == "h100_dgx"
    parts = facts["step_seconds"]
    total = parts.pop("total")
    assert total == pytest.approx(sum(parts.values()))
    tokens = 64 * 4096 / 64 / total
    assert time["tokens_per_second"] == pytest.approx(tokens)
    assert time["mfu"] == pytest.approx(facts["flops_per_token"] * tokens / PEAK)
    assert facts["hardware"]["name"] == "h100"
    assert facts["layout"]["ranks_per_node"] == 8
    assert not facts["layout"]["ranks_per_node_assumed"]
    assert any("casts as if native, on fp8 units" in each for each in time["assumed"])
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "per step on h100_dgx at best" in out
    assert f"{time['mfu']:.1%} MFU" in out
    assert main(["plan", *SMALL, "cluster=none", "--json"]) == 0
    without = json.loads(capsys.readouterr().out)
    assert without["step_seconds"] is without["time"] is None
    assert main(["plan", *SMALL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config_hash"] == without["config_hash"]


def test_the_document_names_every_key_and_shows_commands_that_plan(capsys):
    text = DOCUMENT.read_text(encoding="utf-8")
    commands = re.findall(r"^lightning-llm (plan .*)$", text, re.MULTILINE)
    commands = [command for command in commands if not re.search("--dry-run|--search", command)]  # minutes
    assert len(commands) >= 2
    for command in commands:
        assert main(shlex.split(command, comments=True)) == 0, command
        out = capsys.readouterr().out
    facts, named = json.loads(out), set(re.findall(r"`([a-z_.]+)`", text))
    assert facts["memory_bytes"].keys() | {"memory_bytes", "memory_peak", "bytes_sent"} <= named
    assert {f"step_seconds.{part}" for part in (*PARTS, "total")} <= named
    assert {f"{group}.{key}" for group in ("time", "traffic_bytes") for key in facts[group]} <= named
    assert facts["step_seconds"].keys() - {"total"} <= set(PARTS)
