"""Import, start from, export: the same weights all the way; problems are named before anything is written.

25 seconds.
"""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.cli import export as export_verb
from lightning_llm.cli import import_weights as parity
from lightning_llm.compare.runs.differences import meaningful
from lightning_llm.config.compose import compose_config
from lightning_llm.config.from_file import load_config
from lightning_llm.model.weights import write
from lightning_llm.model.weights.load import InitialWeights, state_dict_of
from lightning_llm.run.resume.weights import init_problems, open_weights, pieces_of_new_tokens, shape_differences
from lightning_llm.tracking.files import read_records, summary_of
from lightning_llm.tracking.reading import Run
from tests.weight_folders import write_huggingface


@pytest.fixture(scope="module")
def places(small_run, tmp_path_factory):
    """A run, exported, and imported again."""
    root = tmp_path_factory.mktemp("places")
    assert main(["train", *small_run(root, "trainer.max_steps=2", "model.name=small")]) == 0
    assert main(["export", str(root / "run"), "--output", str(root / "release")]) == 0
    assert main(["import", str(root / "release"), "--output", str(root / "base")]) == 0
    return root


def words_of(small_run, folder: Path, init, *more: str) -> list[str]:
    """A small run's words, less those of model and tokenizer, from `init`."""
    kept = [each for each in small_run(folder) if not each.startswith(("model", "data.tokenizer"))]
    return [*kept, f"model.init_from={init}", "trainer.max_steps=2", *more]


def load_name(base: Path) -> str:
    return json.loads((base / "weights.json").read_text())["model"]["name"]


def test_run_release_and_base_hold_the_same_weights(places):
    states = [state_dict_of(open_weights(places / name)) for name in ("run", "release", "base")]
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in states[0].items())


def test_a_run_starts_where_the_other_ended_whatever_form_the_weights_have(places, small_run, tmp_path, capsys):
    losses = []
    ended = [line for line in read_records(places / "run" / "metrics.jsonl") if "val_loss" in line][-1]
    for form in ("run", "release", "base", "run/checkpoints/step=2"):
        folder = tmp_path / form.replace("/", "-")
        assert main(["train", *words_of(small_run, folder, places / form)]) == 0
        assert "init   " in capsys.readouterr().out
        at_start, *lines = read_records(folder / "run" / "metrics.jsonl")
        assert (at_start["step"], at_start["val_loss"]) == (0, ended["val_loss"])  # the base, as it came
        losses.append([line.get("loss") for line in lines])
        config = load_config(folder / "run" / "config.yaml", [])
        assert (config.model.hidden_size, config.model.init_from) == (32, str(places / form))
        assert config.data.tokenizer.path == str(places / form.partition("/")[0] / "tokenizer.json")
        known = summary_of(folder / "run")["init"]
        assert known["named"] == str(places / form)
        assert len(known["digest"]) == 32
    assert losses[1:] == losses[:1] * 3
    whole = words_of(small_run, tmp_path / "random", places / "run")
    random = ["model=llama_tiny" if each.startswith("model.init_from") else each for each in whole]
    assert main(["train", *random]) == 0
    first = next(iter(read_records(tmp_path / "random" / "run" / "metrics.jsonl")))["loss"]
    assert first > losses[0][0]


def test_a_run_resumes_with_moved_initial_weights_but_not_with_other_weights(places, small_run, tmp_path, capsys):
    words = words_of(small_run, tmp_path, places / "base", "trainer.max_steps=1", "schedule.total_steps=4")
    assert main(["train", *words]) == 0
    moved = tmp_path / "moved"
    shutil.copytree(places / "base", moved)
    tokenizer = f"data.tokenizer.path={moved / 'tokenizer.json'}"
    again = [*words[:-3], "trainer.max_steps=2", "schedule.total_steps=4", "resume=auto", tokenizer]
    again += ["data.tokenizer.kind=file", "data.tokenizer.vocab_size=null", f"model.init_from={moved}"]
    again = [each for each in again if each != f"model.init_from={places / 'base'}"]
    assert main(["train", *again]) == 0, capsys.readouterr().err
    assert summary_of(tmp_path / "run")["init"]["named"] == str(places / "base")
    other = tmp_path / "other"
    shutil.copytree(places / "release", other)
    state = load_file(other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in state.items()}, other / "model.safetensors")
    again = [each.replace(str(moved), str(other)) for each in again]
    capsys.readouterr()
    assert main(["train", *again, "trainer.max_steps=3"]) == 2
    assert "but the run started from" in capsys.readouterr().err


