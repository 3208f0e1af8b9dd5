"""Tokenizers of every way to mark pieces, small, by the `tokenizers` library alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from lightning_llm.data.tokens.tokenizer import END_OF_DOCUMENT

LETTERS = "abcdefghijklmnopqrstuvwxyz.,"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]


def numbered(*pieces: str) -> dict[str, int]:
    """Return each piece once with its number."""
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}


def byte_level(*merges: tuple[str, str], prefix: bool = False, trim: bool = False, normalizer: Any = None) -> Tokenizer:
    """Return byte-level BPE with these merges, in the alphabet of the library."""
    vocab = numbered(*BYTES, *("".join(merge) for merge in merges))
    made = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not trim)
    made.decoder = decoders.ByteLevel()
    if trim:
        made.post_processor = processors.ByteLevel(trim_offsets=True)
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def sentencepiece(*merges: tuple[str, str]) -> Tokenizer:
    """Return BPE with byte fallback and a space sign put before the text, as Llama 2's."""
    pieces = ["<unk>", *FALLBACK, "▁", *LETTERS, *("".join(merge) for merge in merges)]
    made = Tokenizer(models.BPE(vocab=numbered(*pieces), merges=list(merges), unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    space = decoders.Replace("▁", " ")
    made.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return made


def unigram(*pieces: str) -> Tokenizer:
    """Return Unigram over Metaspace without any fallback: other letters are unknown."""
    scored = [("<unk>", -9.0), *((piece, -5.0) for piece in ["▁", *LETTERS]), *((piece, -1.0) for piece in pieces)]
    made = Tokenizer(models.Unigram(scored, unk_id=0))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


def wordpiece(*pieces: str) -> Tokenizer:
    """Return WordPiece that lowers letters and drops accents, as BERT's."""
    vocab = numbered("[UNK]", *LETTERS, *(f"##{letter}" for letter in LETTERS), *pieces)
    made = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=True)
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return made


def word_ends(*merges: tuple[str, str]) -> Tokenizer:
    """Return BPE that marks the ends of words, as GPT-1's; it drops letters that it does not know."""
    pieces = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), *("".join(merge) for merge in merges)]
    made = Tokenizer(models.BPE(vocab=numbered(*pieces), merges=list(merges), end_of_word_suffix="</w>"))
    made.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()])
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder()
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": lambda: byte_level(("t", "h"), ("Ġ", "th"), ("Ġ", "â")),
    "byte-level, prefix space, trimmed offsets": lambda: byte_level(("a", "Ġ"), prefix=True, trim=True),
    "byte-level, composed": lambda: byte_level(("t", "h"), normalizer=normalizers.NFKC()),
    "sentencepiece": lambda: sentencepiece(("▁", "t"), ("t", "h"), ("▁t", "h")),
    "unigram": lambda: unigram("▁the", "the", "an"),
    "wordpiece": lambda: wordpiece("the", "##he", "an", "##an"),
    "word ends": lambda: word_ends(("t", "h"), ("th", "e</w>")),
}


def saved(made: Tokenizer, folder: Path, *added: str) -> Path:
    """Write the tokenizer with an end-of-document token and these added tokens to `folder`; return the file."""
    made.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True)])
    made.add_tokens([AddedToken(text, normalized=False) for text in added])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
