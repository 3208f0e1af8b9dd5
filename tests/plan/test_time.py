"""The seconds of a step against sums by hand, the bytes of `plan.traffic`, bounds, and published ratios."""

import functools
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.plan_time import predicted
from benchmarks.published_steps import ROWS, Published
from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import ClusterConfig, Config
from lightning_llm.model.flops import count_parameters
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.nodes import TREE_SCATTER
from lightning_llm.plan.resolve import plan_of
from lightning_llm.plan.time.describe import RATIOS, published_ratio
from lightning_llm.plan.time.device import Device
from lightning_llm.plan.time.links import Links
from lightning_llm.plan.time.operations import PARTS
from lightning_llm.plan.time.stage import exposed_backward, exposed_forward
from lightning_llm.plan.time.step import NoTimeError, StepTime, StepTimer, no_time, once_beside
from lightning_llm.plan.traffic import sent_at, shards
from lightning_llm.precision.native.decide import shipped_recipes

DOCS = Path(__file__).parent.parent.parent / "docs"
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


def test_a_format_without_a_unit_on_the_device_is_an_error():
    with pytest.raises(ValueError, match="a100 has no unit for fp8"):
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
        (Degrees(dp_shard=2, tp=8), "all_gather", "dp_shard", 9e9 / 50e9 + (14 + 4) * 1e-6),  # on two machines
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
def test_overlap_never_makes_a_step_slower(timeline):
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
"""Collectives once per step; passes only count their time."""


@pytest.mark.parametrize("words", LAYOUTS, ids=" ".join)
def test_passes_send_the_bytes_that_traffic_counts(words):
    """Except collectives once per step, and hidden states, which are timed where a pass waits for them."""
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
            assert own["all_gather", shards()] > 0


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
    """With 16 replicas everything is sent during the last pass; the rest after the embedding is not hidden."""
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
            for kind, axes in once_beside(timer.degrees)
        )
        assert timer.passes[pp_rank].seconds["reductions"] == pytest.approx(whole)


