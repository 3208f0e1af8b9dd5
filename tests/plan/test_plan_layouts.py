"""Layouts in `plan`: groups, bits, and bytes against the formulas of ZeRO and published figures. 8 seconds.

tests/parallel/test_bytes.py compares the same formulas with the bytes that ranks hold and send.
"""

import json
import math
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.plan.describe import layout_facts, layout_rows
from lightning_llm.plan.memory.rank_bytes import memory_bytes
from lightning_llm.plan.report import plan_facts, render
from lightning_llm.plan.resolve import plan_of
from lightning_llm.plan.traffic import bytes_sent

LAYOUTS = sorted(file.stem for file in (Path(__file__).parents[2] / "conf" / "parallel").glob("*.yaml"))
RANKS = 64
PSI = 8_030_261_248  # llama_8b: its vocabulary needs no padding, and 64 divides its rows
LOOKUP = 128_256 * 4096  # its embedding, and its head
NORM = 4096
BLOCK = (PSI - 2 * LOOKUP - NORM) // 32


@cache
def composed(layout: str, precision: str) -> Config:
    return compose_config(
        ["model=llama_8b", f"parallel={layout}", f"precision={precision}", "data.sequence_length=2048"]
    )


def config_of(
    layout: str, precision: str = "bf16", world: int = RANKS, micro_batches: int = 1, **keys: object
) -> Config:
    """Return a config of so many micro-batches of one sequence per data-parallel rank; `keys` are of `parallel`.

    Sums are the tree's unless `keys` say otherwise.
    """
    config, keys = composed(layout, precision), {"reduction": "tree", **keys}
    batch = {"micro_batch_size": 1, "global_batch_size": world * micro_batches}
    parts = {"data": config.data.model_copy(update=batch), "parallel": config.parallel.model_copy(update=keys)}
    return config.model_copy(update={"world": world, **parts})


@pytest.mark.parametrize(
    ("layout", "world", "ranks"),
    [("single", 1, 1), ("ddp", 64, 1), ("zero1", 64, 64), ("zero2", 64, 64), ("zero3", 64, 64), ("hsdp", 64, 32)],
)
def test_persistent_state_is_sharded_as_in_the_zero_paper(layout, world, ranks):
    """arXiv 1910.02054, section 5: of fp32 masters and moments, 12 Psi, each rank has 1 / N_d; so of the sum."""
    held = memory_bytes(plan_of(config_of(layout, world=world)))
    assert held["parameters"] + held["optimizer"] == 12 * PSI // ranks
    assert held["gradients"] == 4 * PSI // ranks


@pytest.mark.parametrize("layout", ["zero1", "zero2"])
def test_sixteen_bit_weights_are_whole_below_stage_3(layout):
    held = memory_bytes(plan_of(config_of(layout, "bf16")))
    assert held["gathered"] == 2 * PSI + 2 * (LOOKUP + NORM)  # embedding and last norm in fp32
    assert held["compute_copies"] == 2 * NORM


def test_stage_3_gathers_two_blocks_head_and_root_or_first_the_embedding():
    assert memory_bytes(plan_of(config_of("zero3", "fp32")))["gathered"] == 4 * (2 * BLOCK + LOOKUP + NORM)
    assert memory_bytes(plan_of(config_of("zero3", "bf16")))["gathered"] == 4 * (LOOKUP + NORM) + 2 * BLOCK


def test_only_zero_1_keeps_unsharded_gradients():
    """P_os keeps the gradients of a step on every rank (section 5.1); P_os+g does not (5.2)."""
    for layout, whole in (("ddp", 0), ("zero1", 4 * PSI), ("zero2", 0), ("zero3", 0)):
        assert memory_bytes(plan_of(config_of(layout, micro_batches=2)))["unsharded_gradients"] == whole
        assert memory_bytes(plan_of(config_of(layout)))["unsharded_gradients"] == 0


