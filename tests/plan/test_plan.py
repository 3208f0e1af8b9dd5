"""The plan against its recipe, and its bytes against the memory and the files of a run. 10 seconds."""

import json
from pathlib import Path
from typing import get_args

import pytest
import torch

from lightning_llm.__main__ import main
from lightning_llm.base.hardware import describe_device
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema.precision import CastConfig, LossScalingConfig, PrecisionConfig, slots_of
from lightning_llm.config.schema.run import Hardware
from lightning_llm.optim.kinds import state_bytes
from lightning_llm.plan.memory.rank_bytes import memory_bytes
from lightning_llm.plan.memory.units import units_of
from lightning_llm.plan.report import notes, plan_facts, plan_line, render
from lightning_llm.plan.resolve import DerivedConfig, plan_of
from lightning_llm.precision.describe import precision_facts
from lightning_llm.precision.native.decide import DEVICES, HARDWARE, decide
from lightning_llm.train.checkpoint import saver

RECIPES = sorted(file.stem for file in (Path(__file__).parents[2] / "conf" / "precision").glob("*.yaml"))
NOT_DEFAULT = {
    "format": "e4m3", "scale": "delayed", "rounding": "stochastic", "noise_bits": 8, "amax_scope": "shard",
    "delayed": {"history_length": 16, "algorithm": "most_recent", "margin": 2},
}  # fmt: skip


LINEARS = [f"layers.{index}.feed_forward.down_proj" for index in range(4)]


def cast_of(facts: dict) -> CastConfig:
    """Read a slot of `plan --json` back."""
    keys = {key: value for key, value in facts.items() if key not in ("runs", "reason")}
    return CastConfig.model_validate(keys | {"format": keys["format"] if "block" in keys else "high"}, strict=False)


def as_json(recipe: PrecisionConfig) -> dict:
    return json.loads(json.dumps(precision_facts(recipe, decide(recipe, DEVICES["cpu"]), LINEARS, 4)))


@pytest.mark.parametrize("name", RECIPES)
def test_every_cast_can_be_read_back_from_the_slot_table(name):
    recipe = compose_config([f"precision={name}"]).precision
    facts = as_json(recipe)
    assert {slot: cast_of(each) for slot, each in facts["slots"].items()} == slots_of(recipe)
    for number, phase in enumerate(facts["phases"]):
        changed = {slot: cast_of(each) for slot, each in phase["slots"].items()}
        assert slots_of(recipe) | changed == slots_of(recipe.in_phase(number))
    assert len(facts["phases"]) == len(recipe.phases)
    scaling = facts["loss_scaling"]
    assert (scaling and LossScalingConfig(**scaling)) == recipe.loss_scaling
    assert (facts["master_dtype"], facts["main_grad_dtype"]) == (recipe.master_dtype, recipe.main_grad_dtype)


def own(**keys: object) -> PrecisionConfig:
    return PrecisionConfig.model_validate({"name": "own", "compute_dtype": "bf16", **keys})


def test_keys_that_no_shipped_recipe_sets_are_shown():
    recipe = own(
        fprop={"x": NOT_DEFAULT, "w": {"format": "e4m3"}},
        dgrad={"w": {"source": "quantised"}},
        optimizer={"eps": 1e-6, "beta2": 0.98},
    )
    facts = as_json(recipe)
    slots = facts["slots"]
    assert {slot: cast_of(each) for slot, each in slots.items()} == slots_of(recipe)
    assert slots["dgrad.w"]["source"] == "quantised"
    assert (slots["dgrad.w"]["runs"], slots["dgrad.dy"]["runs"]) == ("emulated", "native")
    assert facts["optimizer"] == {"eps": 1e-6, "beta2": 0.98}
    config = compose_config([]).model_copy(update={"precision": recipe})
    lines = dict(line.split(maxsplit=1) for line in render(plan_facts(plan_of(config))).splitlines())
    assert lines["fprop.x"] == (
        "e4m3 tensor, delayed scale, stochastic, noise_bits=8, amax_scope=shard, "
        "delayed=(history_length=16, algorithm=most_recent, margin=2): emulated"
    )
    assert lines["dgrad.w"] == "bf16, source=quantised: emulated"
    assert lines["dgrad.dy"] == "bf16"


