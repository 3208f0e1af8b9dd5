"""Files of the working folder replace no library in any process: one function starts every interpreter."""

import ast
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
from lightning.fabric.utilities.rank_zero import _get_rank

from lightning_llm.__main__ import main
from lightning_llm.base import process
from lightning_llm.data.sources.source import document
from lightning_llm.data.tokens.encode import encode_batches
from lightning_llm.data.tokens.tokenizer import Tokenizer, write_bytes_tokenizer
from tests import test_architecture
from tests.messages import missing

PLACES = {"lightning_llm.base.process", "lightning_llm.run.launch.torch_agent", "lightning_llm.config.workspace"}
"""Modules that may name the interpreter: the function, the call of torch's agent, and a path that is printed."""


def test_no_other_place_starts_an_interpreter():
    found = {
        module
        for module, file in test_architecture.modules().items()
        if "executable" in file.read_text()
        for node in ast.walk(test_architecture.parsed(file))
        if isinstance(node, ast.Attribute) and node.attr == "executable" and ast.unparse(node.value) == "sys"
    }
    assert found == PLACES


def test_files_of_the_working_folder_replace_no_library(tmp_path, monkeypatch):
    for name in ("random", "json", "tokenizers", "numpy", "multiprocessing"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the working folder\\'s {name}.py was run')\n")
    monkeypatch.chdir(tmp_path)
    batches = [[document("the tide tables")], [document("were pinned")]]
    write_bytes_tokenizer(tmp_path / "bytes.json")
    tokenizer = Tokenizer(tmp_path / "bytes.json")
    encoded = [ids for _, all_ids, *_ in encode_batches(tokenizer, batches, 2) for ids in all_ids]
    assert [tokenizer.decode(ids.tolist()) for ids in encoded] == ["the tide tables", "were pinned"]
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    process.leave_working_folder()
    assert str(tmp_path) not in sys.path  # as `python -m lightning_llm` finds it
    assert os.environ[process.SAFE_PATH] == "1"


@pytest.mark.parametrize("word", ["", "."])
def test_child_processes_find_a_checkout_in_the_working_directory(monkeypatch, word):
    monkeypatch.chdir(process.ROOT)
    monkeypatch.setattr(sys, "path", [word])
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert process.python_environment()["PYTHONPATH"] == f"{process.ROOT}{os.pathsep}/mine"
    monkeypatch.setattr(sys, "path", [])
    assert "PYTHONPATH" not in process.python_environment()


@pytest.mark.parametrize(("value", "rank"), [("", None), (" ", None), ("3", 3)])
@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_PROCID"])
def test_an_empty_rank_counts_as_unset_where_lightning_reads_it(monkeypatch, name, value, rank):
    monkeypatch.setattr(os, "environ", {**{k: v for k, v in os.environ.items() if "RANK" not in k}, name: value})
    for step in ("use_utf8", "leave_working_folder", "open_standard_streams", "take_process"):
        monkeypatch.setattr(f"lightning_llm.__main__.{step}", lambda: None)
    monkeypatch.setattr("lightning_llm.__main__.early_signals", lambda words: nullcontext())
    monkeypatch.setattr("lightning_llm.cli.command_line.run_verb", lambda words: _get_rank())
    monkeypatch.setattr(sys, "argv", ["lightning-llm", "plan"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert main() == rank


def test_a_locale_of_ascii_alone_does_not_decide_what_a_command_reads(tmp_path):
    """Python decodes characters that the locale lacks to surrogates, which YAML and the schema reject."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "é.yaml").write_text("# @package _global_\n# Ωμέγα\ntrainer: {max_steps: 3}\n", "utf-8")
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = process.python_module("lightning_llm", "config", "--config-dir", str(tmp_path), "recipe=é", "run.name=é")
    done = subprocess.run(command, env=os.environ | ascii_alone, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "name: é" in done.stdout.decode()


def test_a_working_folder_that_was_deleted_is_named(tmp_path):
    (tmp_path / "gone").mkdir()
    command = ["sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", *process.python_module("lightning_llm", "config")]
    done = subprocess.run(command, cwd=tmp_path / "gone", capture_output=True, check=False, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert missing(done.stderr, "error: ", "working directory", "deleted", "Change to an existing one") == []
    assert done.stderr.count("\n") == 1
