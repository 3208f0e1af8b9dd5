"""`import` and `export` killed (SIGKILL) before each of their writes: under its name a folder is whole, or missing."""

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.model.weights import write
from tests.weight_folders import write_huggingface

WRITES = "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree", "shutil.copyfile"
"""Audit events of changes to the disk (https://docs.python.org/3/library/audit_events.html)."""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """An imported folder `base`, and next to it its source, the Hugging Face folder `hf`."""
    folder = tmp_path_factory.mktemp("base")
    shape = compose_config(["model=llama_tiny", "model.num_layers=1", "model.vocab_size=300"]).model
    write_huggingface(folder / "hf", shape)
    assert main(["import", str(folder / "hf"), "--output", str(folder / "base"), "--no-parity"]) == 0
    return folder / "base"


def killed_before(words: list[str], folder: Path, number: int) -> bool:
    """Run the command in a fork that is killed before its write number `number` to `folder`; return whether it was."""
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
        return os.WIFSIGNALED(status)
    code = 70
    try:
        writes = itertools.count()

        def kill_in_time(event: str, given: tuple) -> None:
            opened = event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR)
            if (opened or event in WRITES) and str(folder) in str(given[0]) and next(writes) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        torch.set_num_threads(1)
        sys.addaudithook(kill_in_time)
        code = main(words)
    finally:
        os._exit(code)


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.full
@pytest.mark.parametrize("verb", [pytest.param("import", marks=pytest.mark.full), "export"])  # by the same writer
def test_a_killed_conversion_leaves_a_complete_folder_or_none(verb, base, tmp_path, monkeypatch, capsys):
    source = base if verb == "export" else base.with_name("hf")
    whole_write = write.write_tensors
    monkeypatch.setattr(
        f"lightning_llm.cli.{'import_weights' if verb == 'import' else 'export'}.write_tensors",
        lambda folder, tensors: whole_write(folder, tensors, 100_000),
    )  # several files and an index
    out = tmp_path / "out"
    words = [verb, str(source), "--output", str(out), "--no-parity"]
    assert main(words) == 0
    new = content(out)
    assert "model.safetensors.index.json" in new
    earlier = {"config.json": b"{}", "model.safetensors": b"what was there before"}
    found = []  # after each kill
    for number in itertools.count():
        shutil.rmtree(out)
        out.mkdir()
        for name, data in earlier.items():
            (out / name).write_bytes(data)
        if not killed_before([*words, "--force"], tmp_path, number):
            break
        if not out.exists():  # between the two moves
            capsys.readouterr()
            assert main(words) == 2
            said = capsys.readouterr().err
            for part in ("its old content is restored", ".out.partial was left half-written", "already exists"):
                assert part in said
            found.append("missing")
        else:
            found.append("new" if content(out) == new else "earlier")
            write.undo_killed(out)
        assert content(out) == (new if found[-1] == "new" else earlier)
        assert ".out.partial" not in [each.name for each in tmp_path.iterdir()]
    assert found == sorted(found, key=["earlier", "missing", "new"].index)
    assert set(found) == {"earlier", "missing", "new"}
    assert found.count("earlier") > 5
    assert content(out) == new
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_reported_and_existing_files_are_kept(base, tmp_path, monkeypatch, capsys):
    """At each file in turn, and at the move that gives the name."""
    out = tmp_path / "out"
    words = ["export", str(base), "--output", str(out), "--no-parity", "--force"]
    assert main(words) == 0
    before = content(out)
    functions = "cli.export.write_tensors", "cli.export.write_card", "cli.export._write_json"
    for fails in (*functions, "model.weights.write.sync_to_disk"):
        with monkeypatch.context() as patch:
            patch.setattr(f"lightning_llm.{fails}", full)
            assert main(words) == 2
        assert "cannot be written (No space left on device). Free some space" in capsys.readouterr().err
        assert content(out) == before
        assert [each.name for each in tmp_path.iterdir()] == ["out"]
    moves = itertools.count()
    rename = os.rename
    with monkeypatch.context() as patch:
        patch.setattr(write.os, "rename", lambda *given: full() if next(moves) == 1 else rename(*given))
        assert main(words) == 2
    assert content(out) == before


def test_two_commands_do_not_write_one_folder_at_once(base, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    words = ["export", str(base), "--output", str(out), "--no-parity"]
    wrote = write.write_tensors
    codes = []

    def while_another(folder, tensors):
        if not codes:
            codes.append(None)  # the second command comes here, too, if nothing keeps it away
            codes.append(main(words))
        return wrote(folder, tensors)

    monkeypatch.setattr("lightning_llm.cli.export.write_tensors", while_another)
    assert main(words) == 0
    assert codes == [None, 2]
    said = capsys.readouterr().err
    assert "out is being written right now, by another command. Wait for it, or choose another." in said
    assert "killed" not in said
    assert "model.safetensors" in content(out)
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def full(*_, **__):
    raise OSError(28, "No space left on device")