def test_all_differences_from_the_weights_are_reported_before_anything_is_written(places, small_run, tmp_path, capsys):
    words = small_run(tmp_path, f"model.init_from={places / 'base'}", "model.num_layers=3", "model.norm_eps=1e-3")
    words += ["model.vocab_size=310", "model.blocks={attention: {mixer: {kind: attention, window: 5}}}"]
    assert main(["train", *words]) == 2
    said = capsys.readouterr().err
    for part in (
        "model.num_layers: is 3, but 2 in the weights",
        "model.norm_eps: is 0.001, but 1e-05 in the weights",
        "model.vocab_size=310: must be at least 320, the rows of the weights",
        "data.tokenizer.kind: is 'bpe', ",
    ):
        assert part in said
    assert not (tmp_path / "run").exists()
    same_depth = [*words, "model.num_layers=2"]
    assert main(["plan", *same_depth]) == 2
    assert "block 0 differs from the weights (mixer.window is 5, but None there). " in capsys.readouterr().err


def test_another_tokenizer_is_named_by_its_tokens(places, small_run, tmp_path):
    kind = ["data.tokenizer.kind=bytes", "data.tokenizer.vocab_size=null", "data.tokenizer.path=null"]
    config = compose_config(words_of(small_run, tmp_path, places / "base", *kind))
    assert config.data.tokenizer.kind == "bytes"  # overrides stay
    (problem,) = init_problems(config)
    assert "tokens have other ids in the weights' tokenizer ('<|endoftext|>' is id 256, but 0 there" in problem.text


def test_positional_settings_may_differ_from_the_weights_and_are_reported(places, small_run, tmp_path, capsys):
    longer = ["model.rope_theta=5e5", "model.max_sequence_length=1024"]
    assert main(["train", *words_of(small_run, tmp_path, places / "base", *longer)]) == 0
    said = capsys.readouterr().out
    assert (
        "model.max_sequence_length is 1024, but 512 in the weights; model.rope_theta is 500000.0, but 10000.0" in said
    )


def test_init_from_is_part_of_the_identity_and_alone_gives_the_shape(places, small_run, tmp_path, capsys):
    words = [*words_of(small_run, tmp_path, places / "base"), "run.name=run"]  # else the time is in it
    alone, spelled = compose_config(words), compose_config([*words, "model=from_weights"])
    assert alone == spelled
    assert alone.model.name == "release"
    with pytest.raises(ConfigError, match=r"model\.init_from: a value must be given"):
        compose_config(["model=from_weights"])
    for path, said in (
        (tmp_path / "no", "does not exist"),
        (Path(__file__), "is a file"),
        (tmp_path, "contains no weights"),
    ):
        tmp_path.mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=f"{said}. Give a folder that") as caught:
            compose_config([*words_of(small_run, tmp_path, path), "trainer.max_stepz=3"])
        assert len(caught.value.problems) == 2


def test_a_recipe_s_own_tokenizer_file_stays(places, tmp_path):
    (tmp_path / "recipe").mkdir()
    tokenizer = "data:\n  tokenizer: {kind: file, path: /mine.json, vocab_size: null}\n"
    (tmp_path / "recipe" / "own.yaml").write_text(f"# @package _global_\n{tokenizer}")
    config = compose_config(["recipe=own", f"model.init_from={places / 'base'}"], tmp_path)
    assert (config.model.name, config.data.tokenizer.path) == ("release", "/mine.json")


def test_a_larger_vocabulary_needs_a_tokenizer_that_keeps_the_ids(places, small_run, tmp_path, capsys):
    backend = Backend.from_file(str(places / "base" / "tokenizer.json"))
    new = [f"the new word {number} of many" for number in range(24)]
    backend.add_tokens(new)
    backend.save(str(tmp_path / "tokenizer.json"))
    more = ["data.tokenizer.kind=file", f"data.tokenizer.path={tmp_path}", "data.tokenizer.vocab_size=null"]
    words = words_of(small_run, tmp_path, places / "base", *more)
    assert main(["train", *words]) == 2
    assert "324" in capsys.readouterr().err  # 300 learned, 24 added, and the weights have 320 rows
    assert main(["train", *words, "model.vocab_size=324"]) == 0
    assert ", 4 new tokens)" in capsys.readouterr().out
    assert summary_of(tmp_path / "run")["init"]["new_tokens"] == 4


