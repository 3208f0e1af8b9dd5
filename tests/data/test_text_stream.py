"""Pieces of text: together the text of the tokens, in whole characters, without any part of a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_llm.data.tokens.text_stream import StopStrings, TextStream
from lightning_llm.data.tokens.tokenizer import Tokenizer, train_bpe, write_bytes_tokenizer


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> list[Tokenizer]:
    bpe, plain = tmp_path_factory.mktemp("bpe") / "tokenizer.json", tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    train_bpe(["naïve café über 東京 is a place, and so on"] * 9, 290, bpe)
    write_bytes_tokenizer(plain)
    return [Tokenizer(bpe), Tokenizer(plain)]


def pieces_of(tokenizer: Tokenizer, tokens: list[int], prompt: list[int]) -> list[str]:
    stream = TextStream(tokenizer, prompt)
    return [*(stream.add(token) for token in tokens), stream.finish()]


@given(st.lists(st.integers(0, 255), max_size=30))
def test_pieces_are_the_text_of_any_tokens(tokenizers, tokens):
    for tokenizer in tokenizers:
        assert "".join(pieces_of(tokenizer, tokens, [])) == tokenizer.decode(tokens)


@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=20),
    st.text("ab ", max_size=12),
)
def test_no_piece_ends_within_a_character(tokenizers, text, prompt):
    for tokenizer in tokenizers:
        tokens, before = ([int(t) for t in tokenizer.encode_batch([each])[0]] for each in (text, prompt))
        pieces = pieces_of(tokenizer, tokens, before)
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces)


@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_text_ends_before_the_first_stop_string_however_it_comes(text, stops, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    places = [(text.find(each) + len(each), text.find(each)) for each in stops if each in text]  # end, start
    found = StopStrings(stops)
    shown = ""
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        shown += found.add(text[start:stop])
        assert (text[: min(places)[1]] if places else text).startswith(shown)
    shown += found.finish()
    assert shown == (text[: min(places)[1]] if places else text)
    assert (found.found is not None) == bool(places)
