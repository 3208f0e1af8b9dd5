"""Tokenizing in processes: equal bits for every number of processes and batches; memory; a dead process. 2 s."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_llm.base.errors import ConfigError
from lightning_llm.data import prepare
from lightning_llm.data.opening import open_corpus
from lightning_llm.data.sources.source import Document, document
from lightning_llm.data.tokens import encode
from lightning_llm.data.tokens.encode import SMALLEST_TEXT_BYTES, encode_batches, process_count
from lightning_llm.data.tokens.token_files import TokenWriter
from lightning_llm.data.tokens.tokenizer import Tokenizer, train_bpe, write_bytes_tokenizer
from tests.data.corpus_files import data_config, words, write_jsonl


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe((words(seed, 30) for seed in range(20)), 300, file)
    return Tokenizer(file)


TEXTS = [words(seed, 3 + seed % 40) + " né 日本 <|endoftext|>" for seed in range(60)]


class LateWorker:
    """In the place of a process: answers late, some batches later than others."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.process = SimpleNamespace(kill=lambda: None)

    def encode(self, texts: list[str]) -> tuple[list[np.ndarray], list[int]]:
        time.sleep(len(texts[0]) % 3 / 1000)
        return self.tokenizer.encode_counted(texts)

    def close(self) -> None:
        pass


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(processes=st.integers(1, 5), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_any_processes_and_batches_give_each_documents_tokens_in_order(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, processes: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(encode, "_Worker", LateWorker)
    documents = iter([document(text) for text in TEXTS])
    batches = [batch for size in sizes if (batch := list(islice(documents, size)))]
    read = 0

    def reading() -> Iterator[list[Document]]:
        nonlocal read
        for batch in batches:
            read += 1
            yield batch

    made = []
    for done, encoded in enumerate(encode_batches(tokenizer, reading(), processes)):
        assert read <= done + encode.AHEAD * processes  # no more is in memory
        made.append(encoded)
    assert [batch for batch, *_ in made] == batches
    expected = [tokenizer.encode_batch([each.text])[0].tolist() for batch in batches for each in batch]
    assert [tokens.tolist() for _, all_tokens, _ in made for tokens in all_tokens] == expected


def test_a_cache_has_the_same_bits_however_it_was_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"a": {"loader": "jsonl", "path": str(write_jsonl(tmp_path / "a.jsonl", TEXTS))}}
    made = set()
    for processes, batch_bytes in ((1, 1 << 20), (1, 1), (2, 700)):
        monkeypatch.setattr(prepare, "ENCODE_BYTES", batch_bytes)
        cache = tmp_path / f"{processes}-{batch_bytes}"
        config = data_config(cache, source, tokenizer={"kind": "bpe", "vocab_size": 300}, tokenize_processes=processes)
        open_corpus(config, 0, 300)
        (folder,) = (each for each in cache.glob("tokens-*") if each.is_dir())
        files = {file.name: blake2b(file.read_bytes()).hexdigest() for file in folder.iterdir() if file.is_file()}
        assert len(files) == 6
        made.add(tuple(sorted(files.items())))
    assert len(made) == 1  # the manifest's own digest among them


def test_who_encodes(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(7), raising=False)
    assert process_count(None, SMALLEST_TEXT_BYTES, tokenizer) == 7
    assert process_count(None, SMALLEST_TEXT_BYTES - 1, tokenizer) == 1
    assert process_count(4, 10, tokenizer) == 4
    write_bytes_tokenizer(tmp_path / "tokenizer.json")
    assert process_count(4, SMALLEST_TEXT_BYTES, Tokenizer(tmp_path)) == 1


def _encoders() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "lightning_llm.data.tokens.encode" in each.cmdline()]


def test_a_process_that_is_killed_ends_the_run_in_one_line(tokenizer: Tokenizer) -> None:
    def batches() -> Iterator[list[Document]]:
        yield [document("one")]
        for each in _encoders():
            os.kill(each.pid, signal.SIGKILL)
        while True:
            yield [document("two")]

    with pytest.raises(ConfigError, match=r"data\.tokenize_processes: a process .* exit code -9") as caught:
        list(encode_batches(tokenizer, batches(), 2))
    assert len(caught.value.problems) == 1
    assert _encoders() == []


def test_a_writer_holds_no_more_of_a_long_split_than_of_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_llm.data.tokens.token_files.FLUSH_BYTES", 4096)
    most = {}
    for count in (2_000, 20_000):
        (folder := tmp_path / str(count)).mkdir()
        writer = TokenWriter(folder, "train", np.dtype(np.uint16), 0)
        held = []
        for _ in range(count):
            writer.add(np.ones(3, np.uint32))
            held.append(len(writer._starts) + len(writer._pending))
        most[count] = max(held)
        assert writer.close()["documents"] == count
        assert np.fromfile(folder / "train.starts", "<i8").tolist() == list(range(0, 4 * count, 4))
    assert most[2_000] == most[20_000] <= 3 * 4096 / 8


@pytest.mark.full
def test_memory_does_not_grow_with_the_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """20 and 200 MB in, and the sampled peak memory of this process. A minute of two cores."""
    line = words(1, 400)
    peaks = []
    for megabytes in (20, 200):
        file = write_jsonl(tmp_path / f"{megabytes}.jsonl", [line] * (megabytes * 1_000_000 // len(line)))
        source: dict[str, Any] = {"a": {"loader": "jsonl", "path": str(file)}}
        keys: dict[str, Any] = {
            "tokenizer": {"kind": "file", "path": str(tokenizer.path)},
            "validation": {"fraction": 0.0},
        }
        config = data_config(tmp_path / str(megabytes), source, **keys, tokenize_processes=2)
        held, stop = [psutil.Process().memory_info().rss], threading.Event()

        def watch(held: list[int] = held, stop: threading.Event = stop) -> None:
            while not stop.wait(0.05):
                held.append(psutil.Process().memory_info().rss)

        watcher = threading.Thread(target=watch)
        watcher.start()
        began = time.monotonic()
        open_corpus(config, 0, 300)
        stop.set()
        watcher.join()
        peaks.append(max(held) - held[0])
        print(f"{megabytes} MB: {peaks[-1] / 1e6:.1f} MB more, {time.monotonic() - began:.0f} s")
    assert peaks[1] < peaks[0] + 64e6  # a tenth of the text's difference would be 18 MB, its tokens 180 MB


def test_a_process_ends_without_a_word_when_who_asked_is_gone(tokenizer: Tokenizer) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "lightning_llm.data.tokens.encode"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        process.stdout.close()
        for message in (tokenizer, TEXTS):
            pickle.dump(message, process.stdin)
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_a_fault_of_ours_is_not_reported_as_the_tokenizers(monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode_counted", lambda *_: [][1])
    tokenizer = Tokenizer.__new__(Tokenizer)
    with pytest.raises(IndexError):
        list(encode_batches(tokenizer, [[document("text")]], 1))
