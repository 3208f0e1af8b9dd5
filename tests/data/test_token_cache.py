"""Built once, never torn, never wrong: processes at once, a killed builder, a cut file, a full disk."""

import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_llm.base.errors import ConfigError
from lightning_llm.data import cache
from lightning_llm.data.cache import (
    MANIFEST,
    build_once,
    disk_problem,
    product_folder,
    read_manifest,
)
from lightning_llm.data.tokens.token_files import TokenStream, TokenWriter

SLOW_BUILD = """
import sys, time
from pathlib import Path
from lightning_llm.data.cache import build_once

def build(folder):
    with (Path(sys.argv[1]) / "builders").open("a") as log:
        log.write("built\\n")
    (folder / "half").write_text("x" * 1000)
    time.sleep(float(sys.argv[2]))
    (folder / "whole").write_text("y" * 1000)
    return {"answer": 42}

print(build_once(Path(sys.argv[1]) / "cache", "kind", {"a": 1}, build)[1]["answer"])
"""


def start(folder: Path, seconds: float) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", SLOW_BUILD, str(folder), str(seconds)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_four_processes_build_once(tmp_path: Path) -> None:
    processes = [start(tmp_path, 0.5) for _ in range(4)]
    assert [p.communicate(timeout=60)[0] for p in processes] == ["42\n"] * 4
    assert (tmp_path / "builders").read_text() == "built\n"


def test_a_killed_builder_leaves_nothing_that_is_used(tmp_path: Path) -> None:
    killed = start(tmp_path, 60)
    folder = product_folder(tmp_path / "cache", "kind", {"a": 1})
    deadline = time.monotonic() + 30
    while not (folder.with_name(folder.name + ".partial") / "half").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert read_manifest(folder) is None
    assert start(tmp_path, 0).communicate(timeout=60)[0] == "42\n"
    assert (tmp_path / "builders").read_text() == "built\nbuilt\n"
    assert sorted(p.name for p in folder.iterdir()) == ["half", MANIFEST, "whole"]
    assert not folder.with_name(folder.name + ".partial").exists()


def fill(folder: Path) -> dict[str, Any]:
    (folder / "data").write_bytes(b"0123456789")
    return {}


def test_a_cut_file_is_built_again(tmp_path: Path) -> None:
    folder, _ = build_once(tmp_path, "k", 1, fill)
    os.truncate(folder / "data", 5)
    assert read_manifest(folder) is None
    build_once(tmp_path, "k", 1, fill)
    assert (folder / "data").read_bytes() == b"0123456789"


def test_a_failed_build_is_removed_and_its_error_kept(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> dict[str, Any]:
        fill(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path, "k", 1, interrupted)
    assert [p.suffix for p in tmp_path.iterdir()] == [".lock"]


def test_full_disk_and_unusable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path) -> dict[str, Any]:
        fill(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ConfigError, match=r"data\.cache_dir: .*ran full"):
        build_once(tmp_path, "k", 1, full)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Choose a folder"):
        build_once(tmp_path / "file" / "below", "k", 1, fill)
    assert disk_problem(tmp_path / "not" / "yet", 1) is None
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=70_000_000))
    problem = disk_problem(tmp_path, 10_000_000)
    assert problem is not None
    assert "10,000,000" in problem.text
    assert "70,000,000" in problem.text


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_a_stream_reads_the_written_tokens(tmp_path: Path, dtype: type[np.unsignedinteger[Any]]) -> None:
    documents = [[5, 6, 7], [8], [9, 10], [11] * 5]
    writer = TokenWriter(tmp_path, "train", np.dtype(dtype), end_of_document=0)
    for document in documents:
        writer.add(np.array(document, np.uint32))
    entry = writer.close()
    stream = TokenStream(tmp_path, "train", np.dtype(dtype).str, entry["digest"])
    flat = [token for document in documents for token in [*document, 0]]
    assert stream.tokens.tolist() == flat
    assert stream.tokens.dtype == dtype
    assert entry["tokens"] == len(flat)
    assert entry["documents"] == 4
    owner = [i for i, document in enumerate(documents) for _ in [*document, 0]]
    for start_token in range(len(flat)):
        for length in range(1, len(flat) - start_token + 1):
            expected = [d - owner[start_token] for d in owner[start_token : start_token + length]]
            assert stream.document_ids(start_token, length).tolist() == expected
    copied = pickle.dumps(stream)
    assert len(copied) < 500
    assert pickle.loads(copied).tokens.tolist() == flat


def filled_product(cache_dir: Path) -> tuple[Path, list[int]]:
    """Build or open a product; return its folder, and one entry for each time that it was built."""
    built: list[int] = []

    def build(folder: Path) -> dict[str, Any]:
        built.append(1)
        (folder / "train.bin").write_bytes(bytes(range(256)) * 4)
        (folder / "train.starts").write_bytes(b"\0" * 64)
        return {"splits": {"train": {"tokens": 512}}}

    return build_once(cache_dir, "tokens", {"a": 1}, build)[0], built


@pytest.mark.parametrize("name", ["train.bin", "train.starts", MANIFEST])
@pytest.mark.parametrize("bit", [0, 3001])
def test_a_flipped_bit_is_found_and_the_product_built_again(tmp_path, capsys, name, bit):
    folder, built = filled_product(tmp_path)
    assert len(built) == 1
    assert filled_product(tmp_path)[1] == []
    whole = (folder / name).read_bytes()
    flipped = bytearray(whole)
    flipped[bit // 8 % len(whole)] ^= 1 << bit % 8
    times = (folder / name).stat()
    (folder / name).write_bytes(flipped)
    os.utime(folder / name, ns=(times.st_atime_ns, times.st_mtime_ns))  # bit rot does not change the times
    assert len(filled_product(tmp_path)[1]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"{folder} is damaged and is built again: {name} " in told
    assert (folder / name).read_bytes() == whole
    assert filled_product(tmp_path)[1] == []


def test_a_verified_cache_is_trusted_for_a_day(tmp_path, monkeypatch):
    folder, _ = filled_product(tmp_path)
    read: list[Path] = []

    def counting(file: Path, written: Any) -> None:
        read.append(file)

    monkeypatch.setattr(cache, "content_problem", counting)
    assert filled_product(tmp_path)[1] == []
    assert read == []
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + cache.VERIFIED_SECONDS + 1)
    assert filled_product(tmp_path)[1] == []
    assert sorted(file.name for file in read) == ["train.bin", "train.starts"]
    folder.with_name(f"{folder.name}.verified").write_text("nonsense")
    assert filled_product(tmp_path)[1] == []
    assert len(read) == 4


def test_a_product_of_the_first_release_is_built_again(tmp_path, capsys):
    folder, _ = filled_product(tmp_path)
    (folder / MANIFEST).write_text('{"files": {"train.bin": 1024, "train.starts": 64}}')
    assert len(filled_product(tmp_path)[1]) == 1
    assert "has no digest" in capsys.readouterr().err
