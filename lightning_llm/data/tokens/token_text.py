"""Text of tokens, from the offsets, decoder and model of the `tokenizers` library instead of the tokens' spelling.

A spelling is ambiguous: "Ã" is a byte for one tokenizer and a letter for another, and "▁", "##", "</w>" and "<0x0A>"
are marks for some and text for others.

`LossCounter` counts the characters that a tokenizer drops: those without any token, not even one for unknown text. BPE
without an unknown token drops symbols within words and shifts the offsets after them, so its text is encoded once more
by a copy of the tokenizer with such a token.
"""

import json
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tokenizers

ADDED = "\ufdd0"
"""Placeholder for an added token in a decoder's input: a code point that is not a character, and is never changed."""
REPLACEMENT = "\ufffd"
"""Replaces bytes that are not UTF-8."""
NEIGHBORS = "aeinorstzx0"
"""Letters placed around a piece, so that it is encoded as within a text."""
PROBE = "\U0010fffdunknown\U0010fffd"
"""Name of the added unknown token; no vocabulary contains it."""
CUTTING = ("ByteLevel", "Digits", "Punctuation", "Split")
"""Pre-tokenizers that split a text and keep all of it, unless their `behavior` removes the separators."""
NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
"""Normalizers that change the form of characters, but drop none."""
JAMO = range(0x1160, 0x1200)
"""Vowels and final consonants of Hangul, which normalization composes with the letter before them."""


def byte_counts(text: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the number of UTF-8 bytes of `text` that each token represents, uint32 [tokens + 1].

    `offsets`: the tokens' spans in characters of `text` before normalization. Characters without a token (such as
    dropped spaces) count for the next token; those after the last token count for the end of the document, the last
    entry. Tokens that share a character share its bytes evenly. The sum is the size of `text`.
    """
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    sizes = 1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF)
    position = np.concatenate(([0], sizes.cumsum()))  # [characters + 1] in bytes
    cuts = np.zeros(len(offsets) + 2, np.int64)  # the bytes at which each token begins and ends
    cuts[-1] = position[-1]
    if len(offsets):
        spans = np.minimum(np.array(offsets, np.int64), len(text))  # BPE that spells "</w>" in bytes counts those, too
        starts, ends = spans[:, 0], np.maximum.accumulate(spans[:, 1])
        cuts[1:-1] = position[ends]
        shared = np.flatnonzero(starts[1:] < ends[:-1])  # the next token begins within this one's last character
        first, inverse, count = np.unique(starts[1:][shared], return_inverse=True, return_counts=True)
        rank = np.arange(len(shared)) - (count.cumsum() - count)[inverse] + 1
        width = position[ends[shared]] - position[first[inverse]]
        cuts[1 + shared] = position[first[inverse]] + rank * width // (count[inverse] + 1)
    return np.diff(np.maximum.accumulate(cuts)).astype(np.uint32)


def added_texts(backend: "tokenizers.Tokenizer") -> dict[int, str]:
    """Return {id: text} of the added tokens that the decoder would change, e.g. by reading "Straße" as bytes."""
    decoder = backend.decoder
    added = {} if decoder is None else backend.get_added_tokens_decoder()
    return {index: token.content for index, token in added.items() if decoder.decode([token.content]) != token.content}


def decoded(
    backend: "tokenizers.Tokenizer", tokens: Sequence[int], literal: dict[int, str], skip_special: bool = False
) -> str:
    """Return the text of `tokens`; `skip_special` omits special tokens. `literal`: the result of `added_texts`."""
    if skip_special:
        special = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
        tokens = [token for token in tokens if token not in special]
    added = [literal[token] for token in tokens if token in literal]
    if added:
        spelled = [ADDED if token in literal else backend.id_to_token(token) for token in tokens]
        parts = backend.decoder.decode([each for each in spelled if each is not None]).split(ADDED)
        if len(parts) == len(added) + 1:
            return "".join(part + text for part, text in zip(parts, [*added, ""], strict=True))
    text: str = backend.decode(list(tokens), skip_special_tokens=False)
    return text


def pieces_of_token(ours: "tokenizers.Tokenizer", theirs: "tokenizers.Tokenizer", token: int) -> list[int]:
    """Return the ids with which `theirs` encodes the text of `token`, an id of `ours`; [] if that is impossible.

    `theirs` is the same tokenizer with fewer tokens. An added token is encoded as text. Any other token is a piece of
    the model, which the model of `theirs` splits; that is exact even for parts of a character. A model that marks the
    start or end of words cannot do so; then the piece is encoded at a matching place of a text.
    """
    added = ours.get_added_tokens_decoder()
    if token in added:
        ids: list[int] = theirs.encode(added[token].content, add_special_tokens=False).ids
        return ids
    piece, model = str(ours.id_to_token(token)), ours.model
    prefix = getattr(model, "continuing_subword_prefix", None) or ""
    suffix = getattr(model, "end_of_word_suffix", None) or ""
    if not prefix and not suffix:
        text = _byte_piece(ours.model, piece)
        return [each.id for each in theirs.model.tokenize(text)] if text != REPLACEMENT else []
    goes_on, ends = bool(prefix) and piece.startswith(prefix), not suffix or piece.endswith(suffix)
    text = piece.removeprefix(prefix).removesuffix(suffix)
    return _encoded_between(theirs, NEIGHBORS if goes_on else " ", text, " " if ends else NEIGHBORS)


def _byte_piece(model: "tokenizers.models.Model", piece: str) -> str:
    """Return the text of a piece that represents one byte ("<0x41>"), U+FFFD if it is no character; else the piece."""
    from tokenizers import decoders

    return str(decoders.ByteFallback().decode([piece])) if getattr(model, "byte_fallback", False) else piece


def _encoded_between(backend: "tokenizers.Tokenizer", befores: str, text: str, afters: str) -> list[int]:
    """Return the ids of `text` between two of these letters where its ends are ends of tokens; else of it alone."""
    first, last = 1, 1 + len(text)
    for before, after in product(befores, afters):
        encoding = backend.encode(f"{before}{text}{after}", add_special_tokens=False)
        spans = list(zip(encoding.ids, encoding.offsets, strict=True))
        inside = [index for index, (start, end) in spans if first <= start < end <= last]
        beyond = [index for index, (start, end) in spans if end <= first or start >= last]
        if inside and len(inside) + len(beyond) == len(spans):
            return inside
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return ids


class LossCounter:
    """Counter of the characters that a tokenizer drops. `lossless`: True if the tokenizer cannot drop any."""

    def __init__(self, file: Path, backend: Any):
        from tokenizers import Tokenizer, pre_tokenizers

        content = json.loads(file.read_bytes())
        model, split = content["model"], content.get("pre_tokenizer")
        vocabulary = model.get("vocab")
        complete = isinstance(vocabulary, dict) and vocabulary.keys() >= {*pre_tokenizers.ByteLevel.alphabet()}
        whole_bytes = complete and '"type": "ByteLevel"' in json.dumps(split)
        is_bpe = isinstance(vocabulary, dict) and "merges" in model
        normalizer = content.get("normalizer") or {"type": "NFC"}
        self.lossless = whole_bytes and is_bpe and _keeps_all(split) and normalizer["type"] in NORMAL_FORMS
        self.backend, self.probe = backend, None
        if is_bpe and model.get("unk_token") is None and not whole_bytes:
            self.probe = 1 + max([*vocabulary.values(), *(each["id"] for each in content.get("added_tokens") or ())])
            changed = {"vocab": vocabulary | {PROBE: self.probe}, "unk_token": PROBE, "fuse_unk": False}
            own = content | {"model": model | changed | {"dropout": None}, "truncation": None, "padding": None}
            self.backend = Tokenizer.from_str(json.dumps(own | {"post_processor": None}))
            self.backend.encode_special_tokens = True

    def dropped(self, texts: Sequence[str], encodings: Sequence[Any]) -> list[int]:
        """Return the number of non-blank characters of each text without a token; `encodings`: the tokenizer's own."""
        if self.probe is not None:
            encodings = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [dropped_characters(text, each, self.probe) for text, each in zip(texts, encodings, strict=True)]


