"""Bytes, text and pieces of tokens against the text itself, for every way of marking pieces."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers

from lightning_llm.data.opening import open_corpus
from lightning_llm.data.sources.source import content_key
from lightning_llm.data.tokens.text_stream import TextStream
from lightning_llm.data.tokens.tokenizer import Tokenizer, write_bytes_tokenizer
from tests.data.corpus_files import data_config, write_jsonl
from tests.data.tokenizer_kinds import FALLBACK, KINDS, LETTERS, byte_level, saved, sentencepiece, word_ends, wordpiece

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
words = st.lists(st.sampled_from(["the", "than", " ", "  ", "Ünd", "€", "日本", "ﬃ", "a\n", "."]), max_size=20).map(
    "".join
)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("kinds")
    return {
        name: Tokenizer(saved(make(), root / str(number), "Straße"))
        for number, (name, make) in enumerate(KINDS.items())
    }


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=any_text | words)
@example(text="")
@example(text="  the Ünd 日本 Straße€ ﬃ  ")
def test_the_bytes_of_a_documents_tokens_sum_to_its_own(kinds: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = kinds[kind]
    (tokens,), (sizes,) = tokenizer.encode_batch([text]), tokenizer.byte_counts([text])
    assert len(sizes) == len(tokens) + 1
    assert sizes.sum() == len(text.encode())


def test_bytes_go_to_the_tokens_that_cover_them(kinds: dict[str, Tokenizer]) -> None:
    def counted(kind: str, text: str) -> list[int]:
        return kinds[kind].byte_counts([text])[0].tolist()

    assert counted("byte-level", "the €") == [2, 1, 2, 1, 1, 0]  # th, e, Ġ and a third of €, and one each
    assert counted("byte-level, prefix space, trimmed offsets", "a a ") == [0, 2, 2, 0]  # Ġ that is no text, aĠ twice
    assert counted("sentencepiece", "the é") == [2, 1, 1, 1, 1, 0]  # ▁th, e, ▁, two bytes of é
    assert counted("unigram", "the é€ an") == [3, 1, 5, 1, 2, 0]  # ▁the, ▁, one unknown token, ▁, an
    assert counted("wordpiece", "The  ÁN ") == [3, 5, 1]  # the, an with both spaces; the last to the end
    assert counted("word ends", " THE é. ") == [4, 4, 1]  # the</w>; é was dropped and is counted with the next token


def test_a_token_larger_than_two_bytes_can_count_is_counted(kinds: dict[str, Tokenizer]) -> None:
    text = "日" * 70_000 + " the"
    sizes = kinds["unigram"].byte_counts([text])[0]
    assert (sizes.max(), sizes.sum()) == (209_999, len(text.encode()))  # all but the byte shared with the space sign


def test_byte_tokenizers_are_recognized_by_their_encoding_of_text(tmp_path: Path) -> None:
    write_bytes_tokenizer(tmp_path / "tokenizer.json")
    plain = Tokenizer(tmp_path)
    assert plain.is_bytes
    assert plain.byte_counts(["é"])[0].tolist() == [1, 1, 0]
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    lowers = Tokenizer(tmp_path)
    assert not lowers.is_bytes
    assert lowers.encode_batch(["AÉ"])[0].tolist() == list("aé".encode())


@pytest.mark.parametrize("kind", KINDS)
def test_an_added_token_is_shown_unchanged(kinds: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = kinds[kind]
    tokens = tokenizer.encode_batch(["the Straße an the Straße"])[0].tolist()
    (straße,) = tokenizer.encode_batch(["Straße"])[0].tolist()[-1:]
    assert tokens.count(straße) == 2
    shown = tokenizer.decode(tokens)
    assert (shown.count("Straße"), shown.count("\ufffd")) == (2, 0)
    assert shown.replace(" ", "") == "theStraßeantheStraße"
    stream = TextStream(tokenizer)
    assert "".join([*map(stream.add, tokens), stream.finish()]) == shown


def test_added_tokens_beside_parts_of_characters(tmp_path: Path) -> None:
    tokenizer = Tokenizer(saved(byte_level(), tmp_path, "Straße"))
    straße = tokenizer.vocab_size - 1
    euro = tokenizer.encode_batch(["€"])[0].tolist()
    assert tokenizer.decode([euro[0], straße, *euro, straße, euro[2]]) == "\ufffdStraße€Straße\ufffd"


def larger(smaller: Path, folder: Path, *new: str) -> Tokenizer:
    """Return the tokenizer of a file with more pieces."""
    content = json.loads(smaller.read_text())
    vocab = content["model"]["vocab"] | {each["content"]: each["id"] for each in content["added_tokens"]}
    content["model"]["vocab"] = vocab | {piece: len(vocab) + number for number, piece in enumerate(new)}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return Tokenizer(folder)


PIECES = {
    "byte-level, a word": (byte_level, "Ġfox", ["Ġ", "f", "o", "x"]),
    "byte-level, part of a character": (byte_level, "âĤ", ["â", "Ĥ"]),
    "byte-level, letters beyond ASCII": (byte_level, "ÃŁ", ["Ã", "Ł"]),
    "space sign": (sentencepiece, "▁fox", ["▁", "f", "o", "x"]),
    "byte fallback": (sentencepiece, "▁日", ["▁", "<0xE6>", "<0x97>", "<0xA5>"]),
    "a word": (lambda: wordpiece("fo"), "fox", ["fo", "##x"]),
    "within a word": (lambda: wordpiece("##in"), "##ing", ["##in", "##g"]),
    "the end of a word": (lambda: word_ends(("f", "o")), "fox</w>", ["fo", "x</w>"]),
    "the start of a word": (lambda: word_ends(("f", "o")), "fox", ["fo", "x"]),
}


@pytest.mark.parametrize("case", PIECES)
def test_a_new_piece_is_taken_apart_as_its_text_was(case: str, tmp_path: Path) -> None:
    make, piece, expected = PIECES[case]
    theirs = Tokenizer(saved(make(), tmp_path / "small"))
    ours = larger(theirs.path, tmp_path / "large", piece)
    vocabulary = json.loads(theirs.path.read_text())["model"]["vocab"]
    assert ours.pieces_in(theirs, ours.vocab_size - 1) == [vocabulary[each] for each in expected]


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "wordpiece", "word ends"])
def test_a_new_added_token_is_its_text(kind: str, tmp_path: Path) -> None:
    theirs = Tokenizer(saved(KINDS[kind](), tmp_path / "small"))
    ours = Tokenizer(saved(KINDS[kind](), tmp_path / "large", "the then"))
    assert ours.pieces_in(theirs, ours.vocab_size - 1) == theirs.encode_batch(["the then"])[0].tolist()


def test_a_byte_that_is_no_text_has_no_pieces(tmp_path: Path) -> None:
    made = sentencepiece()
    content = json.loads(made.to_str())
    vocab = [piece for piece in content["model"]["vocab"] if not piece.startswith("<0x")]
    content["model"]["vocab"] = {piece: number for number, piece in enumerate(vocab)}
    theirs = Tokenizer(saved(type(made).from_str(json.dumps(content)), tmp_path / "small"))
    ours = larger(theirs.path, tmp_path / "large", "<0xE6>", "<0x61>")
    assert ours.pieces_in(theirs, ours.vocab_size - 2) == []
    assert ours.pieces_in(theirs, ours.vocab_size - 1) == [vocab.index("a")]


def test_offsets_beyond_the_text_count_no_bytes(tmp_path: Path) -> None:
    vocab = {piece: number for number, piece in enumerate([*FALLBACK, *LETTERS])}
    made = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, end_of_word_suffix="</w>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(saved(made, tmp_path))
    texts = ["w0rld", "é", "", "ab 1"]
    (tokens, lost), sizes = tokenizer.encode_counted(texts), tokenizer.byte_counts(texts)
    assert [len(each) for each in tokens] == [9, 6, 0, 11]  # "</w>" is four tokens
    assert [int(each.sum()) for each in sizes] == [5, 2, 0, 4]
    assert lost == [0, 0, 0, 0]


def test_normalizers_do_not_change_the_counts(tmp_path: Path) -> None:
    folds = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()])
    tokenizer = Tokenizer(saved(byte_level(normalizer=folds), tmp_path))
    text = "ÀÉ ǅ ŉ"
    (tokens,), (sizes,) = tokenizer.encode_batch([text]), tokenizer.byte_counts([text])
    assert len(tokens) != len(text.encode())
    assert sizes.sum() == len(text.encode())
    assert np.array_equal(sizes[:3], [2, 2, 1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequences", [1_000, 3])
def test_a_validation_counts_the_bytes_of_the_text_it_scores(kind: str, sequences: int, tmp_path: Path) -> None:
    letters = ["The", "Änd", "", "thn.", "€", "an", "ﬃ"]
    texts = [" ".join(letters[(i * j) % len(letters)] for j in range(3, 12)) + f" {i:b}" for i in range(40)]
    tokenizer = Tokenizer(saved(KINDS[kind](), tmp_path))
    config = data_config(
        tmp_path / "cache",
        {"s": {"loader": "jsonl", "path": str(write_jsonl(tmp_path / "a.jsonl", texts))}},
        tokenizer={"kind": "file", "path": str(tokenizer.path)},
        validation={"fraction": 0.5, "sequences": sequences},
    )
    corpus = open_corpus(config, 3, tokenizer.vocab_size)
    held = sorted((text for text in texts if content_key(text) < 1 << 63), key=texts.index)
    text = "".join(held)
    tokens, sizes = corpus.held_out[0].tokens, np.concatenate(tokenizer.byte_counts(held))
    windows = [window for _, window in corpus._validation_windows]
    assert len(windows) == min(sequences, -(-(len(tokens) - 1) // 16))
    counted = corpus.validation_text()["s"]
    assert counted[0] == sum(len(tokens[w * 16 + 1 : w * 16 + 17]) for w in windows)
    if sequences == 1_000:  # all but the first token, which is not predicted
        assert counted == (len(tokens) - 1, len(text.encode()) - sizes[0])
    else:
        assert counted[1] == sum(int(sizes[w * 16 + 1 : w * 16 + 17].sum()) for w in windows)