def test_the_librarys_sums_over_replicas_wait_for_the_links_once_per_group(monkeypatch):
    """FSDP2's groups are the blocks, the head (or tied embedding) and the rest; ours are buckets of 25 MiB."""
    begun = {}
    seconds_of = Links.seconds

    def seconds(self, kind, axes, size, times=1):
        begun[kind, axes] = times
        return seconds_of(self, kind, axes, size, times)

    monkeypatch.setattr(Links, "seconds", seconds)
    plan = plan_of(config_of("parallel=hsdp", "parallel.dp_replicate=2", "world=16", "parallel.reduction=native"))
    assert StepTimer(plan, CLUSTER).time.total > 0
    assert begun["all_reduce", "dp_replicate"] == plan.config.model.num_layers + 2
    plan = plan_of(config_of("parallel=ddp", "world=16", "parallel.reduction=tree"))
    timer = StepTimer(plan, CLUSTER)
    assert timer.time.total > 0
    assert begun[TREE_SCATTER, "dp_replicate"] == -(-timer.sent[0][TREE_SCATTER, "dp_replicate"] // (25 * 2**20))


def test_interleaving_speeds_up_as_torchtitan_measured():
    """128 against 100 tokens/s per GPU, table 5 of pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md."""
    words = ["recipe=llama3_405b_3d", "cluster=h100_dgx", "precision=bf16"]
    plain = step_of(*words, "parallel.schedule=1f1b", "parallel.virtual_stages=1")
    assert plain.total / step_of(*words).total == pytest.approx(1.28, rel=0.03)


def test_formats_that_the_device_has_are_timed_on_their_units():
    words = ["model=llama_8b", "parallel=zero3", "world=64", "cluster=h100_dgx", "parallel.reduction=native", *BATCH]
    bf16, fp8 = step_of(*words, "precision=bf16"), step_of(*words, "precision=fp8_current")
    assert fp8.seconds["gemm"] < 0.65 * bf16.seconds["gemm"]
    assert fp8.seconds["memory_bound"] > bf16.seconds["memory_bound"]  # casts
    with pytest.raises(NoTimeError, match=r"the step has no estimated time: emulated \(precision.fprop.x is high"):
        step_of(*words, "precision=mxfp4_sr")


def test_a_mixture_of_formats_has_a_peak_of_its_own():
    """By hand: block linears but those of the first and last block in FP8, the rest and attention's half in bf16."""
    config = config_of("parallel=zero3", "world=64", "precision=fp8_current")
    model, step = config.model, StepTimer(plan_of(config), CLUSTER).time
    recipe = config.precision.modules
    quantized = model.num_layers - recipe.first_blocks_high_precision - recipe.last_blocks_high_precision
    each = count_parameters(model).linear // model.num_layers
    attention = 12 * model.num_layers * model.num_heads * model.attention_head_dim * 4096 / 2
    fp8 = 6 * each * quantized
    bf16 = 6 * each * (model.num_layers - quantized) + 6 * model.vocab_size * model.hidden_size + attention
    assert step.needed.flops == pytest.approx({"fp8": fp8, "bf16": bf16})
    peak = (fp8 + bf16) / (fp8 / 1979e12 + bf16 / PEAK)
    assert step.needed.peak == pytest.approx(peak)
    assert step.mfu == pytest.approx((fp8 + bf16) * step.tokens_per_second / peak)
    assert f"the mixture's peak {peak / 1e12:,.4g} TFLOP/s (" in step.needed.text()


RECIPES = {recipe.name: recipe for recipe in shipped_recipes()}
CLUSTERS = {name: cluster_of(name) for name in ("h100_dgx", "b200_dgx", "a100_dgx", "frontier")}


@functools.cache
def base_of(words: tuple[str, ...]) -> Config:
    return config_of(*words)


@settings(max_examples=60)
@example("bf16", "h100_dgx", ("parallel=cp", "parallel.cp=2", "world=2"), 2**18, 1)  # scores are nearly all there is
@example("fp8_subchannel", "h100_dgx", ("parallel=zero3", "world=16", "parallel.reduction=native"), 2**16, 4)
@example("nvfp4", "b200_dgx", ("parallel=zero3", "world=16", "parallel.reduction=native"), 4096, 4)
@given(
    st.sampled_from(sorted(RECIPES)),
    st.sampled_from(sorted(CLUSTERS)),
    st.sampled_from([tuple(words) for words in LAYOUTS]),
    st.sampled_from([512, 4096, 2**15, 2**18]),
    st.sampled_from([1, 4]),
)
def test_mfu_never_passes_the_peak_that_it_names(recipe, cluster, layout, length, size):
    base = base_of(layout)
    data = base.data.model_copy(update={"sequence_length": length, "micro_batch_size": size})
    made = {"precision": RECIPES[recipe], "cluster": CLUSTERS[cluster], "data": data}
    plan = plan_of(base.model_copy(update=made))
    reason = no_time(plan, CLUSTERS[cluster])
    assert (reason is None) == (plan.decision.runs == "native")
    if reason is not None:
        assert reason == f"{plan.decision.runs} ({plan.decision.reason})"
        with pytest.raises(NoTimeError):
            StepTimer(plan, CLUSTERS[cluster])
        return
    step = StepTimer(plan, CLUSTERS[cluster]).time
    assert 0 < step.mfu <= 1
    assert min(step.needed.peaks.values()) <= step.needed.peak * (1 + 1e-9)
    assert step.needed.peak <= max(step.needed.peaks.values()) * (1 + 1e-9)


def test_an_emulated_plan_has_no_time(capsys):
    """The speeds of native kernels say nothing about it: no second, rate or MFU is printed."""
    words = ["plan", *SMALL, "parallel=zero3", "world=64", "precision=fp8_current", "precision.backend=emulated"]
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    reason = "emulated (precision.backend=emulated asks for it)"
    assert facts["step_seconds"] is None
    assert facts["time"].pop("no_time") == reason
    assert facts["time"].pop("cluster") == "h100_dgx"
    assert set(facts["time"].values()) == {None}
    assert main(words) == 0
    out = capsys.readouterr().out
    assert re.search(rf"^time +no time: {re.escape(reason)}$", out, re.MULTILINE)
    assert not re.search(r"MFU|per step on|tokens/s |hours", out)


def test_a_format_that_a_measured_cluster_lacks_has_no_time():
    config = config_of("parallel=zero3", "world=64", "precision=fp8_current", "cluster.peak_tflops={bf16: 800}")
    assert no_time(plan_of(config), config.cluster) == "cluster.peak_tflops has no fp8, in which GEMMs run"


def test_ratios_of_families_are_those_of_the_published_rows():
    """ZeRO-3 alone here, all of them in the full tests: docs/reference/published_runs.md and plans print them."""
    check_ratios([row for row in ROWS if row.table in ("torchtitan, 1", "torchtitan, 3", "torchtitan, H200")], 1)


@pytest.mark.full
def test_ratios_of_all_families_are_those_of_the_published_rows():
    check_ratios(ROWS, 7)


def check_ratios(rows: Iterable[Published], families: int) -> None:
    found: dict[str, list[float]] = {}
    for row in rows:
        plan = plan_of(compose_config(list(row.words)))
        found.setdefault(published_ratio(plan.config, plan.degrees).family, []).append(row.value / predicted(row)[0])
    assert len(found) == families
    for family, ratios in found.items():
        ratio = RATIOS[family]
        assert len(ratios) == ratio.runs
        expected = [round(each, 2) for each in (min(ratios), median(ratios), max(ratios))]
        assert [ratio.low, ratio.median, ratio.high] == expected


def test_a_plan_prints_times_and_their_assumptions(capsys):
    words = ["plan", *SMALL, "parallel=zero3", "world=64", "trainer.max_steps=1000"]
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    time = facts["time"]
    assert time["cluster"] == "h100_dgx"
    parts = facts["step_seconds"]
    total = parts.pop("total")
    assert total == pytest.approx(sum(parts.values()))
    tokens = 64 * 4096 / 64 / total
    assert time["tokens_per_second"] == pytest.approx(tokens)
    scores = 12 * 16 * 32 * 64 * 4096  # layers, heads and their size, tokens: causal kernels do half
    assert time["mfu"] == pytest.approx((facts["flops_per_token"] - scores / 2) * tokens / PEAK)
    assert time["run_hours"] == pytest.approx(1000 * total / 3600)
    assert facts["hardware"]["name"] == "h100"
    assert facts["layout"]["ranks_per_node"] == 8
    assert not facts["layout"]["ranks_per_node_assumed"]
    assert time["published"]["family"] == "ZeRO-3 alone"
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "per step on h100_dgx at best" in out
    assert f"MFU {time['mfu']:.1%} of the bf16 peak 989.5 TFLOP/s" in out
    assert f"{time['run_hours']:,.4g} hours for 1,000 steps at best, {64 * time['run_hours']:,.4g} device hours" in out
    assert "8 published runs reached 0.44-0.48 of the predicted speed, median 0.46 (ZeRO-3 alone)" in out
    assert main(["plan", *SMALL, "cluster=none", "--json"]) == 0
    without = json.loads(capsys.readouterr().out)
    assert without["step_seconds"] is without["time"] is None
    assert main(["plan", *SMALL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config_hash"] == without["config_hash"]


def test_the_documents_name_every_key_and_show_commands_that_plan(capsys):
    pages = "howto/plan_a_large_run.md", "reference/plan_output.md"
    guide, text = ((DOCS / page).read_text(encoding="utf-8") for page in pages)
    quick = r"^lightning-llm (plan (?!.*--(?:dry-run|search)).*)$"  # the others take minutes
    commands = re.findall(quick, guide + text, re.MULTILINE)
    assert len(commands) >= 6
    for command in commands:
        assert main(shlex.split(command, comments=True)) == 0, command
        out = capsys.readouterr().out
    facts, named = json.loads(out), set(re.findall(r"`([a-z_.]+)`", text))
    assert facts["memory_bytes"].keys() | {"memory_bytes", "memory_peak", "bytes_sent"} <= named
    assert {f"step_seconds.{part}" for part in (*PARTS, "total")} <= named
    assert {f"{group}.{key}" for group in ("time", "traffic_bytes") for key in facts[group]} <= named
    assert facts["step_seconds"].keys() - {"total"} <= set(PARTS)