def dropped_characters(text: str, encoding: Any, unknown: int | None = None) -> int:
    """Return the number of non-blank characters of `text` that no token covers, or only one with the id `unknown`."""
    offsets = np.minimum(np.array(encoding.offsets, np.int64).reshape(-1, 2), len(text))  # see `byte_counts`
    is_unknown = np.array(encoding.ids, np.int64) == (-1 if unknown is None else unknown)  # [tokens]
    known, refused = _covered(len(text), offsets[~is_unknown]), _covered(len(text), offsets[is_unknown])
    if (known & ~refused).all():
        return 0
    blank = np.isin(np.frombuffer(text.encode("utf-32-le"), "<u4"), _blanks())
    lost, composed = 0, -1
    for place in np.flatnonzero((~known | refused) & ~blank).tolist():
        before = place - 1
        follows = before == composed or (before >= 0 and known[before] and not refused[before])
        if follows and not refused[place] and _composes(text[place]):
            composed = place
        else:
            lost += 1
    return lost


def _keeps_all(split: Mapping[str, Any]) -> bool:
    """Return whether a pre-tokenizer of a tokenizer.json keeps every character."""
    parts = split["pretokenizers"] if split["type"] == "Sequence" else [split]
    return all(each["type"] in CUTTING and each.get("behavior") != "Removed" for each in parts)


@cache
def _blanks() -> np.ndarray:
    return np.array([code for code in range(sys.maxunicode + 1) if chr(code).isspace()], np.uint32)


def _covered(length: int, offsets: np.ndarray) -> np.ndarray:
    """Return bool [length]: whether each character is within one of `offsets` [tokens, 2]."""
    starts, ends = (np.bincount(offsets[:, side], minlength=length + 1) for side in (0, 1))
    return (starts - ends).cumsum()[:length] > 0


def _composes(character: str) -> bool:
    """Return whether normalization may have joined the character to the one before it, which has a token."""
    return unicodedata.category(character).startswith("M") or ord(character) in JAMO
