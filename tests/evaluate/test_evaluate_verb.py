"""`lightning-llm evaluate`: the run's own losses to the bit, averages and ensembles as others compute them."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from lightning_llm.__main__ import main
from lightning_llm.config.from_file import load_config
from lightning_llm.data.opening import open_corpus
from lightning_llm.data.tokens.token_files import TokenStream
from lightning_llm.evaluate.weights import AverageWeights, decoder_of
from lightning_llm.model.ensemble import Ensemble
from lightning_llm.model.weights.load import InitialWeights, whole_state
from lightning_llm.run.subject import find_subject, read_weights, verified_weights
from lightning_llm.tracking.evaluations import read_evaluations
from lightning_llm.tracking.files import read_records, summary_of
from lightning_llm.tracking.reading import read_run

CPU = torch.device("cpu")


def evaluated(capsys, *words):
    capsys.readouterr()
    assert main(["evaluate", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def recorded(run):
    """Return the run's own validations by step."""
    found = {}
    for record in read_records(run / "metrics.jsonl"):
        if "val_loss" in record:
            found[record["step"]] = {key: value for key, value in record.items() if key.startswith("val_loss")}
    return found


def step_folder(run, step):
    return run / "checkpoints" / f"step={step}"


def model_at(folder):
    subject = find_subject(folder, [], None)
    return decoder_of(subject, read_weights(subject), CPU)


def test_losses_are_the_runs_own_to_the_bit(trained, capsys):
    for step, own in recorded(trained).items():
        facts = evaluated(capsys, step_folder(trained, step))
        assert {key: value for key, value in facts["metrics"].items() if key.startswith("val_loss")} == own
        assert (facts["step"], facts["of"]) == (step, "model")


@pytest.mark.parametrize("recipe", ["fp8_delayed", "bf16_true"])
def test_so_they_are_through_a_recipes_casts(recipe, tmp_path, small_run, capsys):
    words = f"precision={recipe}", "precision.casts=eager", "trainer.max_steps=2", "trainer.validate_every_steps=2"
    assert main(["train", *small_run(tmp_path, *words)]) == 0
    own = recorded(tmp_path / "run")[2]
    assert ("val_loss_high_precision" in own) == (recipe == "fp8_delayed")
    assert own.items() <= evaluated(capsys, tmp_path / "run")["metrics"].items()


def test_per_byte_figures_are_of_the_text(trained, capsys):
    metrics = evaluated(capsys, trained)["metrics"]
    config = load_config(trained / "config.yaml", [])
    corpus = open_corpus(config.data, config.seed, config.model.vocab_size)
    labels = [batch.labels[row] for batch in corpus.validation_batches(2) for row in range(2)]
    targets = [row[row >= 0].tolist() for row in labels]
    text = "".join(
        corpus.tokenizer.decode([t for t in row if t != corpus.tokenizer.end_of_document]) for row in targets
    )
    nats = metrics["val_loss"] * sum(map(len, targets)) / len(text.encode())
    assert metrics["bits_per_byte"] == pytest.approx(nats / math.log(2))
    assert metrics["byte_perplexity/jsonl"] == pytest.approx(math.exp(nats))


