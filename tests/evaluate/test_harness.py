"""lm-eval's tasks over our weights give the numbers of its `hf` backend on the exported folder, offline."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedTokenizerFast

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.data.tokens.tokenizer import END_OF_DOCUMENT, Tokenizer
from lightning_llm.evaluate.harness import OwnModel
from lightning_llm.evaluate.task_settings import (
    DEFAULT_TOP_K,
    NEUTRAL,
    WritingSettings,
    model_defaults,
    settings_problems,
)
from lightning_llm.evaluate.weights import decoder_of
from lightning_llm.model.ensemble import Ensemble
from lightning_llm.model.generate import Sampler
from lightning_llm.run.subject import find_subject, read_weights
from lightning_llm.tracking.files import summary_of
from tests.evaluate.choice_task import choice_task
from tests.messages import missing
from tests.model.huggingface_states import huggingface_config, to_huggingface

CPU = torch.device("cpu")
PAIRS = [
    ("the of and", " to in"),
    ("", "the of and to"),
    ("is that for ", "it"),  # its space is scored
    ("the of and to in is that for it as was with be by on not he " * 9, " and to the of"),  # beyond the context
    ("was with", " be by on not he the of and to in is that"),
]
TEXTS = ["the of and to in is", "the of and to in is that for it as was with be by on not he " * 10]


@pytest.fixture(scope="module")
def models(trained, tmp_path_factory) -> tuple[OwnModel, HFLM]:
    """Our model, and lm-eval's own on the same weights in a Hugging Face folder."""
    subject = find_subject(trained, [], None)
    weights = read_weights(subject)
    folder = tmp_path_factory.mktemp("exported")
    save_file(to_huggingface(weights, subject.config.model), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(huggingface_config(subject.config.model)))
    backend = PreTrainedTokenizerFast(tokenizer_file=str(trained / "tokenizer.json"), eos_token=END_OF_DOCUMENT)
    backend.save_pretrained(folder)
    theirs = HFLM(str(folder), device="cpu", dtype="float32", batch_size=2)
    return OwnModel(decoder_of(subject, weights, CPU), Tokenizer(trained), CPU, batch_size=2), theirs


def requests(kind, arguments):
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def test_log_likelihoods_are_those_of_the_hf_backend(models):
    ours, theirs = (model.loglikelihood(requests("loglikelihood", PAIRS)) for model in models)
    assert [likeliest for _, likeliest in ours] == [likeliest for _, likeliest in theirs]
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-4)


def test_so_are_those_of_whole_texts(models):
    texts = [(text,) for text in TEXTS]
    ours, theirs = (model.loglikelihood_rolling(requests("loglikelihood_rolling", texts)) for model in models)
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert ours[1] < ours[0] < 0


def test_generated_text_equals_that_of_lm_evals_own_backend(models):
    settings = {"until": ["he"], "max_gen_toks": 24, "do_sample": False}
    arguments = [("the of and", settings), ("was with be", settings | {"until": ["never said"]})]
    ours, theirs = (model.generate_until(requests("generate_until", arguments)) for model in models)
    assert ours == theirs