@pytest.mark.parametrize(("micro_batches", "buffers"), [(1, 0), (2, 0), (4, 1), (8, 2), (64, 5)])
def test_the_tree_costs_log2_of_the_accumulation(micro_batches, buffers):
    for layout, each in (
        ("ddp", 4 * PSI),
        ("zero1", 4 * PSI),
        ("zero2", 4 * PSI // RANKS),
        ("zero3", 4 * PSI // RANKS),
    ):
        tree, native = (
            memory_bytes(plan_of(config_of(layout, micro_batches=micro_batches, reduction=reduction)))
            for reduction in ("tree", "native")
        )
        assert tree["tree_gradients"] == buffers * each
        assert native["tree_gradients"] == 0


@pytest.mark.parametrize("reduction", ["tree", "native"])
def test_a_step_sends_the_elements_of_the_zero_paper(reduction):
    """arXiv 1910.02054, section 7: 2 Psi for DDP, P_os and P_os+g, 3 Psi for P_os+g+p, times (N_d - 1) / N_d."""

    def sent(layout, micro_batches=1):
        config = config_of(layout, "fp32", micro_batches=micro_batches, reduction=reduction)
        return sum(bytes_sent(plan_of(config)).values())

    psi = 4 * PSI * (RANKS - 1) // RANKS
    assert sent("ddp") == sent("ddp", 8) == sent("zero1") == sent("zero1", 8) == sent("zero2") == 2 * psi
    assert sent("zero2", 8) == 9 * psi  # a scatter per micro-batch, one gather
    kept = 4 * (2 * LOOKUP + NORM) * (RANKS - 1) // RANKS  # gathered once per micro-batch
    assert sent("zero3") == 3 * psi - kept
    assert sent("zero3", 8) == 8 * (3 * psi - kept)


def test_hsdp_sends_shards_between_replicas():
    """FSDP's hybrid sharding (arXiv 2304.11277, section 3.2.2): a gradient shard is all-reduced over the replicas."""
    within, shards = RANKS // 2, 4 * PSI // (RANKS // 2)
    native = bytes_sent(plan_of(config_of("hsdp", micro_batches=4, reduction="native")))
    assert native["all_reduce"] == 2 * shards // 2
    assert native["reduce_scatter"] == 4 * (within - 1) * shards
    tree = bytes_sent(plan_of(config_of("hsdp", micro_batches=4)))
    assert sum(tree.values()) == sum(native.values())


def test_checkpointing_keeps_less():
    """Of a block its input, 2 s b h in 16 bit (Korthikanti et al., arXiv 2205.05198), or also what GEMMs gave."""
    sbh = 2048 * 4096

    def held(checkpoint, every=1):
        config = config_of("zero3", activation_checkpoint=checkpoint, activation_checkpoint_every=every)
        return memory_bytes(plan_of(config))

    none, full = held("none"), held("full")
    around = full["activations"] - 32 * 2 * sbh  # tokens, rotary tables, the last norm's and the head's inputs
    block = (none["activations"] - around) // 32
    assert around == 2048 * (8 + 4 * 128 + 2 * 4096 + 4 + 2 * 4096)
    norms, q, kv = 2 * (2 * 4096 + 4), 4096, 2 * 1024  # their inputs, and the roots in fp32
    saved = norms + 2 * (4096 + q + kv + q + 4096 + 4 * 14336) + 4 * 32
    assert block == 2048 * saved
    assert held("full", every=3)["activations"] == around + 11 * 2 * sbh + 21 * block
    assert full["backward"] - none["backward"] == block  # the one that is being recomputed
    outputs = 4096 + 2 * 1024 + 4096 + 4096 + 2 * 14336 + 4096  # q, k and v, attention, o, gate and up, down
    assert held("selective")["activations"] == around + 32 * (2 * sbh + 2048 * (2 * outputs + 4 * 32))


def test_groups_are_those_that_megatron_publishes():
    """`parallel_state.initialize_model_parallel`: 16 GPUs, TP 2, PP 4."""
    facts = layout_facts(plan_of(config_of("zero1", world=16, tp=2, pp=4)))
    assert (facts["pp"], facts["dp_replicate"], facts["dp_shard"], facts["cp"], facts["tp"]) == (4, 1, 2, 1, 2)
    groups = facts["groups"]
    assert list(groups) == ["pp", "dp_shard", "tp"]
    assert groups["pp"]["ranks"] == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    assert groups["tp"]["ranks"] == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert dict(layout_rows(facts))["  dp_shard"] == "8 groups of 2: [0 2] [1 3] [4 6] [5 7] ..."
    assert facts["micro_batches_per_rank"] == 8


def test_a_large_world_is_shortened():
    facts = layout_facts(plan_of(config_of("hsdp", world=1024, dp_replicate=4)))
    shards, replicas = facts["groups"]["dp_shard"], facts["groups"]["dp_replicate"]
    assert (shards["count"], shards["size"], shards["stride"]) == (4, 256, 1)
    assert shards["ranks"][1] == list(range(256, 256 + 64))
    assert (replicas["count"], replicas["ranks"][0]) == (256, [0, 256, 512, 768])
    assert len(replicas["ranks"]) == 4
    rows = dict(layout_rows(facts))
    assert rows["  dp_shard"] == "4 groups of 256: [0 1 .. 255] [256 257 .. 511] [512 513 .. 767] [768 769 .. 1023]"
    assert len(json.dumps(facts)) < 4000


def test_all_axes_at_once_are_planned_but_sequences_over_stages(capsys):
    words = ["model=llama_8b", "parallel=zero3", "world=64", "parallel.tp=2", "parallel.pp=4"]
    words += ["data.micro_batch_size=1", "data.global_batch_size=32"]
    assert main(["plan", "--json", *words]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["layout"]["dp_shard"], facts["layout"]["micro_batches_per_rank"]) == (8, 4)
    assert facts["layout"]["bitwise"] is False
    assert main(["plan", *words, "world=60"]) == 2  # what does not multiply is no layout
    assert "needs a multiple of 8 ranks" in capsys.readouterr().err
    assert main(["plan", *words, "parallel.cp=2"]) == 2
    assert "stages need whole sequences" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layout", "keys", "micro_batches", "reason"),
    [
        ("single", {}, 4, None), ("ddp", {}, 4, None), ("zero3", {}, 3, None), ("hsdp", {}, 4, None),
        ("ddp", {}, 3, "not a power of two"), ("zero2", {"reduction": "native"}, 1, "reduction=native"),
        ("zero1", {"tp": 2}, 1, "tp=2 changes the order"), ("ddp", {"compile": True}, 4, None),
        ("zero3", {"compile": True}, 4, "compiled blocks round differently"),
    ],
)  # fmt: skip
def test_plans_report_whether_bits_equal_those_of_one_rank(layout, keys, micro_batches, reason):
    config = config_of(layout, world=1 if layout == "single" else 8, micro_batches=micro_batches, **keys)
    facts = layout_facts(plan_of(config))
    assert facts["bitwise"] is (reason is None)
    assert (reason or "") in (facts["bitwise_problem"] or "")
    assert (reason or "equal one rank's") in dict(layout_rows(facts))["  bits"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_a_plan(layout):
    config = config_of(layout, world=1 if layout == "single" else 8, activation_checkpoint="full")
    facts = json.loads(json.dumps(plan_facts(plan_of(config))))
    parallel = plan_of(config).parallel
    for key in ("name", "zero_stage", "reduction", "activation_checkpoint", "activation_checkpoint_every", "compile"):
        assert facts["layout"][key] == getattr(parallel, key)
    degrees = [facts["layout"][axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]
    assert facts["layout"]["world"] == math.prod(degrees)
    assert facts["memory_bytes"] == memory_bytes(plan_of(config))
    lines = dict(line.split(maxsplit=1) for line in render(facts).splitlines())
    assert lines["layout"].startswith(f"{layout}, {facts['layout']['world']} rank")
    assert lines["memory"].startswith(f"{facts['memory_bytes']['total'] / 2**30:.3f} GiB per rank at most, in ")
    assert sum(facts["memory_peak"]["bytes"].values()) == facts["memory_bytes"]["total"]


def test_a_large_plan_needs_no_torch(tmp_path):
    words = [
        "world=1024",
        "model=llama_405b",
        "parallel=hsdp",
        "data.micro_batch_size=1",
        "data.global_batch_size=1024",
    ]
    code = (
        f"import sys\nfrom lightning_llm.__main__ import main\nmain(['plan', *{words!r}, 'run.root={tmp_path}'])\n"
        "print(sorted({'torch', 'lightning', 'mlflow', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "hsdp, 1024 ranks: dp_replicate=2 x dp_shard=512, ZeRO-3" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