def test_the_text_has_loss_scaling_hints_and_rotations(small_run, tmp_path, capsys):
    words = small_run(tmp_path, "precision=fp16_mxfp8", "precision.optimizer.beta2=0.97")
    assert main(["plan", *words]) == 0
    text = capsys.readouterr().out
    assert "growth_interval=2000, hysteresis=1, min_scale=1.0, detect=operands" in text
    assert "beta2=0.97, in place of optim's" in text
    assert main(["plan", *small_run(tmp_path, "precision=nvfp4", "model.ffn_hidden_size=64")]) == 0
    text = capsys.readouterr().out
    assert "noise_bits=8, hadamard=(size=16, signs=fixed, vector=+++-+------+-+--, round_to=bf16): emulated" in text


def test_a_phase_shows_the_slots_that_differ_and_no_other():
    e4m3 = {"format": "e4m3"}
    both = {"x": e4m3, "w": e4m3}
    recipe = own(
        fprop=both,
        phases=[{"start": 0.25, "end": 0.505, "fprop": both, "dgrad": {"dy": {"format": "e5m2"}}}, {"start": 0.9}],
    )
    first, last = as_json(recipe)["phases"]
    assert (first["start"], first["end"], list(first["slots"])) == (0.25, 0.505, ["dgrad.dy"])
    assert first["slots"]["dgrad.dy"]["format"] == "e5m2"
    assert (last["end"], list(last["slots"])) == (1.0, ["fprop.x", "fprop.w"])
    config = compose_config([]).model_copy(update={"precision": recipe})
    lines = render(plan_facts(plan_of(config))).splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("  phase"))
    assert [line.split(maxsplit=1)[0] for line in lines[start : start + 5]] == [
        "phase", "dgrad.dy", "phase", "fprop.x", "fprop.w",
    ]  # fmt: skip
    assert "from 25% to 50.5% of the steps, these slots differ" in lines[start]
    assert lines[start + 4].split() == ["fprop.w", "bf16"]


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16_true"])
def test_bytes_are_those_in_memory_and_on_disk(name, small_run, tmp_path, monkeypatch):
    held: dict[str, int] = {}

    def bytes_of(tensors):
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def measure_and_take(module, optimizer):
        if module.completed_steps == 2:  # a validation lets go of the gradients
            parameters = list(module.model.parameters())
            moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
            held.update(
                parameters=bytes_of(parameters),
                gradients=bytes_of(parameter.grad for parameter in parameters),
                optimizer=bytes_of(moments),
            )
        return take(module, optimizer)

    take = saver.take
    monkeypatch.setattr(saver, "take", measure_and_take)
    shape = ["model.hidden_size=128", "model.ffn_hidden_size=192"]
    words = small_run(tmp_path, f"precision={name}", "trainer.max_steps=3", *shape)
    assert main(["train", *words]) == 0
    config = compose_config(words)
    estimate = memory_bytes(plan_of(config))
    assert {kind: estimate[kind] for kind in held} == held
    folder = tmp_path / "run" / "checkpoints" / "step=3"
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    state = state_bytes(units_of(config.model).shards(1), config.optim, config.chosen_algorithm, config.precision)
    assert written == pytest.approx(state.checkpoint, rel=0.1)  # headers and step counts


OUTSIDE_1B = 128_256 * 2048 + (2 * 16 + 1) * 2048
"""Of llama_1b's weights those of no linear: the tied embedding and norms."""