def test_a_loss_per_byte_is_null_where_the_bytes_are_unknown(trained, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation"))
    assert evaluated(capsys, run)["metrics"]["bits_per_byte"] > 0
    monkeypatch.setattr(TokenStream, "sizes", lambda stream: None)
    assert main(["evaluate", str(run), "--json"]) == 0
    printed = capsys.readouterr()
    metrics = json.loads(printed.out)["metrics"]
    assert metrics["val_loss"] > 0
    names = [f"{name}{suffix}" for name in ("bits_per_byte", "byte_perplexity") for suffix in ("", "/jsonl")]
    assert [metrics[name] for name in names] == [None] * 4
    assert printed.err.count("the bytes of jsonl are unknown") == 1
    assert not [name for name in read_run(run).validations if "byte" in name]
    monkeypatch.undo()
    assert all(evaluated(capsys, run)["metrics"][name] > 0 for name in names)


def test_results_lie_with_the_run(trained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for step in (4, 2):
        file = evaluated(capsys, step_folder(run, step))["file"]
        assert file == str(run / "evaluation" / f"step={step}.json")
    own = recorded(run)
    assert summary_of(run)["eval/val_loss"] == own[4]["val_loss"]
    assert summary_of(run)["eval/step"] == 4
    read = read_run(run)
    assert read.validations["eval/val_loss"] == {step: losses["val_loss"] for step, losses in own.items()}
    (run / "evaluation" / "step=4.json").write_text("{")
    assert main(["evaluate", str(run)]) == 2
    assert "step=4.json is damaged" in capsys.readouterr().err


def test_another_files_documents_are_scored(trained, tmp_path, capsys):
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"text": f"the of and to {i} in is that " * 9}) + "\n" for i in range(40)))
    output = tmp_path / "out.json"
    metrics = evaluated(capsys, trained, "--data", f"jsonl={file}", "--output", output)["metrics"]
    assert metrics["val_loss"] != recorded(trained)[4]["val_loss"]
    assert json.loads(output.read_text())["metrics"]["val_loss"]["value"] == metrics["val_loss"]


def test_keys_below_data_are_of_the_file_that_is_named(trained, exported, tmp_path, capsys):
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"body": f"the of and to {i} in is that " * 9}) + "\n" for i in range(40)))
    named = "--data", f"jsonl={file}", "--data", "sources.jsonl.text_key=body"
    whole = evaluated(capsys, exported, *named, "--output", tmp_path / "whole.json")["metrics"]
    two = evaluated(capsys, exported, *named, "--data", "validation.sequences=2", "--output", tmp_path / "two.json")
    assert two["metrics"]["val_loss"] != whole["val_loss"]
    assert main(["evaluate", str(exported), "--data", "validation.sequences=2"]) == 2
    said = capsys.readouterr().err
    assert "data.validation.sequences=2, but a Hugging Face folder has no text. Give a file, too" in said


def average_weights(subjects):
    model = subjects[0].config.model
    return whole_state(AverageWeights([InitialWeights(verified_weights(each), model) for each in subjects]), model)


def test_an_average_is_torchs_and_of_one_model_itself(trained, capsys):
    two, four = (find_subject(step_folder(trained, step), [], None) for step in (2, 4))
    itself = average_weights([four, four, four])
    assert all(torch.equal(itself[name], weight) for name, weight in read_weights(four).items())
    averaged = AveragedModel(model_at(step_folder(trained, 2)))
    for step in (2, 4):
        averaged.update_parameters(model_at(step_folder(trained, step)))
    ours = average_weights([two, four])
    assert all(torch.equal(ours[name], p) for name, p in averaged.module.named_parameters())
    own = recorded(trained)
    facts = evaluated(capsys, "--average", step_folder(trained, 4), step_folder(trained, 4))
    assert own[4].items() <= facts["metrics"].items()
    assert "average" in facts["file"]
    both = evaluated(capsys, step_folder(trained, 2), "--average", step_folder(trained, 4))["metrics"]["val_loss"]
    assert both not in (own[2]["val_loss"], own[4]["val_loss"])


