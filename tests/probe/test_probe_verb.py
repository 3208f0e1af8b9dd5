"""`lightning-llm probe` on a run, its checkpoint and its Hugging Face export; and all that can be asked wrongly."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.config.from_file import load_config
from lightning_llm.model.interop.families import model_config_of
from lightning_llm.precision.outliers import ChannelFigures
from lightning_llm.run.subject import find_subject, read_weights
from tests.model.huggingface_states import huggingface_config, to_huggingface

QUICK = ["--batches", "1", "--keys", "2"]


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory, small_run):
    """The folder of a run of four bf16 steps with one checkpoint."""
    folder = tmp_path_factory.mktemp("probed")
    words = ("precision=bf16", "trainer.max_steps=4", "checkpoint.every_steps=null", "data.micro_batch_size=4")
    assert main(["train", *small_run(folder, *words)]) == 0
    return folder / "run"


@pytest.fixture(scope="session")
def huggingface_folder(run_folder, tmp_path_factory):
    """The same weights as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("huggingface") / "exported"
    folder.mkdir()
    subject = find_subject(run_folder, [], None)
    save_file(to_huggingface(read_weights(subject), subject.config.model), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(huggingface_config(subject.config.model)))
    shutil.copy(run_folder / "tokenizer.json", folder)
    return folder


def probe(capsys, *words):
    """Return the exit code and the printed JSON."""
    capsys.readouterr()
    code = main(["probe", *map(str, words), "--json"])
    told = capsys.readouterr()
    assert "casts that are not cached are compiled first" in told.err
    assert told.err.count(": measured in ") == len(json.loads(told.out)["recipes"])
    return code, json.loads(told.out)


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.full
def test_a_run_its_checkpoint_and_its_export_give_the_same_figures(
    run_folder, huggingface_folder, corpus_folder, tmp_path, capsys
):
    before = files(run_folder), files(huggingface_folder)
    mx = "precision=mxfp8", "precision.casts=eager"
    code, facts = probe(capsys, run_folder, *mx, *QUICK, "--output", tmp_path / "run")
    assert code == 0
    checkpoint = run_folder / "checkpoints" / "step=4"
    _, same = probe(capsys, checkpoint, *mx, *QUICK, "--output", tmp_path / "checkpoint")
    assert same == facts
    assert (facts["kind"], facts["step"], facts["data"]["from"]) == ("run", 4, "held out")
    data = (
        "data=jsonl", f"data.sources.jsonl.path={corpus_folder / 'documents.jsonl'}",
        f"data.cache_dir={corpus_folder / 'cache'}", "data.validation.fraction=0.1", "data.validation.sequences=6",
        "data.sequence_length=32", "data.micro_batch_size=4",
    )  # fmt: skip
    _, other = probe(capsys, huggingface_folder, *data, *mx, *QUICK, "--output", tmp_path / "huggingface")
    ours, theirs = facts["recipes"]["mxfp8"], other["recipes"]["mxfp8"]
    assert theirs["loss"] == ours["loss"]
    assert theirs["layers"] == ours["layers"]
    assert (files(run_folder), files(huggingface_folder)) == before
    its = facts["recipes"]["mxfp8"]
    assert set(its["slots"]) == {"fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"}
    assert its["quantised_layers"] == 14 == len(its["layers"])
    assert 0.8 <= its["keep_high"]["won_back"] <= 1.05
    assert (tmp_path / "run" / "mxfp8.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "run" / "probe.json").read_text()) == facts


@pytest.mark.full
def test_text_of_ones_own_and_recipes_to_go_on_with(huggingface_folder, corpus_folder, small_run, tmp_path, capsys):
    words = (
        "precision=nvfp4", "precision.casts=eager", f"data.cache_dir={corpus_folder / 'cache'}",
        "data.sequence_length=32",
    )  # fmt: skip
    out = tmp_path / "out"
    text = corpus_folder / "documents.jsonl"
    code = main(["probe", str(huggingface_folder), *words, "--text", str(text), *QUICK, "--output", str(out)])
    assert code == 0
    shown = capsys.readouterr().out
    assert "the text itself" in shown
    assert "keep" in shown
    assert (out / "probe.txt").read_text().strip() in shown
    made = sorted(path.stem for path in (out / "precision").iterdir())
    assert made == ["nvfp4_kept", *(f"nvfp4_only_{s}" for s in (
        "dgrad_dy", "dgrad_w", "fprop_w", "fprop_x", "wgrad_dy", "wgrad_x"
    ))]  # fmt: skip
    for name in ("nvfp4_kept", "nvfp4_only_wgrad_x"):
        assert main(["plan", "--config-dir", str(out), *small_run(tmp_path), f"precision={name}"]) == 0


@pytest.mark.full
def test_all_recipes_are_ranked_and_those_that_do_not_fit_are_named(run_folder, tmp_path, capsys):
    code, facts = probe(
        capsys, run_folder, "precision=all", "precision.casts=eager", *QUICK, "--output", tmp_path / "all"
    )
    assert code == 0
    assert facts["ranking"] == sorted(facts["recipes"], key=lambda name: facts["recipes"][name]["gradient"]["error"])
    assert facts["ranking"].index("mxfp8") < facts["ranking"].index("mxfp4_sr_norht")  # eight bits, four bits
    assert "mxfp4_sr" in facts["ranking"]  # its rotations of 64 are padded: the model is 32 wide
    assert "quantize none of" in facts["skipped"]["fp8_current"]  # first and last block are all there is
    assert "slots" not in facts["recipes"]["mxfp8"]


def test_every_problem_is_reported_at_once(run_folder, tmp_path, capsys):
    words = [
        "precision=mxfp4_sr,bf16,mxfp9",
        "--batches",
        "0",
        "--text",
        "nothing.txt",
        "--output",
        str(tmp_path / "o"),
    ]
    assert main(["probe", str(run_folder), *words]) == 2
    said = capsys.readouterr().err
    for part in (
        "--batches=0: must",
        "--text: needs a Hugging Face folder",
        "there is no 'mxfp9'. Did you mean 'mxfp8'?",
    ):
        assert part in said
    assert main(["probe", str(run_folder), "precision=mxfp4_sr,bf16,mxfp9"]) == 2
    said = capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["probe", str(run_folder), "precision=mxfp8", "--output", str(tmp_path / "file" / "o")]) == 2
    assert "cannot be written (Not a directory)" in capsys.readouterr().err
    for part in ("'bf16' quantizes nothing", "'mxfp9'"):
        assert part in said
    assert not (tmp_path / "o").exists()