@pytest.mark.parametrize(
    ("name", "copied"),
    [("fp32", 0), ("bf16", 1_235_814_400), ("bf16_true", 0), ("fp16", OUTSIDE_1B), ("mxfp8", OUTSIDE_1B)],
)
def test_weights_are_copied_only_into_another_dtype(name, copied):
    """A linear that emulates its casts keeps its master, which it casts again: on a CPU all do in fp16."""
    config = compose_config(["model=llama_1b", f"precision={name}"])
    assert memory_bytes(plan_of(config))["compute_copies"] == 2 * copied


def test_the_first_line_of_a_run_names_the_device_as_its_records_do():
    cpu = torch.device("cpu")
    assert plan_line(plan_of(compose_config([])), describe_device(cpu)).endswith(f" | {describe_device(cpu)}")


def test_native_casts_are_decided_for_the_planned_hardware(capsys):
    """As `decide` does for that compute capability, independent of this machine."""
    words = ["plan", "--json", "recipe=llama3_8b_fsdp2", "model.head_dim=128"]
    for recipe, hardware, runs in (
        ("fp8_current", "h100", "native"),
        ("fp8_current", "a100", "emulated"),
        ("mxfp8", "h100", "emulated"),
        ("mxfp8", "b200", "native"),
    ):
        assert main([*words, f"precision={recipe}", f"hardware={hardware}"]) == 0
        assert json.loads(capsys.readouterr().out)["precision"]["runs"] == runs, (recipe, hardware)
    assert set(HARDWARE) == set(get_args(Hardware))


def test_a_plan_of_many_ranks_notes_the_hardware_that_it_assumes(capsys):
    words = ["plan", "model=llama_8b", "parallel=zero3", "world=512", "precision=mxfp8", "data.global_batch_size=2048"]
    assert main(words) == 0
    assert "native or emulated is decided for this machine (cpu); hardware=h100" in capsys.readouterr().out
    assert main([*words, "hardware=b200"]) == 0
    out = capsys.readouterr().out
    assert "decided for this machine" not in out
    assert "native: " in out


@pytest.mark.parametrize("hardware", [None, "cpu", "b200"])
def test_native_casts_of_a_run_are_decided_for_the_device_it_starts_on(hardware):
    """And the message does not suggest another device, which is for `plan`."""
    words = ["precision=mxfp8", "trainer.accelerator=cpu", "parallel=ddp", "world=2"]  # two machines of one rank
    config = compose_config([*words, f"hardware={hardware or 'null'}"])
    found = DerivedConfig(config, to_train=True)
    assert found.decision.runs == "emulated"
    said = [line for line in notes(found.plan(), to_train=True) if "hardware" in line]
    expected = "note   hardware=b200 is for `plan`: casts run as this machine's device (cpu) allows"
    assert said == ([expected] if hardware == "b200" else [])


BIG = ["plan", "--json", "model=llama_8b", "precision=bf16", "data.sequence_length=8192", "data.micro_batch_size=2"]
CHECKPOINTING = "parallel.activation_checkpoint"
WHOLE = ["parallel.zero_stage=3", "parallel.dp_replicate=1", "parallel.dp_shard=null"]


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        (["parallel=zero3", "world=64", "hardware=b200"], None),
        (["parallel=zero3", "world=64", "hardware=h100"], ["parallel.activation_checkpoint=selective"]),
        (["parallel=ddp", "world=64", "hardware=h200"], [*WHOLE]),
        (["parallel=ddp", "world=64", "hardware=h100"], [*WHOLE, "parallel.activation_checkpoint=selective"]),
        (["parallel=single", "hardware=l4"], []),
    ],
)
def test_a_plan_reports_whether_it_fits_and_a_change_that_makes_it_fit(words, overrides, capsys):
    """The suggested change works: its plan fits, with the printed bytes."""
    words = [*BIG, "data.global_batch_size=128", *words]
    assert main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    hardware = facts["hardware"]
    needed = facts["memory_bytes"]["total"]
    assert hardware["spare_bytes"] == hardware["memory_bytes"] - needed
    assert hardware["fits"] == (hardware["spare_bytes"] >= 0) == (overrides is None)
    assert main([words[0], *words[2:]]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("hardware ")]
    if not overrides:
        assert hardware["change"] is None
        assert row.endswith(" GiB to spare" if overrides is None else "; try more ranks, parallel.tp or parallel.pp")
        return
    change = hardware["change"]
    assert change["overrides"] == overrides
    assert (
        f"does not fit, {-hardware['spare_bytes'] / 2**30:.1f} GiB missing; {' '.join(change['overrides'])} would"
        in row
    )
    assert main([*words, *change["overrides"]]) == 0
    changed = json.loads(capsys.readouterr().out)
    assert changed["hardware"]["fits"]
    assert changed["memory_bytes"]["total"] == change["memory_bytes"]


