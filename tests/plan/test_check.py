"""Refusals before anything heavy is imported: a recipe that would convert nothing, a disk that is too small."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.model.decoder import Decoder
from lightning_llm.plan.check import check_config
from lightning_llm.plan.checkpoints import disk_facts, disk_notes, disk_problems
from lightning_llm.precision.linear.swap import swap_linears

ROOT = Path(__file__).parents[2]
LATE = "precision.phases=[{start: 0.5, fprop: {x: {format: e4m3}, w: {format: e4m3}}}]"


def problems_of(config):
    try:
        check_config(config)
    except ConfigError as error:
        return error.problems
    return []


def test_a_glob_for_norms_or_attention_is_refused_with_the_reason_also_where_it_is_all_there_is():
    config = compose_config(["precision=mxfp8", "precision.modules.include=['*.attention', '*_norm']"])
    nothing, attention, norms = problems_of(config)
    assert "would quantize none of" in nothing.text
    assert {attention.key, norms.key} == {"precision.modules.include"}
    assert "'*.attention', which matches no linear layer. It names attention itself" in attention.text
    assert "'*_norm', which matches no linear layer. It names norms" in norms.text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["precision=mxfp8", "precision.modules.exclude=['*']"], "modules.exclude has '*'"),
        (["precision=mxfp8", "precision.modules.include=['*.w1']"], "nothing in modules.include matches it"),
        (["precision=mxfp8", "precision.modules.include=['head']"], "nothing in modules.include matches it"),
        (
            ["precision=fp8_current", "model.num_layers=2"],
            "first_blocks_high_precision=1; modules.last_blocks_high_precision=1",
        ),
        (
            ["precision=mxfp8", "precision.modules.first_blocks_high_precision=9"],
            "modules.first_blocks_high_precision=9",
        ),
        (["precision=bf16", LATE, "precision.modules.exclude=['layers.*']"], "modules.exclude has 'layers.*'"),
        (["precision=mxfp8", "model=gpt3_345m", "precision.modules.include=['*.gate_proj']"], "144 linear layers"),
    ],
)
def test_a_recipe_that_would_convert_nothing_is_refused_as_the_swap_would(words, said):
    config = compose_config([*words])
    (problem,) = problems_of(config)
    assert problem.key == "precision.modules"
    assert said in problem.text
    with torch.device("meta"):
        model = Decoder(config.model)
    with pytest.raises(ConfigError) as error:
        swap_linears(model, config.precision, config.model.num_layers, "cpu", "eager")
    assert error.value.problems == [problem]


@pytest.mark.parametrize(
    "words",
    [
        ["precision=bf16", "precision.modules.exclude=['*']"],
        ["precision=fp8_current", "model.num_layers=3"],
        ["precision=mxfp8", "precision.modules.include=['layers.0.attention.q_proj']"],
        ["precision=bf16", LATE],
    ],
)
def test_a_recipe_that_converts_something_or_casts_nothing_passes(words):
    assert problems_of(compose_config(words)) == []


def test_problems_are_found_before_torch_is_imported(tmp_path):
    words = ["train", "precision=mxfp8", "precision.modules.exclude=['*']", f"run.root={tmp_path}"]
    code = (
        f"import sys\nfrom lightning_llm.__main__ import main\nprint(main({words!r}))\n"
        "print(sorted({'torch', 'lightning', 'mlflow', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["2", "[]"]
    assert "would quantize none of" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_room_that_checkpoints_need_follows_the_master_dtype(tmp_path, monkeypatch):
    words = ["model=llama_1b", f"run.root={tmp_path}", "checkpoint.keep_last=1"]
    parameters = 1_235_814_400  # as published; 128,256 rows need no padding
    for precision, each in (("bf16", 12 * parameters), ("bf16_true", 6 * parameters)):
        config = compose_config([*words, f"precision={precision}"])
        for free, fits in ((2 * each, True), (2 * each - 1, False)):
            monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: shutil._ntuple_diskusage(free, 0, free))
            said = [str(problem) for problem in disk_problems(config)]
            assert [f"{each / 1e9:.1f} GB each" in text for text in said] == ([] if fits else [True])
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, 3_000_000))
    (problem,) = disk_problems(compose_config(["model=llama_tiny", f"run.root={tmp_path}", "checkpoint.keep_last=1"]))
    said = r"2 checkpoints of 2\d\.\d MB each .* need \d\d\.\d MB .* has 3\.0 MB free"
    assert re.search(said, problem.text)


def test_a_nearly_full_disk_is_noted_and_a_runs_own_checkpoints_count_as_free(tmp_path, monkeypatch):
    config = compose_config(["model=llama_tiny", f"run.dir={tmp_path / 'run'}", "checkpoint.keep_last=3"])
    whole = disk_facts(config)["bytes"]
    held = tmp_path / "run" / "checkpoints" / "step=5" / "tensors"

    def told(free: float) -> tuple[int, list[str]]:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, int(free)))
        return len(disk_problems(config)), list(disk_notes(config))

    assert told(1.2 * whole) == (0, [])
    problems, (note,) = told(1.05 * whole)
    assert problems == 0
    assert re.search(r"4 checkpoints will take [\d.]+ MB of the [\d.]+ MB free in ", note)
    assert told(whole - 1000) == (1, [])
    held.mkdir(parents=True)
    (held / "__0_0.distcp").write_bytes(bytes(1000))
    assert told(whole - 1000)[0] == 0


def test_gradients_have_one_dtype_through_the_whole_sum():
    config = compose_config(["recipe=quickstart", "precision.reduce_dtype=bf16"])
    assert [problem.key for problem in problems_of(config)] == ["precision.reduce_dtype"]
    config = compose_config(["recipe=quickstart", "precision.main_grad_dtype=bf16"])
    assert {problem.key for problem in problems_of(config)} == {"precision.main_grad_dtype", "precision.reduce_dtype"}


@pytest.mark.parametrize(
    ("precision", "said"),
    [("fp32", "so is compute_dtype, so nothing is rounded"), ("bf16_true", "accumulate in main_grad_dtype=bf16")],
)
def test_a_wgrad_dtype_without_effect_is_refused(precision, said):
    config = compose_config(["recipe=quickstart", f"precision={precision}", "precision.wgrad_dtype=fp32"])
    (problem,) = problems_of(config)
    assert problem.key == "precision.wgrad_dtype"
    assert said in problem.text


def test_null_is_named_where_a_choice_may_be_null():
    with pytest.raises(ConfigError, match=r"precision.wgrad_dtype='bf16': must be 'fp32' or null\.$"):
        compose_config(["recipe=quickstart", "precision.wgrad_dtype=bf16"])


def test_a_warm_up_longer_than_the_run_is_noted_but_not_refused(capsys):
    assert main(["plan", "recipe=quickstart", "trainer.max_steps=5"]) == 0
    assert "note   schedule.warmup_steps=50" in capsys.readouterr().out
    assert main(["plan", "recipe=quickstart", "schedule.total_steps=50"]) == 2
    assert "schedule.warmup_steps=50: must be below schedule.total_steps=50" in capsys.readouterr().err


def test_a_glob_that_matches_nothing_is_a_typo(capsys):
    assert main(["plan", "precision=mxfp8", 'precision.modules.exclude=["*.down_prj"]']) == 2
    told = capsys.readouterr().err
    assert "precision.modules.exclude: has '*.down_prj', which matches no linear layer" in told
    assert "layers.*.feed_forward.down_proj" in told


def test_a_group_file_without_a_name_is_reported(tmp_path, capsys):
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision" / "own.yaml").write_text("compute_dtype: bf16\n")
    assert main(["plan", "precision=own", "--config-dir", str(tmp_path)]) == 2
    assert "precision.name: a value must be given: the NAME of this file" in capsys.readouterr().err


def test_a_run_name_stays_below_its_experiment(tmp_path, capsys):
    assert main(["train", "recipe=quickstart", f"run.root={tmp_path}", "run.name=a/../../b"]) == 2
    assert "run.name: is 'a/../../b', which leads out of" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_floor_is_a_factor_or_a_rate_and_below_the_peak(capsys):
    def refused(*words):
        assert main(["plan", "recipe=quickstart", *words]) == 2
        return capsys.readouterr().err

    rate = "schedule.final_learning_rate"
    assert f"{rate}: is 1e-05, and schedule.final_factor=0 sets a floor, too." in refused(f"{rate}=1e-5")
    assert "schedule.final_factor: is null, and so is" in refused("schedule.final_factor=null")
    words = [f"{rate}=3e-3", "schedule.final_factor=null", "schedule.peak_factor=0.5"]
    assert "optim.learning_rate=0.004 times schedule.peak_factor=0.5. Lower it." in refused(*words)
    assert compose_config([f"{rate}=1e-5"]).schedule.final_factor is None  # the default gives way
    assert compose_config([]).schedule.final_factor == 0.1
    none = [f"data.sources.{name}.weight=0" for name in ("code", "prose")]
    assert "data.sources.code.weight: is 0, like all others" in refused(*none)


@pytest.mark.parametrize("modes", ["[none]", "[full]", "[selective, full]"])
@pytest.mark.parametrize("compiled", ["true", "false"])
def test_a_checkpointing_list_of_wrong_length_is_reported(modes, compiled):
    words = ["parallel=fsdp_cp_tp", "trainer.devices=8", "data.global_batch_size=16", f"trainer.compile={compiled}"]
    with pytest.raises(ConfigError, match=r"activation_checkpoint_layers: has \d entries"):
        check_config(compose_config([*words, f"parallel.activation_checkpoint_layers={modes}"]))


def test_blocks_recomputed_whole_under_cp_and_tp_are_not_compiled():
    words = ["parallel=fsdp_cp_tp", "trainer.devices=8", "data.global_batch_size=16", "trainer.compile=true"]
    with pytest.raises(ConfigError, match=r"parallel.compile: is true, but torch's compiler fails .* cp=2 and tp=2"):
        check_config(compose_config([*words, "parallel.activation_checkpoint=full"]))
    check_config(compose_config([*words, "parallel.activation_checkpoint=selective"]))
    check_config(compose_config(["parallel=fsdp_tp", *words[1:], "parallel.activation_checkpoint=full"]))
