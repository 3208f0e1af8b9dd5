"""The search against every layout priced one by one; its output, files and refusals. 40 seconds."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.plan.check import config_problems
from lightning_llm.plan.memory.rank_bytes import memory_bytes
from lightning_llm.plan.resolve import DerivedConfig, plan_of
from lightning_llm.plan.search import SearchResult, pareto_front, search
from lightning_llm.plan.search.pricing import Pricer
from lightning_llm.plan.search.space import Space, divisors, typed_values
from lightning_llm.plan.time.step import StepTimer

TIGHT = ["model=llama_3b", "cluster=h100_dgx", "world=2", "data.sequence_length=4096", "data.global_batch_size=8"]
"""Of which about half do not fit 80 GiB."""
TINY = ["model=llama_tiny", "cluster=h100_dgx", "world=4", "data.global_batch_size=8"]


def searched(words: list[str], **keywords: bool) -> tuple[SearchResult, Pricer]:
    config = compose_config(words)
    assert config.world is not None
    assert config.cluster is not None
    pricer = Pricer(Space(config, config.world, typed_values(words, config)), config.cluster)
    return search(pricer, **keywords), pricer


def every_layout(config: Config, world: int):
    """Yield every legal config of the keys that a search varies, without the bounds of its space."""
    axes = [
        axes for axes in product(divisors(world), repeat=5) if axes[0] * axes[1] * axes[2] * axes[3] * axes[4] == world
    ]
    schedules = [("1f1b", 1), ("gpipe", 1), *(("interleaved_1f1b", stages) for stages in range(2, 15))]
    for degrees, zero_stage, schedule, mode, size in product(
        axes, range(4), schedules, ("none", "selective", "full"), divisors(config.data.global_batch_size)
    ):
        keys = dict(zip(("pp", "dp_replicate", "dp_shard", "cp", "tp"), degrees, strict=True))
        if keys["pp"] == 1 and schedule != ("1f1b", 1):
            continue
        keys |= {"zero_stage": zero_stage, "schedule": schedule[0], "virtual_stages": schedule[1]}
        made = config.model_copy(
            update={
                "parallel": config.parallel.model_copy(update=keys | {"activation_checkpoint": mode}),
                "data": config.data.model_copy(update={"micro_batch_size": size}),
            }
        )
        if not config_problems(DerivedConfig(made)):
            yield made


@pytest.mark.full
def test_the_fastest_is_the_fastest_of_all_layouts():
    found, pricer = searched(TIGHT)
    assert pricer.limit_bytes is not None
    times, fitting, legal = [], 0, 0
    for config in every_layout(compose_config(TIGHT), 2):
        plan = plan_of(config)
        legal += 1
        if memory_bytes(plan)["total"] <= pricer.limit_bytes:
            fitting += 1
            times.append(StepTimer(plan, config.cluster).time.total)
    assert found.fitting[0].seconds == pytest.approx(min(times))
    assert legal > found.counts["considered"]
    assert fitting >= found.counts["fitting"] > 0


def test_every_layout_of_the_space_is_priced_as_its_plan_is():
    words = [*TIGHT, "parallel.cp=1", "data.micro_batch_size=2"]
    found, pricer = searched(words, every=True)
    fitting = {priced.choice: priced for priced in found.fitting}
    for choice in pricer.space.choices():
        plan = plan_of(pricer.space.config_of(choice))
        held = memory_bytes(plan)["total"]
        assert (held <= pricer.limit_bytes) == (choice in fitting), choice
        if choice in fitting:
            assert fitting[choice].memory_bytes == held
            assert fitting[choice].seconds == StepTimer(plan, pricer.cluster).time.total
    assert 0 < len(fitting) == found.counts["fitting"]
    assert 0 < found.counts["too_large"] == found.counts["considered"] - found.counts["fitting"]
    best = {}  # what recomputes least of what fits is the fastest: the only one that a plain search times
    for choice, priced in fitting.items():
        alike = choice._replace(activation_checkpoint="")
        best[alike] = min(best.get(alike, priced), priced, key=lambda each: each.seconds)
    plain, _ = searched(words)
    assert sorted(each.choice for each in plain.fitting) == sorted(each.choice for each in best.values())


@pytest.mark.parametrize(
    ("words", "every"),
    [
        ([*TINY, "precision=bf16", "model.num_layers=8"], 13),
        ([*TINY, "model=gla_tiny", "precision=fp32"], 17),
        ([*TIGHT, "precision=fp8_subchannel", "world=4", "parallel.reduction=native", "parallel.cp=1"], 59),
    ],
)
def test_bounds_are_below_seconds_and_bytes_of_layouts(words, every):
    """A layout that is left out by them could not have been found."""
    config = compose_config(words)
    pricer = Pricer(Space(config, 4, {}), config.cluster)
    legal = [each for each in pricer.space.choices() if not pricer.problems(pricer.space.config_of(each))]
    assert pricer.no_time(legal[0]) is None
    kinds = set()
    for choice in legal[::every]:
        priced = pricer.memory(choice)
        assert pricer.bounds.held_bytes(choice) <= priced.memory_bytes, choice
        if pricer.no_time(choice) is None:
            assert pricer.bounds.seconds(choice) <= pricer.timed(priced).seconds * (1 + 1e-9), choice
            kinds |= {(choice.pp > 1, choice.tp > 1), choice.schedule, choice.activation_checkpoint}
    assert {(True, False), (False, True), "interleaved_1f1b", "1f1b", "full", "selective", "none"} <= kinds


LARGE = ["model=llama_70b", "cluster=h100_dgx", "world=128", "data.global_batch_size=512", "data.sequence_length=4096"]


@pytest.mark.full
def test_a_search_over_128_devices_prices_few_layouts():
    """Without bounds it priced 2,089 and timed 746 (a4e23397); a part of it in the default tests."""
    found, pricer = searched([*LARGE, "parallel.tp=2", "parallel.cp=1", "parallel.schedule=1f1b"])
    assert found.counts["considered"] > 300
    assert pricer.counts["timed"] <= found.counts["considered"] / 4
    assert pricer.counts["priced"] <= found.counts["considered"] / 3


@pytest.mark.full
def test_a_whole_search_over_128_devices_prices_few_layouts():
    found, pricer = searched(LARGE)
    assert found.counts["considered"] == 4350
    assert pricer.counts["timed"] <= 300
    assert pricer.counts["priced"] <= 650


FP8 = [*TINY, "precision=fp8_current", "data.sequence_length=512", "parallel.pp=1", "data.micro_batch_size=1"]


MIXED = [*FP8, "precision.wgrad.dy.amax_scope=shard"]


def test_emulated_layouts_have_no_time_and_rank_behind_all_others(capsys):
    """Two casts of one tensor with different amax_scope are native but under tp and cp (docs/reference/native.md)."""
    assert main(["plan", *MIXED, "--search", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    native = [each["overrides"]["parallel.tp"] * each["overrides"]["parallel.cp"] == 1 for each in facts["layouts"]]
    assert native == sorted(native, reverse=True)
    assert {True, False} == set(native)
    for each, runs in zip(facts["layouts"], native, strict=True):
        assert (each["no_time"] is None) == runs == (each["seconds"] is not None) == (each["mfu"] is not None)
        assert runs or each["no_time"].startswith("emulated (parallel.")
    assert facts["counts"]["emulated"] > native.count(False) > 0
    assert main(["plan", *MIXED, "--search"]) == 0
    out = capsys.readouterr().out
    assert "no time: emulated (parallel.tp=2: must be 1, because the two casts of dY have different amax_scope" in out
    assert "MFU is relative to the mixture's peak" in out
    assert "assumed    h100 at its data sheet's peaks (bf16 989.5, fp8 1979 TFLOP/s)" in out
    fastest = next(line for line in out.splitlines() if line.startswith("the fastest: "))
    assert "parallel.tp=1" in fastest
    assert "parallel.cp=1" in fastest


def test_where_all_layouts_are_emulated_none_is_the_fastest(tmp_path, capsys):
    words = ["plan", *FP8, "precision=mxfp8", "parallel.tp=2", "--search"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "no time: emulated (MXFP8BlockScaling needs compute capability >= 10.0" in out
    assert "the fastest" not in out
    assert main([*words, "--write", str(tmp_path / "parallel" / "x.yaml")]) == 2
    assert "--write: needs a layout with a known step time" in capsys.readouterr().err
    assert not (tmp_path / "parallel").exists()


def test_families_have_the_ratios_of_published_runs(capsys):
    """As ratios differ by family, a search that compares families prints them."""
    words = ["plan", "model=llama_8b", "cluster=h100_dgx", "world=16", "data.global_batch_size=16", "parallel.cp=1"]
    words += ["data.sequence_length=4096", "data.micro_batch_size=1", "parallel.activation_checkpoint=selective"]
    assert main([*words, "parallel.zero_stage=3", "--search", "--json"]) == 0
    ratios = {each["layout"]: each["published"] for each in json.loads(capsys.readouterr().out)["layouts"]}
    alone, shared = (
        ratios["dp 16, ZeRO-3, selective recomputation, micro-batch 1"],
        ratios["tp 4, dp 4, ZeRO-3, selective recomputation, micro-batch 1"],
    )
    assert (alone["low"], alone["high"]) == (0.44, 0.48)
    assert shared["low"] > alone["high"]


def test_the_pareto_front_has_the_layouts_that_no_other_beats():
    found, _ = searched([*TINY, "parallel.cp=1"], every=True)
    front = pareto_front(found.fitting)

    def beaten(one):
        return any(
            other.seconds <= one.seconds and other.memory_bytes <= one.memory_bytes
            and (other.seconds, other.memory_bytes) != (one.seconds, one.memory_bytes)
            for other in found.fitting
        )  # fmt: skip

    expected = {(each.seconds, each.memory_bytes) for each in found.fitting if not beaten(each)}
    assert {(each.seconds, each.memory_bytes) for each in front} == expected


def test_keys_of_the_command_line_are_not_varied(capsys):
    words = [*TINY, "parallel.tp=2", "data.micro_batch_size=1", "parallel.activation_checkpoint=full"]
    assert main(["plan", *words, "--search", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kept"] == {"tp": 2, "micro_batch_size": 1, "activation_checkpoint": "full"}
    chosen = [each["overrides"] for each in facts["layouts"]]
    assert {each["parallel.tp"] for each in chosen} == {2}
    assert len(chosen) > 3
    assert {(each["data.micro_batch_size"], each["parallel.activation_checkpoint"]) for each in chosen} == {(1, "full")}


@pytest.mark.parametrize(
    ("words", "batch"),
    [
        (["world=2048"], 2048),
        (["world=6", "data.micro_batch_size=3"], 18),
        (["world=2"], None),  # the default, 4, is a multiple of it
        (["world=8", "data.global_batch_size=16"], None),
        (["world=16", "recipe=quickstart", "model=llama_tiny", "parallel=single", "parallel.pp=2"], None),
    ],
)
def test_a_search_without_a_batch_plans_with_one_sequence_per_rank(words, batch, tmp_path, capsys):
    fixed = ["parallel.tp=1", "parallel.cp=1", "parallel.activation_checkpoint=none"]
    words = ["plan", "cluster=h100_dgx", *fixed, *(["parallel.pp=1"] if "parallel.pp=2" not in words else []), *words]
    file = tmp_path / "parallel" / "best.yaml"
    assert main([*words, "--search", "--json", "--write", str(file)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["batch_note"] is None) == (batch is None)
    assert {each["overrides"].get("data.global_batch_size") for each in facts["layouts"]} == {batch}
    assert (f"data.global_batch_size={batch}" in facts["words"]) == (batch is not None)
    if batch:
        assert f"data.global_batch_size was not given: planned with {batch:,} sequences" in facts["batch_note"]
        assert main([*words, "--config-dir", str(tmp_path), *facts["words"], "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["step_seconds"]["total"] == pytest.approx(facts["layouts"][0]["seconds"])


def test_a_written_layout_file_has_the_found_plan_and_trains(tmp_path, small_run, capsys):
    file, picture = tmp_path / "mine" / "parallel" / "best.yaml", tmp_path / "front.svg"
    words = [*TINY, "data.sequence_length=128", "parallel.cp=1", "parallel.tp=2", "data.micro_batch_size=2"]
    assert main(["plan", *words, "--search", "--write", str(file), "--pareto", str(picture), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert picture.read_text().lstrip().startswith("<?xml")
    again = ["--config-dir", str(tmp_path / "mine")]
    assert main(["plan", *words, *facts["words"], *again, "--json"]) == 0
    plan, best = json.loads(capsys.readouterr().out), facts["layouts"][0]
    assert plan["memory_bytes"]["total"] == best["memory_bytes"]
    assert plan["step_seconds"]["total"] == pytest.approx(best["seconds"])
    keys = {key.removeprefix("parallel."): value for key, value in best["overrides"].items() if "parallel" in key}
    assert {key: plan["layout"][key] for key in ("pp", "dp_replicate", "dp_shard", "cp", "tp")} == {
        key: keys[key] for key in ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    }
    assert main(["plan", *words, "--search", "--write", str(file)]) == 2  # it is there
    assert "--force" in capsys.readouterr().err
    one = [*small_run(tmp_path, "cluster=h100_dgx", "trainer.max_steps=1", "schedule.warmup_steps=0")]
    assert main(["plan", *one, "--search", "--planner", "galvatron", "--write", str(file), "--force", "--json"]) == 0
    words = json.loads(capsys.readouterr().out)["words"]
    assert main(["train", *one, *words, *again]) == 0


def test_recomputing_by_block_changes_no_loss(tmp_path, small_run, capsys):
    losses = []
    for name, modes in (("none", "null"), ("some", "[full,selective]")):
        words = small_run(tmp_path / name, "trainer.max_steps=2", f"parallel.activation_checkpoint_layers={modes}")
        assert main(["train", *words]) == 0
        lines = (tmp_path / name / "run" / "metrics.jsonl").read_text().splitlines()
        losses.append([each["loss"] for each in map(json.loads, lines) if "loss" in each])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--search", "model=llama_tiny", "world=8"], "Set cluster=h100_dgx"),
        (["--search", *TINY, "world=7"], "is 7, and no layout has that many ranks: "),
        (
            ["--search", *TINY, "parallel.tp=3"],
            "parallel.tp=3: must divide world=4. Set it to one of 1, 2,",
        ),
        (
            ["--search", *TINY, "parallel.tp=4", "parallel.cp=1"],
            "parallel.tp=4: must divide model.num_heads",
        ),
        (
            ["--search", *TINY, "parallel.pp=8"],
            "parallel.pp=8: must divide world=4. Set it to one of 1, 2, 4",
        ),
        (["--search", *TINY, "parallel.dp_shard=3"], "parallel.dp_shard=3: must divide world=4."),
        (
            ["--search", *TINY, "data.micro_batch_size=3"],
            "data.micro_batch_size=3: no layout of world=4 has it.",
        ),
        (
            ["--search", *TINY, "parallel.dp_shard=2", "parallel.zero_stage=0"],
            "parallel.zero_stage=0: no layout of world=4 has it with parallel.dp_shard=2. Set it to one",
        ),
        (
            ["--search", *TINY, "parallel.activation_checkpoint_layers=[full]"],
            "parallel.activation_checkpoint_layers: has 1 entries: must have one per block, model.num_layers=4.",
        ),
        (["--search", *TINY, "--matrix"], "--search: cannot be used with --matrix"),
        (["--search", *TINY, "--write", "best.yaml"], "must be DIR/parallel/NAME.yaml"),
        (["--search", *TINY, "--write", "mine/parallel/zero3.yaml"], "parallel=zero3 is a shipped layout"),
        (["--search", *TINY, "--write", "/dev/null/parallel/best.yaml"], "cannot be created"),
        (["--search", *TINY, "--planner", "pipette", "--pareto", "x.svg"], "--pareto: plots every layout that fits"),
        (["--search", *TINY, "--accounting", "megatron"], "--search: cannot be used with --accounting"),
        (["--search", *TINY, "--pareto", "front.jpg"], "must end with .png or .svg"),
        (["--search", *TINY, "--links", "links.yaml"], "--planner pipette"),
        (["--planner", "galvatron"], "Add --search"),
        (["--search", *TINY, "data.sequence_length=100000"], "model.max_sequence_length"),
    ],
)
def test_invalid_searches_are_refused(words, told, capsys):
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert told.startswith("is ") or "world: " not in error  # it is not blamed for typed keys


def test_too_large_layouts_report_missing_bytes_and_a_change_that_fits(capsys):
    assert main(["plan", *TIGHT, "parallel.tp=1", "parallel.cp=1", "parallel.pp=1", "--search", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    nearest = facts["too_large"]
    assert len(nearest) == 3
    for each in nearest:
        words = [f"{key}={value}" for key, value in each["overrides"].items()]
        assert main(["plan", *TIGHT, *words, "--json"]) == 0
        held = json.loads(capsys.readouterr().out)["memory_bytes"]["total"]
        assert held == each["memory_bytes"] == facts["limit_bytes"] + each["missing_bytes"]


def test_where_nothing_fits_the_nearest_are_shown_and_refused(capsys):
    words = ["model=llama_70b", "cluster=h100_dgx", "world=2", "data.global_batch_size=2", "data.micro_batch_size=1"]
    assert main(["plan", *words, "--search"]) == 2
    told = capsys.readouterr()
    assert "too large, nearest first:" in told.out
    assert " too much" in told.out
    assert "world=2: no layout of that many ranks fits in memory" in told.err


def test_the_search_needs_no_torch(tmp_path: Path):
    words = ["plan", *TINY, "parallel.pp=1", "parallel.tp=1", "data.micro_batch_size=2", "--search"]
    code = (
        f"import sys\nfrom lightning_llm.__main__ import main\nmain({words!r})\n"
        "print(sorted({'torch', 'lightning', 'mlflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[]"