def test_unknown_devices_have_no_memory(capsys):
    assert main([*BIG, "data.global_batch_size=128", "parallel=zero3", "world=64"]) == 0
    assert json.loads(capsys.readouterr().out)["hardware"] == {
        "name": "cpu", "devices": 64, "memory_bytes": None, "fits": None, "spare_bytes": None, "change": None,
        "faster": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        ([f"{CHECKPOINTING}=full"], [f"{CHECKPOINTING}=none"]),
        ([f"{CHECKPOINTING}=full", "data.micro_batch_size=4"], [f"{CHECKPOINTING}=selective"]),
        (["data.micro_batch_size=1"], ["data.micro_batch_size=2"]),
        (["data.micro_batch_size=1", "data.global_batch_size=24"], ["data.micro_batch_size=3"]),
        (["data.micro_batch_size=1", "hardware=cpu"], None),
    ],
)
def test_a_plan_with_free_memory_suggests_a_faster_change_that_fits(words, overrides, capsys):
    """Suggestions work: less recomputation, or else micro-batches as large as fit, up to all that a rank has."""
    words = [*BIG, "data.global_batch_size=128", "parallel=zero3", "world=8", "hardware=b200", *words]
    assert main(words) == 0
    hardware = json.loads(capsys.readouterr().out)["hardware"]
    if overrides is None:
        assert hardware["faster"] is None
        return
    assert hardware["faster"]["overrides"] == overrides
    assert main([*words, *overrides]) == 0
    changed = json.loads(capsys.readouterr().out)
    assert changed["hardware"]["fits"]
    assert changed["memory_bytes"]["total"] == hardware["faster"]["memory_bytes"]
    assert main([words[0], *words[2:]]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("hardware ")]
    assert f" GiB to spare; {overrides[0]} also fits, at " in row


@pytest.mark.parametrize("more", [[], ["schedule=constant"], ["schedule.total_steps=1000"]])
def test_a_warm_up_longer_than_the_run_is_noted_for_every_schedule(more):
    def said(warmup: int) -> bool:
        words = ["recipe=quickstart", "trainer.max_steps=60", *more, f"schedule.warmup_steps={warmup}"]
        return any(
            "still rising when the run ends" in line for line in notes(plan_of(compose_config(words)), to_train=False)
        )

    assert [said(100), said(60), said(59)] == [True, True, False]


def test_mixtures_that_push_twice_or_drop_choices_at_equal_loads_are_noted():
    keys = ["router.bias_update_rate=0.001", "capacity_factor=0.5"]
    words = ["model=moe_tiny", *(f"model.blocks.moe.feed_forward.{key}" for key in keys)]
    found = "\n".join(notes(plan_of(compose_config(words)), to_train=False))
    assert "router.bias_update_rate=0.001 and balance_loss=0.01 both push" in found
    assert "capacity_factor=0.5 drops at least 0.5 of all choices" in found
    assert "push" not in "\n".join(notes(plan_of(compose_config(words[:1])), to_train=False))