def test_a_run_without_casts_wants_a_recipe_named(run_folder, capsys):
    assert main(["probe", str(run_folder)]) == 2
    assert (
        "the run's own, 'bf16', quantizes nothing, so there is nothing to probe. Use precision=NAME"
        in capsys.readouterr().err
    )


def test_paths_that_hold_nothing_to_probe(run_folder, tmp_path, capsys):
    bare, weightless = tmp_path / "bare", tmp_path / "weightless"
    bare.mkdir()
    weightless.mkdir()
    shutil.copy(run_folder / "config.yaml", weightless)
    lost = tmp_path / "a" / "lost" / "step=4"
    shutil.copytree(run_folder / "checkpoints" / "step=4", lost)
    for path, part in {
        tmp_path / "nowhere": "does not exist. Give a folder that `import` made",
        run_folder / "config.yaml": "is a file",
        bare: "contains no weights. Give a folder",
        weightless: "contains no checkpoint",
        lost: "not in a run's folder",
    }.items():
        assert main(["probe", str(path), "precision=mxfp8"]) == 2
        assert part in capsys.readouterr().err


def test_huggingface_folders_that_cannot_be_probed(huggingface_folder, tmp_path, capsys):
    def changed(name, **values):
        folder = tmp_path / name
        shutil.copytree(huggingface_folder, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))
        return folder

    other = changed("other", architectures=["FalconForCausalLM"])
    (other / "model.safetensors").rename(other / "pytorch_model.bin")
    (other / "tokenizer.json").unlink()
    assert main(["probe", str(other), "precision=mxfp8"]) == 2
    said = capsys.readouterr().err
    for part in (
        "is FalconForCausalLM. Read here are",
        "pytorch_model.bin is pickled, which is not read by slices",
        "tokenizer.json: is missing",
        "Give --text FILE",
    ):
        assert part in said
    for values, part in (
        ({"hidden_act": "gelu"}, "hidden_act: is 'gelu', but this decoder has 'silu'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "is of type 'longrope'"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers: must be a whole number"),
    ):
        folder = changed(f"with_{next(iter(values))}", **values)
        with pytest.raises(ConfigError, match=part.replace("(", "\\(")):
            find_subject(folder, ["data=python"], None)
    wide = changed("wide", intermediate_size=96)
    with pytest.raises(ConfigError) as caught:
        read_weights(find_subject(wide, ["data=python"], None))
    assert "has shape (64, 32)" in str(caught.value)
    assert "(96, 32) by its config" in str(caught.value)
    deep = changed("deep", num_hidden_layers=3)
    with pytest.raises(ConfigError, match=r"has no tensor model\.layers\.2"):
        read_weights(find_subject(deep, ["data=python"], None))


