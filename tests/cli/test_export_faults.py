"""Faults around `export`: a library that raises anything, two commands at once, a run that deletes its checkpoints.

5 seconds.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.cli import export as export_verb
from lightning_llm.config.compose import compose_config
from lightning_llm.model.weights.load import state_dict_of
from lightning_llm.run.resume.weights import open_weights
from lightning_llm.train.checkpoint.manifest import Damage
from tests.weight_folders import write_huggingface


@pytest.fixture(scope="module")
def run(small_run, tmp_path_factory) -> Path:
    """A run with the checkpoints of steps 1 and 2."""
    root = tmp_path_factory.mktemp("run")
    assert (
        main(["train", *small_run(root, "trainer.max_steps=2", "checkpoint.every_steps=1", "checkpoint.keep_last=2")])
        == 0
    )
    return root / "run"


def words(source: Path, out: Path, *more: str) -> list[str]:
    return ["export", str(source), "--output", str(out), *more]


class UnknownError(Exception):
    """No class that this package knows."""


@pytest.mark.parametrize("error", [UnknownError("first line\nthe reason"), AssertionError(), ImportError("x")])
def test_any_error_of_transformers_is_one_line_and_leaves_no_folder(error, run, tmp_path, monkeypatch, capsys):
    from transformers import AutoModelForCausalLM

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    assert main(words(run, tmp_path / "out")) == 2
    printed = capsys.readouterr().err
    assert f"cannot load the model: {type(error).__name__}" in printed
    assert printed.strip().endswith("Skip the comparison with --no-parity.")
    assert "Traceback" not in printed
    assert not any(tmp_path.iterdir())


def test_without_the_comparison_transformers_still_has_to_accept_the_config(run, tmp_path, monkeypatch, capsys):
    from transformers import AutoConfig

    def fail(*_, **__):
        raise UnknownError("no such shape")

    monkeypatch.setattr(AutoConfig, "for_model", fail)
    assert main(words(run, tmp_path / "out", "--no-parity")) == 2
    assert "rejects the config.json of this model" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_folder_written_meanwhile_is_not_replaced(run, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    look = export_verb.output_problems

    def other_first(*arguments):
        found = look(*arguments)
        monkeypatch.setattr(export_verb, "output_problems", look)
        assert main(words(run, out, "--no-parity")) == 0
        return found

    monkeypatch.setattr(export_verb, "output_problems", other_first)
    assert main(words(run, out, "--no-parity", "--dtype", "bf16")) == 2
    assert "already exists" in capsys.readouterr().err
    assert '"dtype": "float32"' in (out / "config.json").read_text()
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_a_second_export_is_refused_while_the_first_writes(run, tmp_path, monkeypatch, capsys):
    out, write = tmp_path / "out", export_verb.write_card

    def second(*arguments):
        monkeypatch.setattr(export_verb, "write_card", write)
        assert main(words(run, out, "--no-parity", "--force")) == 2
        assert "is being written right now, by another command" in capsys.readouterr().err
        write(*arguments)

    monkeypatch.setattr(export_verb, "write_card", second)
    assert main(words(run, out, "--no-parity")) == 0
    assert (out / "model.safetensors").is_file()


def test_weights_stay_readable_when_the_run_deletes_their_checkpoint(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    before = state_dict_of(open_weights(run))
    weights = open_weights(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step=2")
    after = state_dict_of(weights)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_the_newest_checkpoint_is_used_if_one_is_deleted_while_it_is_verified(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    os.rename(folder / "step=1", tmp_path / "later")

    def verify(checkpoint):
        if checkpoint.step == 2:
            shutil.rmtree(checkpoint.folder)
            os.rename(tmp_path / "later", folder / "step=1")
            return [Damage(checkpoint.folder, "x", "is missing")]
        return []

    assert open_weights(tmp_path / "run", verify).path.name == "step=1"
    assert "deleted its checkpoint while it was being opened" in capsys.readouterr().err

    def always(checkpoint):
        aside = checkpoint.folder.with_name(f"aside-{checkpoint.step}")
        os.rename(checkpoint.folder, aside)
        shutil.copytree(run / "checkpoints" / f"step={3 - checkpoint.step}", folder / f"step={3 - checkpoint.step}")
        shutil.rmtree(aside)
        return [Damage(checkpoint.folder, "x", "is missing")]

    with pytest.raises(ConfigError, match=r"checkpoint\.keep_last to at least 2"):
        open_weights(tmp_path / "run", always)


def test_a_pipe_as_config_json_is_refused_at_once(tmp_path, capsys):
    shape = compose_config(["model=llama_tiny", "model.num_layers=1", "model.vocab_size=300"]).model
    folder = write_huggingface(tmp_path / "hf", shape)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert main(["import", str(folder), "--output", str(tmp_path / "base"), "--no-parity"]) == 2
    assert "config.json: cannot be read (it is a pipe or a device" in capsys.readouterr().err
