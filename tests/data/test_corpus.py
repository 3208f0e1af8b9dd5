"""The corpus against a plain re-packing of the same documents, and its guarantees to a run."""

import json
import multiprocessing
import os
import pickle
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.schema.data import DataConfig
from lightning_llm.data import prepare
from lightning_llm.data.check import check_data
from lightning_llm.data.corpus import IGNORED, Corpus
from lightning_llm.data.opening import open_corpus
from lightning_llm.data.prepare import train_bpe
from lightning_llm.data.report import source_reports
from tests.data.corpus_files import data_config, words, write_jsonl

END = 256
VOCABULARY = 300


def packed(file: str, fraction: float) -> tuple[list[int], list[int], list[int], list[int]]:
    """Pack a jsonl file anew: training tokens, their owners' index, validation tokens, owners. Independent code."""
    streams: tuple[list[int], list[int], list[int], list[int]] = [], [], [], []
    for i, line in enumerate(Path(file).read_text().splitlines()):
        content = json.loads(line)["text"].encode()
        key = int.from_bytes(blake2b(content, digest_size=8).digest(), "little")
        side = 2 if key / 2**64 < fraction else 0
        streams[side].extend([*content, END])
        streams[side + 1].extend([i] * (len(content) + 1))
    return streams


@pytest.fixture
def corpus(cache: Path, two_files: dict[str, Any]) -> Corpus:
    return open_corpus(data_config(cache, two_files, document_mask=True), 5, VOCABULARY)


def test_samples_are_windows_of_the_packed_documents(corpus: Corpus, two_files: dict[str, Any]) -> None:
    length = corpus.config.sequence_length
    repacked = [packed(source["path"], 0.2) for source in two_files.values()]
    for index in range(500):
        sample = corpus.sample(index)
        train, owner, _, _ = repacked[sample.source]
        start = sample.window * length
        assert sample.tokens.tolist() == train[start : start + length + 1]
        relative = np.unique(owner[start : start + length], return_inverse=True)[1]
        assert sample.document_ids is not None
        assert sample.document_ids.tolist() == relative.tolist()


def test_every_epoch_covers_the_tokens_of_a_source_exactly(corpus: Corpus, two_files: dict[str, Any]) -> None:
    train = packed(two_files["b"]["path"], 0.2)[0]
    length = corpus.config.sequence_length
    count = (len(train) - 1) // length
    seen: dict[int, list[int]] = {}
    for index in range(4 * count * 3):
        sample = corpus.sample(index)
        if sample.source == 1:
            seen.setdefault(sample.epoch, []).append(sample.window)
    assert len(seen) >= 3
    assert all(sorted(seen[epoch]) == list(range(count)) for epoch in (0, 1))
    assert seen[0] != seen[1]


@pytest.mark.parametrize(("world", "micro"), [(1, 2), (1, 8), (2, 2), (4, 1), (4, 2), (8, 1)])
def test_the_global_batch_is_the_same_in_every_layout(
    cache: Path, two_files: dict[str, Any], world: int, micro: int
) -> None:
    config = data_config(cache, two_files, micro_batch_size=micro, document_mask=True)
    corpus = open_corpus(config, 5, VOCABULARY)
    for step in (0, 1, 77):
        samples = [corpus.sample(step * 8 + row) for row in range(8)]
        expected = torch.tensor(np.stack([s.tokens for s in samples]))
        count = 8 // (micro * world)
        batches = [corpus.micro_batches(step, range(rank * count, (rank + 1) * count)) for rank in range(world)]
        assert batches[0].tokens.shape == (count, micro, 16)
        assert torch.equal(torch.cat([b.tokens.flatten(0, 1) for b in batches]), expected[:, :-1])
        assert torch.equal(torch.cat([b.labels.flatten(0, 1) for b in batches]), expected[:, 1:])
        ids = torch.cat([b.document_ids.flatten(0, 1) for b in batches if b.document_ids is not None])
        assert ids.tolist() == [s.document_ids.tolist() for s in samples if s.document_ids is not None]
        assert batches[0].tokens.dtype == batches[0].labels.dtype == torch.int64