SETTINGS = {
    "max_new_tokens": {"until": ["never said"], "max_new_tokens": 5},
    "max_tokens": {"until": ["never said"], "max_tokens": 5, "do_sample": False},
    "max_completion_tokens": {"until": ["never said"], "max_completion_tokens": 5},
    "the first of several": {"until": [], "max_gen_toks": 4, "max_new_tokens": 9},
    "one string": {"until": "he", "max_gen_toks": 24},
    "of two strings the earlier": {"until": ["in", "e"], "max_gen_toks": 24, "temperature": 0.0},
    "a temperature without sampling": {"until": ["he"], "max_gen_toks": 8, "do_sample": False, "temperature": 0.7},
    "max_length": {"until": ["never said"], "max_gen_toks": 100, "max_length": 12},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_a_task_mean_what_they_mean_to_lm_eval(models, name):
    arguments = [("the of and", dict(SETTINGS[name]))]
    ours, theirs = (model.generate_until(requests("generate_until", arguments)) for model in models)
    assert ours == theirs
    assert len(ours[0]) > 0


def test_a_temperature_alone_samples_and_documents_that_repeat_differ(models):
    settings = {"until": [], "max_gen_toks": 12, "temperature": 1.5}
    one, two = models[0].generate_until(requests("generate_until", [("the of and", dict(settings))] * 2))
    greedy = models[0].generate_until(requests("generate_until", [("the of and", settings | {"do_sample": False})]))
    assert len({one, two, *greedy}) == 3


def test_max_length_without_room_is_refused_before_a_word_is_written(models):
    arguments = [("the of", {"until": [], "max_gen_toks": 2}), ("the of and to in", {"until": [], "max_length": 2})]
    with pytest.raises(ConfigError, match="max_length=2 leaves no room after a context of"):
        models[0].generate_until(requests("generate_until", arguments))


def test_settings_are_read_as_transformers_reads_them():
    read = WritingSettings.read
    assert GenerationConfig._get_default_generation_params()["top_k"] == DEFAULT_TOP_K
    sampled = read({"do_sample": True, "temperature": 0.7, "top_p": 0.9}, "</s>", {"top_k": 20, "top_p": 0.5})
    assert (sampled.sampler, sampled.until) == (Sampler(0.7, 20, 0.9), ("</s>",))
    assert read({"temperature": 0.5}, "</s>", {}).sampler == Sampler(0.5, 50, 1.0)
    assert read({"do_sample": True, "temperature": 1, "top_k": 0}, "", {}).sampler == Sampler(1.0, None, 1.0)
    for neutral, values in NEUTRAL.items():
        default = GenerationConfig._get_default_generation_params().get(neutral, values[0])
        assert default in values
    assert settings_problems({"until": ["x"], "num_beams": 1, "repetition_penalty": 1.0, "top_k": 5}) == []
    for senseless in ({"until": [1]}, {"max_gen_toks": 0}, {"do_sample": "false"}, {"do_sample": True}):
        assert "cannot be read" in settings_problems(senseless)[0]
    assert settings_problems({"until": None, "max_gen_toks": "5", "do_sample": True, "temperature": 0.5}) == []
    assert settings_problems({"num_beams": 4, "temperature": -1, "do_sample": True})[0].startswith("generation_kwargs")
    assert settings_problems({"num_beams": 4}) == ["generation_kwargs.num_beams=4 is not supported"]


def test_a_folder_s_own_generation_settings_are_read_by_transformers(tmp_path, monkeypatch):
    assert model_defaults(tmp_path) == ({}, [])
    GenerationConfig(top_p=0.8, top_k=20, do_sample=True, repetition_penalty=1.05).save_pretrained(tmp_path)
    read, (ignored,) = model_defaults(tmp_path)
    assert read == {"top_k": 20, "top_p": 0.8}
    assert ignored.startswith("repetition_penalty=1.05 of ")
    monkeypatch.setitem(sys.modules, "transformers", None)  # not installed
    read, (ignored,) = model_defaults(tmp_path)
    assert read == {}
    assert "transformers, which reads it, is not installed" in ignored


def test_a_context_too_small_for_a_task_is_noted_once(models, trained, capsys):
    model = OwnModel(models[0].model, Tokenizer(trained), CPU, batch_size=1)
    model.generate_until(requests("generate_until", [("the of and", {"until": ["e"]}), ("to in", {"until": ["e"]})]))
    printed = capsys.readouterr().err
    assert missing(printed, "note ", "256 new tokens", "context", "128", "1 tokens") == []
    assert printed.count("\n") == 1


def test_batches_do_not_show(models, trained):
    alone = OwnModel(models[0].model, Tokenizer(trained), CPU, batch_size=1)
    one, two = (model.loglikelihood(requests("loglikelihood", PAIRS)) for model in (alone, models[0]))
    assert [value for value, _ in one] == pytest.approx([value for value, _ in two], abs=1e-5)


def test_an_ensemble_of_a_model_with_itself_is_that_model(models, trained):
    for combine in ("probabilities", "logits"):
        both = OwnModel(Ensemble([models[0].model] * 2, combine), Tokenizer(trained), CPU, batch_size=2)
        ours, own = (model.loglikelihood(requests("loglikelihood", PAIRS)) for model in (both, models[0]))
        assert [value for value, _ in ours] == pytest.approx([value for value, _ in own], abs=1e-4)


@pytest.fixture
def task(tmp_path) -> Path:
    return choice_task(tmp_path)


def test_a_task_of_ones_own_offline(trained, task, tmp_path, capsys, monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    assert main(["evaluate", str(run), "--tasks", str(task), "--tasks-only", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics == {"my_choice/acc": 0.5}  # every second answer is the second
    kept = json.loads((run / "evaluation" / "step=4.json").read_text())["metrics"]["my_choice/acc"]
    assert (kept["higher_is_better"], kept["samples"], kept["of"]) == (True, 6, "version 1.0, all samples")
    assert summary_of(run)["eval/my_choice/acc"] == 0.5
    assert main(["evaluate", str(run), "--tasks", str(task), "--tasks-only", "--limit", "1"]) == 0
    kept = json.loads((run / "evaluation" / "step=4.json").read_text())["metrics"]["my_choice/acc"]
    assert kept["of"] == "version 1.0, the first 1 samples"
    assert main(["evaluate", str(run), "--tasks", str(task), "--tasks-only", "--limit", "0.6"]) == 0
    kept = json.loads((run / "evaluation" / "step=4.json").read_text())["metrics"]["my_choice/acc"]
    assert (kept["of"], kept["samples"]) == ("version 1.0, the first 0.6 of the samples", 4)
    assert main(["evaluate", str(run), "--tasks", str(task), "--limit", "1.5"]) == 2
    assert "--limit=1.5: must be a number of samples, or a fraction" in capsys.readouterr().err


def test_a_task_whose_settings_would_be_ignored_is_refused(trained, task, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    choice = task.read_text()
    head = choice.partition("output_type")[0].replace("my_choice", "written")
    task.write_text(
        f"{head}output_type: generate_until\ndoc_to_text: '{{{{q}}}}'\ndoc_to_target: '{{{{gold}}}}'\n"
        "generation_kwargs: {until: ['x'], num_beams: 3, penalty_alpha: 0.6}\nmetric_list:\n  - metric: exact_match\n"
    )
    assert main(["evaluate", str(trained), "--tasks", str(task), "--tasks-only"]) == 2
    printed = capsys.readouterr().err
    assert "written: generation_kwargs.num_beams=3 is not supported. Text is written greedily, or sampled" in printed
    assert "penalty_alpha=0.6" in printed


def test_tasks_that_are_not_there_are_named(trained, task, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "documents.jsonl").unlink()
    assert main(["evaluate", str(trained), "--tasks", f"{task},{tmp_path}/none.yaml"]) == 2
    assert "none.yaml is not a file" in capsys.readouterr().err
    assert main(["evaluate", str(trained), "--tasks", str(task)]) == 2
    assert "my_choice.yaml cannot be loaded" in capsys.readouterr().err


@pytest.mark.full  # lm-eval's index of its tasks takes ten CPU seconds
def test_a_misspelled_task_gets_a_suggestion(trained, capsys):
    assert main(["evaluate", str(trained), "--tasks", "helaswag"]) == 2
    assert "lm-eval has no task 'helaswag'. Did you mean 'hellaswag'" in capsys.readouterr().err
