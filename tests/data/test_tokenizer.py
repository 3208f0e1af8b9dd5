"""Round trips over any text, the same file from the same text, and none of a document's text is taken as special."""

import hashlib
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from lightning_llm.config.schema.data import TokenizerConfig
from lightning_llm.data.check import _tokenizer_file_problems
from lightning_llm.data.tokens.tokenizer import Tokenizer, read_vocabulary, train_bpe, write_bytes_tokenizer

TEXTS = [f"def f{i}(self):\n    return self.x{i % 7} + {i}\n" for i in range(300)]
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    file = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(TEXTS, 300, file)
    return Tokenizer(file)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    write_bytes_tokenizer(folder / "tokenizer.json")
    return Tokenizer(folder)


@given(any_text)
def test_bpe_round_trip(bpe: Tokenizer, text: str) -> None:
    tokens = bpe.encode_batch([text])[0]
    assert bpe.decode(tokens) == text
    assert bpe.end_of_document not in tokens


@given(any_text)
def test_bytes_are_bytes(plain: Tokenizer, text: str) -> None:
    tokens = plain.encode_batch([text])[0]
    assert tokens.tolist() == list(text.encode())
    assert plain.decode(tokens) == text
    backend = Backend.from_file(str(plain.path))  # what another program reads from the saved file
    backend.encode_special_tokens = True
    assert backend.encode(text).ids == tokens.tolist()


def test_sizes(bpe: Tokenizer, plain: Tokenizer) -> None:
    assert bpe.vocab_size == 300
    assert (plain.vocab_size, plain.end_of_document) == (257, 256)
    assert len(bpe.encode_batch([TEXTS[0]])[0]) < len(TEXTS[0]) / 2
    assert bpe.decode([bpe.end_of_document]) == "<|endoftext|>"


@pytest.mark.parametrize("name", ["bpe", "plain"])
def test_special_text_is_ordinary(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    tokens = tokenizer.encode_batch(["a<|endoftext|>b"])[0]
    assert tokenizer.end_of_document not in tokens
    assert tokenizer.decode(tokens) == "a<|endoftext|>b"


def test_training_depends_on_the_texts_alone(bpe: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    (tmp_path / "texts.json").write_text(json.dumps(TEXTS))
    program = (
        "import json, pathlib, sys\nfrom lightning_llm.data.tokens.tokenizer import train_bpe\n"
        "train_bpe(json.load(open(sys.argv[1])), 300, pathlib.Path(sys.argv[2]))\n"
    )
    environment = {"RAYON_NUM_THREADS": "3", "PYTHONHASHSEED": "77"}
    arguments = [sys.executable, "-c", program, str(tmp_path / "texts.json"), str(file)]
    subprocess.run(arguments, env=environment, check=True)
    assert hashlib.sha256(file.read_bytes()).digest() == hashlib.sha256(bpe.path.read_bytes()).digest()
    assert Tokenizer(file).fingerprint == bpe.fingerprint


def test_save_and_pickle(bpe: Tokenizer, tmp_path: Path) -> None:
    bpe.encode_batch(["x"])
    copy = Tokenizer(bpe.save(tmp_path))
    assert copy.fingerprint == bpe.fingerprint
    assert (
        pickle.loads(pickle.dumps(bpe)).encode_batch(TEXTS[:1])[0].tolist() == bpe.encode_batch(TEXTS[:1])[0].tolist()
    )


def test_end_of_document_of_a_given_file(bpe: Tokenizer, tmp_path: Path) -> None:
    content = json.loads(bpe.path.read_text().replace("<|endoftext|>", "<stop>"))
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="has no token"):
        Tokenizer(file)
    assert Tokenizer(file, "<stop>").end_of_document == 0


def test_vocabulary_read_without_the_library_is_the_library_s(bpe: Tokenizer, tmp_path: Path) -> None:
    assert read_vocabulary(bpe.path) == Backend.from_file(str(bpe.path)).get_vocab(with_added_tokens=True)
    unigram = {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": []}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(unigram))
    assert read_vocabulary(file) == {"a": 0, "b": 1}
    for broken in ("{", "[]", '{"model": 3}'):
        file.write_text(broken)
        with pytest.raises(ValueError, match=r"not a tokenizer\.json"):
            read_vocabulary(file)


def bpe_with(folder: Path, *special: str) -> Path:
    backend = Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.save(str(folder / "tokenizer.json"))
    return folder


def test_the_end_of_document_token_is_found_by_declarations(tmp_path: Path) -> None:
    deepseek = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
    assert Tokenizer(bpe_with(tmp_path, *deepseek)).end_of_document == 3
    assert Tokenizer(bpe_with(tmp_path, "<|im_start|>", "<EOD>")).end_of_document == 3
    folder = bpe_with(tmp_path, "<halt>", "<stop>")
    with pytest.raises(ValueError, match="has no token"):
        Tokenizer(folder)
    for declared in ("<stop>", {"__type": "AddedToken", "content": "<stop>"}):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": declared}))
        tokenizer = Tokenizer(folder)
        assert tokenizer.end_of_document == 3
    (tmp_path / "run").mkdir()
    tokenizer.declare_end(tokenizer.save(tmp_path / "run").parent)
    assert Tokenizer(tmp_path / "run").fingerprint == tokenizer.fingerprint  # a run's copy is enough
    usual = Tokenizer(bpe_with(tmp_path, "<stop>", "</s>"))  # a usual name goes first, as in earlier releases
    assert usual.end_of_document == 3


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "tokenizer.model",
            b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02" + bytes(range(128, 256)) * 9,
            "sentencepiece",
        ),
        ("r50k.tiktoken", b"IQ== 0\nIg== 1\n", "tiktoken"),
        ("tekken.json", b'{"config": {}, "vocab": [{"rank": 0, "token_bytes": "AA=="}]}', "tekken"),
        ("vocab.json", b'{"a": 0}', "one part of a tokenizer"),
    ],
)
def test_another_format_is_named_with_how_to_convert_it(
    tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=expected) as caught:
        Tokenizer(tmp_path / name)
    assert f"from_pretrained({str(tmp_path)!r}).save_pretrained(" in str(caught.value)
    assert len(str(caught.value)) < 500
    config = TokenizerConfig(kind="file", path=str(tmp_path))
    (problem,) = _tokenizer_file_problems(config, 300)
    assert problem.key == "data.tokenizer.path"
    assert expected in problem.text