def prepare_and_ask(config: DataConfig, step: int) -> tuple[list[int], str, int, int]:
    """Run in another process: return one step's data, and whether this process trained the tokenizer."""
    trained = []

    def slow(*arguments: Any) -> None:
        trained.append(1)
        time.sleep(0.3)
        train_bpe(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "train_bpe", slow)
        corpus = open_corpus(config, 5, VOCABULARY)
    return corpus.micro_batches(step).tokens.flatten().tolist(), corpus.fingerprint, len(trained), os.getpid()


def test_processes_at_once_build_once_and_any_step_alone_is_the_same(tmp_path: Path, two_files: dict[str, Any]) -> None:
    config = data_config(tmp_path / "here", two_files, tokenizer={"kind": "bpe", "vocab_size": 280})
    corpus = open_corpus(config, 5, VOCABULARY)
    for step in range(40):
        batch = corpus.micro_batches(step)
    elsewhere = config.model_copy(update={"cache_dir": str(tmp_path / "elsewhere")})
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning_llm.data.corpus"])
    with ProcessPoolExecutor(4, mp_context=context) as pool:
        said = list(pool.map(prepare_and_ask, [elsewhere] * 4, [39] * 4))
    assert len({process for *_, process in said}) == 4
    assert all(tokens == batch.tokens.flatten().tolist() for tokens, *_ in said)
    assert {fingerprint for _, fingerprint, *_ in said} == {corpus.fingerprint}
    assert sum(trained for *_, trained, _ in said) == 1
    assert not list((tmp_path / "elsewhere").glob("*.partial"))


def test_validation_scores_every_token_it_should_once(cache: Path, two_files: dict[str, Any]) -> None:
    config = data_config(cache, two_files, validation={"fraction": 0.2, "sequences": 10_000}, document_mask=True)
    corpus = open_corpus(config, 5, VOCABULARY)
    scored: dict[int, list[int]] = {0: [], 1: []}
    for batch in corpus.validation_batches(4):
        for row in range(4):
            targets = batch.labels[row][batch.labels[row] != IGNORED].tolist()
            assert batch.tokens[row, 1 : len(targets)].tolist() == targets[:-1]
            scored[int(batch.sources[row])] += targets
    for source, file in enumerate(two_files.values()):
        assert scored[source] == packed(file["path"], 0.2)[2][1:]


def test_the_loss_without_context_is_the_entropy_of_the_scored_tokens(corpus: Corpus) -> None:
    labels = torch.cat([batch.labels.flatten() for batch in corpus.validation_batches(4)])
    counts = torch.bincount(labels[labels >= 0]).double()
    counts = counts[counts > 0]
    plain = torch.distributions.Categorical(counts).entropy().item()
    assert corpus.validation_unigram_nats == pytest.approx(plain + (len(counts) - 1) / (2 * counts.sum().item()))


def test_validation_is_shared_by_weight_and_by_ranks(corpus: Corpus) -> None:
    whole = list(corpus.validation_batches(5))
    assert corpus.validation_sequences == 12
    sources = torch.cat([b.sources for b in whole])[:12]
    assert sources.bincount().tolist() == [9, 3]
    rows = torch.cat([b.labels for b in whole])
    assert rows.shape == (15, 16)
    assert (rows[12:] == IGNORED).all()
    parts = [list(corpus.validation_batches(2, rank, 4)) for rank in range(4)]
    assert {len(part) for part in parts} == {2}
    joined = torch.cat([part[i].labels for i in range(2) for part in parts])
    assert torch.equal(joined[:12], rows[:12])
    assert (joined[12:] == IGNORED).all()


