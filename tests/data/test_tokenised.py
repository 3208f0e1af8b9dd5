"""Loaders of tokens against files written by hand, byte by byte as their formats are documented, and their damage."""

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.schema.data import LOADERS
from lightning_llm.data.check import check_data
from lightning_llm.data.corpus import Corpus
from lightning_llm.data.opening import open_corpus
from lightning_llm.data.report import source_reports
from tests.data.corpus_files import data_config, words, write_jsonl

VOCABULARY = 300
END = 256
TEXTS = [words(i, 5 + i % 11) for i in range(60)]
CODES = {"u1": 1, "i4": 4, "i8": 5, "u2": 8}


def write_megatron(prefix: Path, documents: list[list[list[int]]], dtype: str = "u2", code: int | None = None) -> None:
    """Write documents of sequences as Megatron-LM's index, version 1, has them."""
    sequences = [sequence for document in documents for sequence in document]
    size = int(dtype[1])
    pointers = np.cumsum([0, *(len(sequence) * size for sequence in sequences)])[: len(sequences)]
    firsts = np.cumsum([0, *map(len, documents)])
    with Path(f"{prefix}.idx").open("wb") as index:
        index.write(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code or CODES[dtype]))
        index.write(struct.pack("<QQ", len(sequences), len(firsts)))
        index.write(struct.pack(f"<{len(sequences)}i", *map(len, sequences)))
        index.write(struct.pack(f"<{len(pointers)}q", *pointers.tolist()))
        index.write(struct.pack(f"<{len(firsts)}q", *firsts.tolist()))
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(s, f"<{dtype}").tobytes() for s in sequences))


def ids(text: str) -> list[int]:
    return list(text.encode())


def corpus_of(cache: Path, source: dict[str, Any], **keys: Any) -> Corpus:
    keys = {"validation": {"fraction": 0.0}, "document_mask": True} | keys
    return open_corpus(data_config(cache, {"s": source}, **keys), 3, VOCABULARY)


