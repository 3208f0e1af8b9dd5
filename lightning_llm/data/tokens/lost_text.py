"""Characters of a text that a tokenizer drops: no token, not even one for the unknown, stands for them.

By the offsets of the `tokenizers` library, never by how tokens are spelled. BPE without an unknown token drops symbols
in the middle of a word and shifts the offsets behind them, so its text is encoded once more by a copy with one.
"""

import json
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

PROBE = "\U0010fffdunknown\U0010fffd"
"""An unknown token that no vocabulary has."""
CUTTING = ("ByteLevel", "Digits", "Punctuation", "Split")
"""Pre-tokenizers that cut a text and keep all of it, unless their `behavior` is to remove what they cut at."""
NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
"""Normalizers that write the characters of a text in another way, and drop none."""
JAMO = range(0x1160, 0x1200)
"""Vowels and final consonants of Hangul, which normalization composes with the letter before them."""


class LossCounter:
    """Counts the characters that one tokenizer drops. `lossless`: it cannot drop any."""

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
        """Return how many characters of each text, blanks aside, have no token; `encodings` are the tokenizer's own."""
        if self.probe is not None:
            encodings = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [dropped_characters(text, each, self.probe) for text, each in zip(texts, encodings, strict=True)]


def dropped_characters(text: str, encoding: Any, unknown: int | None = None) -> int:
    """Return how many characters of `text`, blanks aside, no token covers, or one with the id `unknown`."""
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
    """Return whether a pre-tokenizer of a tokenizer.json removes no character."""
    parts = split["pretokenizers"] if split["type"] == "Sequence" else [split]
    return all(each["type"] in CUTTING and each.get("behavior") != "Removed" for each in parts)


@cache
def _blanks() -> np.ndarray:
    return np.array([code for code in range(sys.maxunicode + 1) if chr(code).isspace()], np.uint32)


def _covered(length: int, offsets: np.ndarray) -> np.ndarray:
    """Return which of `length` characters lie within one of `offsets` [tokens, 2], bool [length]."""
    starts, ends = (np.bincount(offsets[:, side], minlength=length + 1) for side in (0, 1))
    return (starts - ends).cumsum()[:length] > 0


def _composes(character: str) -> bool:
    """Return whether normalization may have joined the character to the one before it, which has a token."""
    return unicodedata.category(character).startswith("M") or ord(character) in JAMO
