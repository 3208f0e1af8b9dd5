"""The origin of weights and tokenizer is reported before a run begins, and models that cannot be exported.

4 seconds.
"""

import json
import math

import pytest

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.config.recipes import recipe_files
from lightning_llm.plan.resolve import DerivedConfig
from lightning_llm.run.checked_plan import problems_beyond
from lightning_llm.tracking.files import read_records, summary_of
from tests.weight_folders import write_huggingface

SOON = ("cpt/replay", "cpt/swallow_8b", "sweep/replay")
CONTINUE, SWEEPS = (
    [each if each in SOON else pytest.param(each, marks=pytest.mark.full) for each in names]
    for names in ([name for name, _ in recipe_files() if name.startswith("cpt/")], ["sweep/replay", "ablate/merge"])
)


def planned(capsys, *words: str) -> dict:
    assert main(["plan", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def line_of(text: str, name: str) -> str:
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
    return line.removeprefix(name).strip()


@pytest.mark.parametrize("recipe", CONTINUE)
def test_a_recipe_that_continues_is_planned_without_weights_and_never_starts_without(recipe, tmp_path, capsys):
    named = {"cpt/replay": ("new", "old"), "cpt/annealing": ("new", "old", "best")}.get(recipe, ())
    (file := tmp_path / "documents.jsonl").write_text('{"text": "one"}\n')
    words = [f"recipe={recipe}", *(f"data.sources.{name}.path={file}" for name in named), f"run.root={tmp_path}/out"]
    words += ["model=llama_tiny", "model.max_sequence_length=8192", "world=null", "parallel=single"] if named else []
    facts = planned(capsys, *words)
    assert facts["weights"].startswith("???: train requires model.init_from=PATH, or null for random weights")
    assert facts["tokenizer"].startswith("of the weights")
    for verb in ("train", "prepare"):
        assert main([verb, *words]) == 2
        assert "model.init_from: a value must be given" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    scratch = planned(capsys, *words, "model.init_from=null")
    assert scratch["weights"] == "random: model.init=llama, model.init_std=0.02, seed=0"
    assert scratch["tokenizer"].startswith("bpe of ")
    assert facts["parameters"] == scratch["parameters"]


@pytest.mark.parametrize("recipe", SWEEPS)
def test_a_sweep_that_continues_says_what_it_begins_with(recipe, tmp_path, capsys):
    words = ["-m", f"recipe={recipe}", "model=llama_tiny", f"run.root={tmp_path}"]
    assert main(["plan", *words]) == 0
    assert line_of(capsys.readouterr().out, "weights").startswith("???: train requires")
    assert main(["train", *words]) == 2
    assert "model.init_from: a value must be given" in capsys.readouterr().err
    assert main(["plan", *words, "model.init_from=null"]) == 0
    printed = capsys.readouterr().out
    assert "random: model.init=llama" in line_of(printed, "weights")
    assert "bpe of 1,024 tokens, trained on" in line_of(printed, "tokenizer")


def test_weights_and_their_tokenizer_are_named(small_run, tmp_path, capsys):
    shape = compose_config(["model=llama_tiny", "model.num_layers=1", "model.vocab_size=300"]).model
    folder = write_huggingface(tmp_path / "hf", shape)
    kept = [each for each in small_run(tmp_path) if not each.startswith(("model", "data.tokenizer"))]
    facts = planned(capsys, *kept, f"model.init_from={folder}")
    assert facts["weights"] == f"from model.init_from={folder}, 12 tensors"
    assert facts["tokenizer"] == f"{folder / 'tokenizer.json'}, of the weights"
    assert facts["export"] == "LlamaForCausalLM"
    (folder / "tokenizer.json").unlink()
    assert main(["plan", *kept, f"model.init_from={folder}"]) == 2
    printed = capsys.readouterr().err
    assert "data.tokenizer.kind: is 'bpe', which would train a new tokenizer" in printed
    assert "data.tokenizer.kind=file data.tokenizer.path=FILE" in printed


def test_train_prints_the_origin_and_whether_the_model_can_be_exported(small_run, tmp_path, capsys):
    assert main(["train", *small_run(tmp_path, "trainer.max_steps=1", "model.norm=layernorm")]) == 0
    printed = capsys.readouterr().out.splitlines()
    begin = next(index for index, line in enumerate(printed) if line.startswith("begin  weights random: "))
    assert printed[begin + 1].startswith("begin  tokenizer ")
    assert "has no Hugging Face counterpart: norm=layernorm" in printed[begin + 2]
    assert main(["plan", *small_run(tmp_path / "other", "model.norm=layernorm")]) == 0
    assert line_of(capsys.readouterr().out, "export").startswith("none: ")


def test_a_first_loss_far_above_that_of_equal_logits_is_noted(small_run, tmp_path, capsys):
    small = ["trainer.max_steps=2", "trainer.validate_every_steps=null", "model.tie_embeddings=true"]
    assert main(["train", *small_run(tmp_path / "a", *small)]) == 0
    assert "the first loss is" not in capsys.readouterr().out
    assert "first_loss_above_uniform" not in summary_of(tmp_path / "a" / "run")
    words = small_run(tmp_path / "b", *small, "model.init=gpt2", "model.init_std=0.5")
    vocabulary = compose_config(words).model.vocab_size
    assert main(["train", *words]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "the first loss is" in line]
    first, second = [each for each in read_records(tmp_path / "b" / "run" / "metrics.jsonl") if "loss" in each][:2]
    excess = first["loss"] - math.log(vocabulary)
    assert excess > 1
    assert f"is {first['loss']:.3f}, and equal logits have ln(model.vocab_size) = {math.log(vocabulary):.3f}" in line
    assert "Lower model.init_std=0.5" in line
    assert "loss_above_uniform" not in second
    assert summary_of(tmp_path / "b" / "run")["first_loss_above_uniform"] == pytest.approx(excess, abs=1e-9)


def test_a_config_from_python_without_its_weights_is_refused_as_well():
    config = compose_config(["recipe=cpt/swallow_8b"])
    assert config.model.init_from == "???"
    assert not problems_beyond(DerivedConfig(config))
    problems = problems_beyond(DerivedConfig(config, to_train=True), saves=False)
    assert "model.init_from" in {each.key for each in problems}
    with pytest.raises(ConfigError, match=r"model\.init_from"):
        compose_config(["model=from_weights"])