@pytest.mark.parametrize("light", ["a", "b"])
def test_a_source_of_tiny_weight_still_has_a_validation_sequence(
    cache: Path, two_files: dict[str, Any], light: str
) -> None:
    mix = {name: source | {"weight": 1e-3 if name == light else 1.0} for name, source in two_files.items()}
    corpus = open_corpus(data_config(cache, mix, validation={"fraction": 0.2, "sequences": 5}), 5, VOCABULARY)
    scored = torch.cat([batch.sources for batch in corpus.validation_batches(4)])[: corpus.validation_sequences]
    counts = {name: int((scored == number).sum()) for number, name in enumerate(mix)}
    assert counts[light] == 1
    assert sum(counts.values()) == 6
    assert corpus.source_fingerprints.keys() == {"a", "b"}


def test_different_training_mixes_can_share_a_validation_mix(cache: Path, two_files: dict[str, Any]) -> None:
    found = []
    for weights in ((3.0, 1.0), (1.0, 1.0)):
        mix = {
            name: {**source, "weight": weight}
            for (name, source), weight in zip(two_files.items(), weights, strict=True)
        }
        scored = {"fraction": 0.2, "sequences": 12, "weights": dict.fromkeys(mix, 1.0)}
        found.append(open_corpus(data_config(cache, mix, validation=scored), 5, VOCABULARY))
    assert found[0].validation_fingerprint == found[1].validation_fingerprint
    assert found[0].fingerprint != found[1].fingerprint
    sources = torch.cat([batch.sources for batch in found[0].validation_batches(4)])[:12]
    assert sources.bincount().tolist() == [6, 6]
    missing = {"fraction": 0.2, "weights": {"nowhere": 1.0}}
    problems = check_data(data_config(cache, two_files, validation=missing), VOCABULARY, 1)
    assert [problem.key for problem in problems] == ["data.validation.weights"]


def test_validation_ignores_the_seed_and_the_batches(corpus: Corpus, two_files: dict[str, Any]) -> None:
    config = corpus.config.model_copy(update={"micro_batch_size": 4, "shuffle": False})
    other = open_corpus(config, 6, VOCABULARY)
    assert torch.equal(other.validation(range(12), 12).labels, corpus.validation(range(12), 12).labels)
    assert not torch.equal(other.micro_batches(0).tokens.flatten(), corpus.micro_batches(0).tokens.flatten())
    assert other.fingerprint == corpus.fingerprint


def test_held_out_documents_are_disjoint_even_if_repeated(tmp_path: Path) -> None:
    texts = [words(i, 8) for i in range(60)]
    a = write_jsonl(tmp_path / "a.jsonl", texts + texts[:30] + texts[:10])
    b = write_jsonl(tmp_path / "b.jsonl", texts[20:24])  # so few that none may lie in the range by itself
    sources = {"a": {"loader": "jsonl", "path": str(a)}, "b": {"loader": "jsonl", "path": str(b)}}

    def config(fraction: float) -> DataConfig:
        keys = {"validation": {"fraction": fraction, "sequences": 8}, "sequence_length": 8}
        return data_config(tmp_path / "cache", sources, **keys)

    for fraction in (0.001, 0.01, 0.1, 0.2):
        corpus = open_corpus(config(fraction), 0, VOCABULARY)
        sides = [
            {bytes(d[:-1].astype(np.uint8)).decode() for s in split for d in np.split(s.tokens, s.starts[1:])}
            for split in (corpus.train, corpus.held_out)
        ]
        assert sides[0] | sides[1] == set(texts)
        assert not sides[0] & sides[1]
        assert all(len(stream.tokens) for stream in corpus.held_out)
    assert "hold out all" in problems_of(config(0.99))[0]


def test_two_epochs_are_reported(corpus: Corpus) -> None:
    total = 4 * corpus.order.windows[1] * 2
    reports = {r.name: r for r in source_reports(corpus, total)}
    drawn = [corpus.sample(i).source for i in range(total)]
    assert reports["b"].epochs == pytest.approx(2, abs=0.05)
    for s, name in enumerate("ab"):
        report = reports[name]
        assert report.drawn_tokens == drawn.count(s) * 16
        assert report.achieved_share == pytest.approx((0.75, 0.25)[s], abs=0.01)
        assert report.available_tokens == (len(corpus.train[s].tokens) - 1) // 16 * 16
        assert report.epochs == report.drawn_tokens / report.available_tokens