@pytest.mark.parametrize("size", ["llama_tiny", "llama_8b", "llama_1b"])
def test_a_config_json_of_ours_reads_back_as_the_same_shape(size):
    from lightning_llm.config.compose import compose_config

    ours = compose_config([f"model={size}"]).model
    theirs = model_config_of(huggingface_config(ours), ours.name)
    not_stored = {"vocab_multiple", "init", "parameters_published", "head_dim"}
    assert theirs.model_dump(exclude=not_stored) == ours.model_dump(exclude=not_stored)
    assert theirs.attention_head_dim == ours.attention_head_dim


def test_the_run_s_own_recipe_and_delayed_scales_are_taken(small_run, tmp_path, capsys):
    words = ("precision=fp8_delayed", "precision.casts=eager", "trainer.max_steps=3", "checkpoint.every_steps=null")
    assert main(["train", *small_run(tmp_path, *words)]) == 0
    code, facts = probe(capsys, tmp_path / "run", *QUICK, "--output", tmp_path / "out")
    assert code == 0
    assert list(facts["recipes"]) == ["fp8_delayed"]
    assert load_config(tmp_path / "run" / "config.yaml", []).precision.name == "fp8_delayed"
    figures = facts["recipes"]["fp8_delayed"]
    assert figures["gradient"]["error"] < 0.2
    assert torch.tensor(figures["gradient"]["cosine"]) > 0.9


def test_outlier_channels_are_those_of_numpy(run_folder, tmp_path, capsys):
    """The weights' figures against NumPy; of a planted channel the operands that it reaches."""
    words = [run_folder, "precision=mxfp8", "precision.casts=eager", *QUICK, "--outliers", "--output", tmp_path / "o"]
    _, facts = probe(capsys, *words)
    weights = read_weights(find_subject(run_folder, [], None))
    assert list(facts["outliers"]) == list(facts["recipes"]["mxfp8"]["layers"])
    for layer, its in facts["outliers"].items():
        amax = np.abs(weights[f"{layer}.weight"].double().numpy()).max(axis=0)
        median = np.sort(amax)[(len(amax) - 1) // 2]
        assert its["w"]["max_over_median"] == pytest.approx(amax.max() / median)
        assert its["w"]["p99_over_median"] == pytest.approx(np.quantile(amax, 0.99) / median)
        assert (its["w"]["channel"], its["w"]["channels"]) == (amax.argmax(), len(amax))
        assert its.keys() == {"x", "w", "dy"}
    assert "outliers, the largest amax" in (tmp_path / "o" / "probe.txt").read_text()
    assert (tmp_path / "o" / "outliers.svg").read_text().count('<g id="axes_') == 3


def test_a_zero_operand_has_no_outliers():
    assert ChannelFigures.of(torch.zeros(3, 4)) is None
    assert ChannelFigures.of(torch.tensor([[1.0, float("inf")]])) is None
    planted = torch.ones(8, 5)
    planted[2, 3] = -40
    assert ChannelFigures.of(planted) == ChannelFigures(40.0, pytest.approx(1 + 39 * 0.96), 3, 5)