def test_rows_of_new_tokens_are_means_of_their_pieces_or_of_all(places, small_run, tmp_path, capsys):
    backend = Backend.from_file(str(places / "base" / "tokenizer.json"))
    backend.add_tokens([AddedToken(f"filler {number}", normalized=False) for number in range(20)])
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("Straße", "日本")])
    backend.save(str(tmp_path / "tokenizer.json"))
    more = ["data.tokenizer.kind=file", f"data.tokenizer.path={tmp_path}", "data.tokenizer.vocab_size=null"]
    config = compose_config([*words_of(small_run, tmp_path, places / "base", *more), "model.vocab_size=322"])
    weights = open_weights(places / "base")
    assert weights.config.vocab_size == 320
    pieces = pieces_of_new_tokens(config, weights, tmp_path / "tokenizer.json")
    own = Backend.from_file(str(places / "base" / "tokenizer.json"))
    assert pieces == {320: own.encode("Straße").ids, 321: own.encode("日本").ids}
    initial, width = InitialWeights(weights, config.model, {**pieces, 321: []}), config.model.hidden_size
    old = weights.rows("embedding.weight", 0, 320).double()
    new = initial("embedding.weight", 320 * width, 322 * width).view(2, width).double()
    torch.testing.assert_close(new[0], old[pieces[320]].mean(0), rtol=0, atol=1e-7)
    torch.testing.assert_close(new[1], old.mean(0), rtol=0, atol=1e-7)


def test_runs_from_other_weights_at_the_same_path_are_not_compared_as_controlled(tmp_path):
    def run(digest):
        return Run(tmp_path, {"model.init_from": "/base"}, {"code_hash": "x", "init": {"digest": digest}})

    assert meaningful(run("a"), run("a")) == {}
    assert meaningful(run("a"), run("b")) == {"init_digest": ("a", "b")}


def test_runs_from_the_same_weights_at_two_paths_are(tmp_path):
    summary = {"code_hash": "x", "init": {"digest": "a"}}
    one, other = (Run(tmp_path, {"model.init_from": path}, summary) for path in ("/base", "/copy"))
    assert meaningful(one, other) == {}


def test_an_imported_folder_whose_bytes_changed_is_refused(places, small_run, tmp_path, capsys):
    folder = tmp_path / "base"
    shutil.copytree(places / "base", folder)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["train", *words_of(small_run, tmp_path, folder)]) == 2
    assert "was changed or is damaged" in capsys.readouterr().err
    assert main(["export", str(folder), "--output", str(tmp_path / "out")]) == 2
    assert "was changed or is damaged" in capsys.readouterr().err
    (folder / "weights.json").write_text("{}")
    assert main(["plan", *words_of(small_run, tmp_path, folder)]) == 2
    assert "weights.json: has no digest" in capsys.readouterr().err