def test_no_validation_when_asked_for(tmp_path: Path, two_files: dict[str, Any]) -> None:
    config = data_config(tmp_path / "cache", two_files, validation={"fraction": 0.0})
    corpus = open_corpus(config, 0, VOCABULARY)
    assert list(corpus.validation_batches(4)) == []
    assert len(corpus.train[0].starts) == 40


def test_the_cache_follows_the_file(tmp_path: Path, two_files: dict[str, Any]) -> None:
    copies = {name: source | {"path": str(tmp_path / f"{name}.jsonl")} for name, source in two_files.items()}
    for name, source in two_files.items():
        shutil.copy(source["path"], copies[name]["path"])
    config = data_config(tmp_path / "cache", copies)
    before = open_corpus(config, 0, VOCABULARY)
    built = sorted((tmp_path / "cache").iterdir())
    assert open_corpus(config, 0, VOCABULARY).fingerprint == before.fingerprint
    assert sorted((tmp_path / "cache").iterdir()) == built
    write_jsonl(Path(copies["a"]["path"]), [words(i, 30) for i in range(40)])
    assert open_corpus(config, 0, VOCABULARY).fingerprint != before.fingerprint


def test_a_pickled_corpus_is_small_and_the_same(corpus: Corpus) -> None:
    corpus.tokenizer.encode_batch(["x"])
    copied = pickle.dumps(corpus)
    assert len(copied) < 200_000
    assert torch.equal(pickle.loads(copied).micro_batches(3).tokens, corpus.micro_batches(3).tokens)


def problems_of(config: Any, vocab_size: int = VOCABULARY) -> list[str]:
    if problems := check_data(config, vocab_size, world=1):
        return [str(problem) for problem in problems]
    with pytest.raises(ConfigError) as caught:
        open_corpus(config, 0, vocab_size)
    return [str(problem) for problem in caught.value.problems]


def test_problems_of_the_documents_come_together(tmp_path: Path, cache: Path, two_files: dict[str, Any]) -> None:
    long = problems_of(data_config(cache, two_files, sequence_length=5_000))
    assert len(long) == 2
    assert all("5,001 training tokens" in text for text in long)
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"text": " "}\n')
    single = write_jsonl(tmp_path / "single.jsonl", ["only this"])
    wrong = write_jsonl(tmp_path / "wrong.jsonl", ["a", "b"], column="body")
    files = {"empty": empty, "wrong": wrong}
    sources = {name: {"loader": "jsonl", "path": str(file)} for name, file in files.items()}
    texts = problems_of(data_config(cache, sources))
    assert len(texts) == 2
    assert "data.sources.empty: " in texts[0]
    assert "contains no document" in texts[0]
    assert "no column 'text'; it has 'body', 'extra0'" in texts[1]
    texts = problems_of(data_config(cache, {"single": {"loader": "jsonl", "path": str(single)}}))
    assert "one distinct document" in texts[0]


def test_python_library(tmp_path: Path) -> None:
    sources = {
        "code": {"loader": "python", "part": "code", "weight": 0.7},
        "prose": {"loader": "python", "part": "prose", "weight": 0.3},
    }
    config = data_config(tmp_path, sources, validation={"fraction": 0.04}, sequence_length=256)
    corpus = open_corpus(config, 0, VOCABULARY)
    assert [len(s.tokens) > 1_000_000 for s in corpus.train] == [True, True]
    sources_of = {
        name: [bytes(d[:-1].astype(np.uint8)) for d in np.split(s.tokens, s.starts[1:])]
        for name, s in zip(corpus.names, corpus.held_out, strict=True)
    }
    assert all(len(documents) >= 5 for documents in sources_of.values())
    trained = corpus.train[0].tokens.astype(np.uint8).tobytes()
    assert not any(document in trained for document in sources_of["code"])