@pytest.fixture(scope="module")
def of_text(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("text")
    return corpus_of(folder / "cache", {"loader": "jsonl", "path": str(write_jsonl(folder / "a.jsonl", TEXTS))})


def written(loader: str, folder: Path, variant: str) -> dict[str, Any]:
    """Write `TEXTS` as tokens, over two files, and return the source."""
    folder.mkdir(parents=True)
    halves = TEXTS[:25], TEXTS[25:]
    for name, half in zip(("1.part", "2.part"), halves, strict=True):
        if loader == "olmo":
            tokens = [token for text in half for token in [*ids(text), END]]
            np.array(tokens, f"<{variant}").tofile(folder / f"{name}.npy")
        else:
            dtype, _, ending = variant.partition(" ")
            end = [END] if ending == "closed" else []
            documents = [[ids(text)[:7], ids(text)[7:] + end] for text in half]  # of two sequences each
            write_megatron(folder / name, documents, dtype)
    return {
        "loader": loader,
        "path": str(folder),
        **({"dtype": {"u2": "uint16", "u4": "uint32"}[variant]} if loader == "olmo" else {}),
    }


VARIANTS = {"megatron": ["u2 closed", "i4 open", "i8 closed", "u1 open"], "olmo": ["u2", "u4"]}


@pytest.mark.parametrize(("loader", "variant"), [(loader, each) for loader in VARIANTS for each in VARIANTS[loader]])
def test_tokens_give_the_corpus_of_their_text(of_text: Corpus, tmp_path: Path, loader: str, variant: str) -> None:
    """Same tokens, digests, batches and documents as the text's own tokenisation; nothing but places is kept."""
    corpus = corpus_of(tmp_path / "cache", written(loader, tmp_path / "data", variant))
    assert corpus.fingerprint == of_text.fingerprint
    assert np.array_equal(corpus.train[0].tokens[:], of_text.train[0].tokens)
    assert np.array_equal(corpus.train[0].starts, of_text.train[0].starts)
    copied = pickle.loads(pickle.dumps(corpus))
    for step in (0, 3, 40):
        batch, expected = copied.micro_batches(step), of_text.micro_batches(step)
        assert batch.tokens.equal(expected.tokens)
        assert batch.labels.equal(expected.labels)
        assert batch.document_ids.equal(expected.document_ids)
    stream = corpus.train[0]
    for first in range(0, len(stream.tokens), 37):
        assert np.array_equal(stream.tokens[first : first + 53], of_text.train[0].tokens[first : first + 53])
    kept = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*.places"))
    assert kept == (24 + 16) * len(TEXTS)
    assert not list((tmp_path / "cache").rglob("train.bin"))


def test_the_bytes_of_text_that_was_tokenized_elsewhere_are_unknown(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "cache", written("olmo", tmp_path / "data", "u2"), validation={"fraction": 0.3})
    ((tokens, size),) = corpus.validation_text().values()
    assert tokens > 0
    assert size is None


def test_held_out_documents_are_on_one_side_and_the_same_for_all_loaders(tmp_path: Path) -> None:
    held_out = {}
    for loader, variant in (("megatron", "i4 closed"), ("olmo", "u4"), ("olmo", "u2")):
        source = written(loader, tmp_path / loader / variant, variant)
        corpus = corpus_of(tmp_path / "cache", source, validation={"fraction": 0.2, "sequences": 4})
        sides = [
            {tuple(document[:-1].tolist()) for document in np.split(stream.tokens[:], stream.starts[1:])}
            for stream in (corpus.train[0], corpus.held_out[0])
        ]
        assert sides[0] | sides[1] == {tuple(ids(text)) for text in TEXTS}
        assert not sides[0] & sides[1]
        held_out[loader, variant] = sides[1]
    (first, *others) = held_out.values()
    assert first
    assert all(other == first for other in others)


def test_a_path_may_be_a_prefix_a_file_of_a_pair_or_a_glob(of_text: Corpus, tmp_path: Path) -> None:
    write_megatron(tmp_path / "x.v1", [[ids(text)] for text in TEXTS])
    for path in ("x.v1", "x.v1.bin", "x.v1.idx", "x.*", "*.bin"):
        corpus = corpus_of(tmp_path / "cache", {"loader": "megatron", "path": str(tmp_path / path)})
        assert corpus.fingerprint == of_text.fingerprint


def test_the_cache_follows_files_and_tokenizer(tmp_path: Path) -> None:
    source = written("olmo", tmp_path / "data", "u2")
    before = corpus_of(tmp_path / "cache", source).fingerprint
    built = sorted((tmp_path / "cache").iterdir())
    assert corpus_of(tmp_path / "cache", source).fingerprint == before
    assert sorted((tmp_path / "cache").iterdir()) == built
    np.array([*ids("another text, as long as it takes"), END], "<u2").tofile(tmp_path / "data" / "1.part.npy")
    assert corpus_of(tmp_path / "cache", source).fingerprint != before


def problem_of(tmp_path: Path, source: dict[str, Any], **keys: Any) -> str:
    """Return the one problem, of the cheap check or of reading the files."""
    config = data_config(tmp_path / "cache", {"s": source}, **keys)
    problems = check_data(config, VOCABULARY, 1)
    if not problems:
        with pytest.raises(ConfigError) as caught:
            open_corpus(config, 0, VOCABULARY)
        problems = list(caught.value.problems)
    (problem,) = problems
    assert "\n" not in str(problem)
    return str(problem)


def damage_of_megatron(folder: Path) -> dict[str, tuple[Any, str]]:
    """Return name -> (damage to a sound pair, expected message)."""
    index, tokens = folder / "x.idx", folder / "x.bin"
    sound, sequences = index.read_bytes(), len(TEXTS)
    lengths, pointers = 34, 34 + 4 * sequences

    def patched(at: int, content: bytes) -> Any:
        return lambda: index.write_bytes(sound[:at] + content + sound[at + len(content) :])

    return {
        "magic": (patched(0, b"NOTIDX"), "is not a Megatron-LM index"),
        "version": (patched(9, struct.pack("<Q", 2)), "has version 2: only version 1 is supported"),
        "float": (patched(17, b"\x07"), "dtype code 7, which is not an integer type"),
        "unknown": (patched(17, b"\x63"), "dtype code 99"),
        "header": (lambda: index.write_bytes(sound[:20]), "is not a Megatron-LM index"),
        "index": (lambda: index.write_bytes(sound[:-8]), "it is damaged"),
        "lengths": (patched(lengths, struct.pack("<i", -3)), "the index is damaged"),
        "pointers": (patched(pointers + 8, struct.pack("<q", 1 << 40)), "the index is damaged"),
        "documents": (patched(len(sound) - 16, struct.pack("<q", 1 << 40)), "document indices are damaged"),
        "tokens": (lambda: tokens.write_bytes(tokens.read_bytes()[:-2]), "truncated, or not of this index"),
        "none": (tokens.unlink, "a dataset of Megatron-LM is a pair"),
    }


@pytest.mark.parametrize(
    "damage",
    ["magic", "version", "float", "unknown", "header", "index", "lengths", "pointers", "documents", "tokens", "none"],
)
def test_damaged_pairs_are_refused(tmp_path: Path, damage: str) -> None:
    write_megatron(tmp_path / "x", [[ids(text)] for text in TEXTS])
    act, said = damage_of_megatron(tmp_path)[damage]
    act()
    problem = problem_of(tmp_path, {"loader": "megatron", "path": str(tmp_path / "x.idx")})
    assert problem.startswith("data.sources.s.path: ")
    assert said in problem


def test_damaged_and_foreign_files_of_olmo_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.npy"
    source = {"loader": "olmo", "path": str(file)}
    file.write_bytes(b"\x01\x00" * 5 + b"\x01")
    assert "11 bytes, not a multiple of 2 (uint16)" in problem_of(tmp_path, source)
    np.save(file, np.arange(9, dtype=np.uint16))
    assert "has a NumPy header" in problem_of(tmp_path, source)
    file.write_bytes(b"")
    assert "is empty" in problem_of(tmp_path, source)
    np.array(ids("no end") * 20, "<u2").tofile(file)
    assert "has no token 256, which ends a document" in problem_of(tmp_path, source)
    np.array([*ids("wider"), END] * 20, "<u4").tofile(file)
    assert "Set dtype=uint32" in problem_of(tmp_path, source)


def test_an_id_that_the_tokenizer_does_not_have_is_named_with_its_place(tmp_path: Path) -> None:
    tokens = [*ids("some text"), END] * 30
    tokens[101] = 299
    np.array(tokens, "<u2").tofile(tmp_path / "a.npy")
    source = {"loader": "olmo", "path": str(tmp_path)}
    problem = problem_of(tmp_path, source, validation={"fraction": 0.0})
    assert f"token 101 of {tmp_path / 'a.npy'} is 299, but data.tokenizer has 257 tokens" in problem
    assert "model.vocab_size is 300" in problem
    write_megatron(tmp_path / "x", [[[5, 6, -1]], [[7]]], "i4")
    negative = problem_of(tmp_path, {"loader": "megatron", "path": str(tmp_path / "x.idx")})
    assert f"token 2 of {tmp_path / 'x.bin'} is -1" in negative


def test_every_loader_of_tokens_is_tested_here() -> None:
    assert {name for name in LOADERS if LOADERS[name].tokenised} == VARIANTS.keys()


def test_tokens_need_the_tokenizer_they_were_made_with(tmp_path: Path) -> None:
    source = written("olmo", tmp_path / "data", "u2")
    assert "data.sources.s is already tokenized" in problem_of(tmp_path, source, tokenizer={"kind": "bpe"})


def test_modes_of_multimodal_datasets_are_skipped(of_text: Corpus, tmp_path: Path) -> None:
    write_megatron(tmp_path / "x", [[ids(text)] for text in TEXTS])
    with (tmp_path / "x.idx").open("ab") as index:
        index.write(bytes(len(TEXTS)))
    corpus = corpus_of(tmp_path / "cache", {"loader": "megatron", "path": str(tmp_path / "x")})
    assert corpus.fingerprint == of_text.fingerprint


def test_tokens_and_text_mix(tmp_path: Path) -> None:
    text = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    sources = {
        "s": written("olmo", tmp_path / "data", "u2"),
        "t": {"loader": "jsonl", "path": str(text), "weight": 3.0},
    }
    corpus = open_corpus(data_config(tmp_path / "cache", sources, validation={"fraction": 0.0}), 0, VOCABULARY)
    assert corpus.train[0].digest == corpus.train[1].digest
    assert [report.achieved_share for report in source_reports(corpus, 1000)] == [0.25, 0.75]
    assert {name: each.blank_records for name, each in corpus.accounts.items()} == {"s": 0, "t": 0}