def test_export_is_what_transformers_loads(places, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    release = places / "release"
    tokenizer = AutoTokenizer.from_pretrained(release)
    assert tokenizer.eos_token == "<|endoftext|>"
    assert GenerationConfig.from_pretrained(release).eos_token_id == tokenizer.eos_token_id == 0
    model = AutoModelForCausalLM.from_pretrained(release)
    assert model.config.eos_token_id == 0
    assert model.dtype == torch.float32
    card = (release / "README.md").read_text()
    last = [line for line in read_records(places / "run" / "metrics.jsonl") if "val_loss" in line][-1]
    assert f"| val_loss | {last['val_loss']:.4f} (step 2) |" in card
    assert "| started from | random weights |" in card
    assert (release / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_bf16_shards_and_their_index(places, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(write, "SHARD_BYTES", 1)
    monkeypatch.setattr(
        export_verb, "write_tensors", lambda folder, tensors: write.write_tensors(folder, tensors, 40_000)
    )
    assert main(["export", str(places / "run"), "--output", str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    assert "differ from transformers' by at most" in capsys.readouterr().out
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 1
    assert json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["metadata"]["total_size"] > 0
    with safe_open(files[0], "pt") as opened:
        assert {opened.get_tensor(name).dtype for name in opened.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_nothing_is_overwritten_or_left_half(places, tmp_path, monkeypatch, capsys):
    out, source = tmp_path / "out", str(places / "run")
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    for flags, said in (([], "already exists. Choose another, or add --force"), (["--force"], "holds thesis.tex")):
        assert main(["export", source, "--output", str(out), *flags]) == 2
        assert said in capsys.readouterr().err
        assert main(["import", str(places / "release"), "--output", str(out), *flags]) == 2
        assert said in capsys.readouterr().err
    inside = str(places / "release" / "base")
    assert main(["import", str(places / "release"), "--output", inside]) == 2
    assert "is inside the input folder" in capsys.readouterr().err
    (out / "thesis.tex").unlink()
    assert main(["export", source, "--output", str(out), "--force", "--no-parity"]) == 0
    assert "not compared with transformers (--no-parity)" in capsys.readouterr().out
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(export_verb, "write_card", killed)
    assert main(["export", source, "--output", str(out), "--force", "--no-parity"]) == 130
    assert main(["export", source, "--output", str(tmp_path / "new"), "--no-parity"]) == 130
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out"]


def test_weights_with_other_logits_are_not_written(tmp_path, monkeypatch, capsys):
    shape = compose_config(["model=llama_tiny", "model.num_layers=1", "model.vocab_size=300"]).model
    folder = write_huggingface(tmp_path / "hf", shape)
    right = parity._ours
    monkeypatch.setattr(parity, "_ours", lambda weights, tokens, codes: right(weights, tokens.roll(1), codes))
    assert main(["import", str(folder), "--output", str(tmp_path / "base")]) == 1
    assert "the converted model is not equivalent. Nothing was written" in capsys.readouterr().err
    assert not (tmp_path / "base").exists()


def test_a_name_on_the_hub_is_taken_from_its_cache_offline(places, tmp_path, monkeypatch, capsys):
    snapshot = tmp_path / "cache" / "models--me--small" / "snapshots" / ("0" * 40)
    shutil.copytree(places / "release", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    assert main(["import", "me/small", "--output", "base", "--no-parity"]) == 0
    assert load_name(tmp_path / "base") == "small"  # not the commit, which the folder is called after
    assert main(["import", "me/other", "--output", "base2", "--no-parity"]) == 2
    assert "me/other: not a folder, and the download from the Hub failed" in capsys.readouterr().err
    assert main(["import", "me//x", "--output", "base2"]) == 2
    assert "or a Hub model (owner/name)" in capsys.readouterr().err


def test_without_transformers_the_comparison_is_refused_not_skipped(places, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(parity.importlib.util, "find_spec", lambda name: None)
    assert main(["import", str(places / "release"), "--output", str(tmp_path / "base")]) == 2
    assert "pip install transformers, or use --no-parity" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(parity.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 10})())
    assert main(["import", str(places / "release"), "--output", str(tmp_path / "base")]) == 2
    assert "needs two copies" in capsys.readouterr().err


def test_a_failed_export_reports_where_the_weights_are(small_run, tmp_path, capsys):
    assert main(["train", *small_run(tmp_path, "trainer.max_steps=1", "model.norm=layernorm")]) == 0
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "has no Hugging Face counterpart: norm=layernorm" in said
    assert f"model.init_from={tmp_path / 'run' / 'checkpoints' / 'step=1'} can still load its weights" in said


def test_a_differing_number_of_experts_is_named_alone():
    theirs, ours, dense = (
        compose_config(["model=moe_tiny", f"model.{keys}"]).model
        for keys in ("layers=[moe]", "blocks.moe.feed_forward.experts=4", "layers=[attention]")
    )
    (problem,) = shape_differences(theirs, ours)
    assert "differs from the weights (feed_forward.experts is 4, but 8 there). " in problem.text
    (problem,) = shape_differences(theirs, dense)
    assert "(feed_forward.kind is 'swiglu', but 'moe' there). " in problem.text
