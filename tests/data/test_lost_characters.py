"""Characters without a token are counted, for every way in which tokenizers mark pieces."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers

from lightning_llm.base.errors import ConfigError
from lightning_llm.data.opening import open_corpus
from lightning_llm.data.tokens.tokenizer import END_OF_DOCUMENT, Tokenizer, switch_off_sampling
from tests.data.corpus_files import data_config, write_jsonl

KNOWN = "abcdefghij"
END = {END_OF_DOCUMENT: 0}


def bpe(characters: str, **keys: Any) -> Backend:
    """Return BPE over these characters, with "ab" merged."""
    pieces = {character: number for number, character in enumerate(dict.fromkeys(characters), 1)}
    return Backend(models.BPE(vocab=END | pieces | {"ab": len(pieces) + 1}, merges=[("a", "b")], **keys))


def written(backend: Backend, folder: Path) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


KINDS: dict[str, dict[str, Any]] = {
    "whole text": {},
    "words": {"pre_tokenizer": pre_tokenizers.Whitespace()},
    "space signs": {"pre_tokenizer": pre_tokenizers.Metaspace()},
    "prepended": {"normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])},
    "composed": {"normalizer": normalizers.NFC()},
    "prepended and truncated": {"normalizer": normalizers.Prepend("▁"), "truncation": 1},
}


@pytest.fixture(scope="module", params=KINDS)
def dropping(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that knows `KNOWN`, blanks and é, and drops all else."""
    keys, backend = dict(KINDS[request.param]), bpe(f"{KNOWN} \n▁é")
    if "truncation" in keys:
        backend.enable_truncation(keys.pop("truncation"))
        backend.enable_padding(length=30)
    for name, value in keys.items():
        setattr(backend, name, value)
    return written(backend, tmp_path_factory.mktemp("tokenizer"))


@settings(max_examples=60, deadline=None)
@given(st.text(f"{KNOWN} \né" + "ΩЖ中x😀", max_size=20))
@example("中")
@example("Ωab   ")
@example("aΩb")
def test_each_character_without_a_token_is_counted(dropping: Tokenizer, text: str) -> None:
    tokens, dropped = dropping.encode_counted([text])
    assert dropped == [sum(character in "ΩЖ中x😀" for character in text)]
    assert tokens[0].tolist() == dropping.encode_batch([text])[0].tolist()


def test_a_composed_character_is_not_dropped_and_one_that_a_normalizer_strips_is(tmp_path: Path) -> None:
    backend = bpe("abeé각")
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("e", "")])
    tokenizer = written(backend, tmp_path)
    assert tokenizer.encode_counted(["ae\u0301a", "\u1100\u1161\u11a8", "aeea", "Ωe\u0301"])[1] == [0, 0, 2, 1]


def test_bytes_and_unknown_tokens_lose_nothing(tmp_path: Path) -> None:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    by_bytes = Backend(models.BPE(vocab=END | {each: n for n, each in enumerate(alphabet, 1)}, merges=[]))
    by_bytes.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    text = "Ω 中1 \u0301\x00 é"
    assert written(by_bytes, tmp_path).encode_counted([text])[1] == [0]
    by_bytes.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("1", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    assert written(by_bytes, tmp_path).encode_counted([text, "a"])[1] == [1, 0]
    known = bpe(KNOWN + "?", unk_token="?")
    tokenizer = written(known, tmp_path)
    tokens, dropped = tokenizer.encode_counted(["aΩb"])
    assert dropped == [0]
    assert tokenizer.unknown in tokens[0]


@pytest.mark.parametrize(
    ("behavior", "normalizer", "lossless"),
    [("isolated", None, True), ("isolated", normalizers.NFC(), True), ("removed", None, False),
     ("isolated", normalizers.StripAccents(), False)],
)  # fmt: skip
def test_offsets_are_read_only_of_tokenizers_that_may_drop_text(tmp_path, behavior, normalizer, lossless) -> None:
    """Those of Llama 3 and Qwen cut text, compose it and map it to bytes: reading offsets would double their time."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Backend(models.BPE(vocab=END | {each: n for n, each in enumerate(alphabet, 1)}, merges=[]))
    cut = pre_tokenizers.Split("1", behavior)
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    if normalizer is not None:
        backend.normalizer = normalizer
    tokenizer = written(backend, tmp_path)
    assert tokenizer._losses.lossless is lossless
    text = "a1b \u00e9 e\u0301 \u4e2d"
    encodings = tokenizer._backend.encode_batch([text], add_special_tokens=False)
    assert (tokenizer._losses.dropped([text], encodings) == [0]) is (behavior == "isolated")


def test_losses_are_counted_over_processes_and_kept_in_the_cache(tmp_path: Path) -> None:
    backend = bpe(KNOWN + "?")
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    written(backend, tmp_path)
    texts = ["abc ab" * 9, "Ω abΩ" * 3, "ΩΩ ЖΩ", "中" * 5] * 9 + ["abΩ" * number for number in range(1, 60)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    expected = {
        "documents": len(texts),
        "dropped_characters": sum(character in "ΩЖ中" for text in texts for character in text),
        "shortened_documents": 9 + 59,
        "emptied_documents": 18,
    }
    for processes in (1, 2, 1):  # the last reads the cache of the second
        sources = {"a": {"loader": "jsonl", "path": str(path)}}
        keys = {"tokenizer": {"kind": "file", "path": str(tmp_path)}, "tokenize_processes": processes}
        config = data_config(tmp_path / f"cache{min(processes, 1)}{processes == 2}", sources, **keys)
        account = open_corpus(config, 0, 100).accounts["a"]
        assert {key: getattr(account, key) for key in expected} == expected


@pytest.mark.parametrize("processes", [1, 2])
def test_text_that_a_tokenizer_refuses_is_one_line(tmp_path: Path, processes: int) -> None:
    written(Backend(models.WordLevel(vocab=END | {"a": 1}, unk_token="[UNK]")), tmp_path)
    path = write_jsonl(tmp_path / "a.jsonl", ["a", "b"])
    keys = {"tokenizer": {"kind": "file", "path": str(tmp_path)}, "tokenize_processes": processes}
    config = data_config(tmp_path / "cache", {"a": {"loader": "jsonl", "path": str(path)}}, **keys)
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.path: .* has no tokens for some document: WordLevel"):
        open_corpus(config, 0, 100)


def test_a_text_has_the_same_tokens_each_time(tmp_path: Path) -> None:
    tokenizer = written(bpe("ab", dropout=0.5), tmp_path)
    assert {tuple(tokens.tolist()) for tokens in tokenizer.encode_batch(["ababab"] * 30)} == {(3, 3, 3)}
    assert tokenizer.sampling == "dropout=0.5"
    scores = [("<unk>", 0.0), ("a", -1.0), ("b", -1.0), ("ab", -1.5)]
    unigram = Backend(models.Unigram(scores, unk_id=0, alpha=0.1, nbest_size=5))  # which no file keeps as of 0.23
    assert len({tuple(unigram.encode("ababab").ids) for _ in range(60)}) > 1
    switch_off_sampling(unigram)
    assert {tuple(unigram.encode("ababab").ids) for _ in range(60)} == {(3, 3, 3)}