def test_an_ensemble_is_the_mean_of_its_members_predictions(trained, capsys):
    models = [model_at(step_folder(trained, step)) for step in (2, 4)]
    tokens = torch.randint(300, (3, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = np.stack([model(tokens)[..., :320].double().numpy() for model in models])
        own = {way: Ensemble.from_members(models, way)(tokens).double() for way in ("probabilities", "logits")}
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(torch.softmax(own["probabilities"], -1), p.mean(0), rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(own["logits"], logits.mean(0), rtol=1e-5, atol=1e-6)
    assert Ensemble.from_members(models[:1], "logits") is models[0]
    facts = evaluated(capsys, "--ensemble", step_folder(trained, 4))["metrics"]
    assert recorded(trained)[4].items() <= facts.items()
    both = evaluated(capsys, "--ensemble", step_folder(trained, 2), step_folder(trained, 4))
    assert len(both["members"]) == 2
    assert both["metrics"]["probabilities"]["val_loss"] == pytest.approx(both["metrics"]["logits"]["val_loss"], abs=0.1)
    assert (
        both["metrics"]["probabilities"]["val_loss"] <= sum(own["val_loss"] for own in recorded(trained).values()) / 2
    )


def test_all_problems_are_reported_at_once(tmp_path, capsys):
    wrong = ["--limit=0", "--batch-size=0", "--average", "a", "--ensemble", "b", "--data=jsonl", "--tasks-only"]
    wrong += ["--output", str(tmp_path)]
    assert main(["evaluate", *wrong]) == 2
    said = capsys.readouterr().err
    for part in ("--limit=0: must be a number", "--batch-size=0: must be at least 1",
                 "--ensemble: cannot be used with --average", "'jsonl' is not KEY=VALUE",
                 "--tasks-only: leaves nothing to do", "a: does not exist", "b: does not exist",
                 "is a folder. Give a file in it"):  # fmt: skip
        assert part in said, part
    assert main(["evaluate"]) == 2
    assert "PATH: is missing" in capsys.readouterr().err


def test_models_that_do_not_go_together_are_refused(trained, tmp_path, small_run, capsys):
    words = "trainer.max_steps=1", "model.num_layers=1", "data.tokenizer.vocab_size=290"
    assert main(["train", *small_run(tmp_path, *words)]) == 0
    other = str(tmp_path / "run")
    assert main(["evaluate", str(trained), "--average", other]) == 2
    said = capsys.readouterr().err
    assert "has another tokenizer" in said
    assert "model.num_layers (1 and 2)" in said
    assert main(["evaluate", str(trained), "--ensemble", other]) == 2
    assert "has another tokenizer" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused_and_nothing_written(trained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained, run, ignore=shutil.ignore_patterns("evaluation"))
    file = next((step_folder(run, 4) / "tensors").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    before = sorted(run.rglob("*"))
    assert main(["evaluate", str(step_folder(run, 4))]) == 2
    assert file.name in capsys.readouterr().err
    assert sorted(run.rglob("*")) == before


def test_without_lm_eval_the_command_to_install_it_is_named(trained, monkeypatch, capsys):
    monkeypatch.setattr("lightning_llm.evaluate.request.importlib.util.find_spec", lambda name: None)
    assert main(["evaluate", str(trained), "--tasks", "hellaswag"]) == 2
    assert "pip install 'lightning-llm[eval]'" in capsys.readouterr().err


def test_a_model_of_codes_is_evaluated_as_it_is_exported(trained, tmp_path, capsys):
    """Through transformers, which reads the codes by compressed-tensors; its losses have other names."""
    folder = tmp_path / "codes"
    assert main(["export", str(trained), "--output", str(folder), "--codes", "mxfp4"]) == 0
    assert "logits       differ from transformers' by at most" in capsys.readouterr().out
    entry = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (entry["format"], entry["ignore"]) == ("mxfp4-pack-quantized", ["lm_head"])
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    assert main(["evaluate", str(run)]) == 0
    assert main(["evaluate", str(run), "--as", "mxfp4"]) == 0
    metrics = read_evaluations(run)[4]
    assert 0 < abs(metrics["as_mxfp4/val_loss"]["value"] - metrics["val_loss"]["value"]) < 0.05
    assert metrics["as_mxfp4/val_loss"]["of"] == metrics["val_loss"]["of"]
    assert main(["evaluate", str(run), "--as", "mxfp4", "--average", str(run)]) == 2
    assert "--as=mxfp4: evaluates one model" in capsys.readouterr().err
