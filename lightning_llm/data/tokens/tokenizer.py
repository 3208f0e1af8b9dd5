"""Tokenizers: text to token ids and back.

Every kind is a tokenizer.json of the `tokenizers` library: a byte-level BPE trained here, the user's own file, or plain
bytes. Also reads what other files say of it (its end-of-document token), and names commands that convert other formats.
"""

import json
import os
import shutil
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_llm.config.weight_folders import TOKENIZER
from lightning_llm.data.tokens.token_text import LossCounter, added_texts, byte_counts, decoded, pieces_of_token

if TYPE_CHECKING:
    import tokenizers

DECLARING = ("tokenizer_config.json", "special_tokens_map.json")
SAMPLING = "dropout", "alpha", "nbest_size"
"""Sampling parameters of the library's models: BPE's dropped merges, Unigram's temperature and number of paths."""
END_MEANINGS = ("endoftext", "endofdocument", "endofsentence", "eos", "eod")
"""Names of special tokens that end a document, letters only: DeepSeek's name has bars and underscores of other scripts.

The first of these that a tokenizer.json has is used.
"""
END_OF_DOCUMENT = "<|endoftext|>"
END_OF_DOCUMENT_NAMES = (
    END_OF_DOCUMENT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|end▁of▁sentence|>",
    "<|im_end|>",
    "<EOS>",
    "[EOS]",
)
BYTES_VOCAB_SIZE = 257
SMALLEST_BPE_VOCAB_SIZE = 257


class Tokenizer:
    """A tokenizer.json and its end-of-document token. Can be pickled.

    `vocab_size` is the largest id + 1. `fingerprint` is a hash of the file and the end-of-document id. Text is never
    encoded as a special token: the spelling of one in a document is ordinary text.
    """

    def __init__(self, path: str | Path, end_of_document: str | None = None):
        """Open a file or a folder. Raises OSError, or ValueError if it is invalid or has no end-of-document token."""
        self.path = tokenizer_file(path)
        vocabulary = read_vocabulary(self.path)
        found = find_end_of_document(vocabulary, end_of_document, self.path)
        if found is None:
            raise ValueError(f"{self.path} has no token {end_of_document or ' or '.join(END_OF_DOCUMENT_NAMES)}")
        self.end_of_document = found
        self.is_bytes = vocabulary == bytes_vocabulary() and _copies_bytes(self.path)
        self.sampling = sampling_in(self.path)
        self.vocab_size = max(vocabulary.values()) + 1
        content = self.path.read_bytes() + found.to_bytes(8, "little")
        self.fingerprint = blake2b(content, digest_size=16).hexdigest()

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """Dtype of cached tokens: uint16 if all ids fit, else uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    @cached_property
    def _backend(self) -> "tokenizers.Tokenizer":
        import tokenizers

        backend = tokenizers.Tokenizer.from_file(str(self.path))
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        switch_off_sampling(backend)
        backend.post_processor = tokenizers.processors.Sequence([])  # some cut spaces off the offsets; ids stay
        return backend

    @cached_property
    def _added_texts(self) -> dict[int, str]:
        return added_texts(self._backend)

    def __getstate__(self) -> dict[str, object]:
        made = ("_backend", "_added_texts", "_losses")
        return {key: value for key, value in self.__dict__.items() if key not in made}

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return each text's token ids, uint32 [tokens], without adding an end-of-document or other special token."""
        if self.is_bytes:  # the backend's result, sixty times as fast
            return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def byte_counts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the number of UTF-8 bytes that each token of each text represents, uint32 [tokens + 1] per text.

        The last entry is for the end-of-document token. The sum is the size of the text. See `token_text.byte_counts`.
        """
        if self.is_bytes:
            return [np.append(np.ones(len(text.encode()), np.uint32), np.uint32(0)) for text in texts]
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [byte_counts(text, each.offsets) for text, each in zip(texts, encodings, strict=True)]

    def encode_counted(self, texts: Sequence[str]) -> tuple[list[np.ndarray], list[int]]:
        """Return (`encode_batch` of the texts, number of non-blank characters without a token in each text)."""
        if self.is_bytes or self._losses.lossless:
            return self.encode_batch(texts), [0] * len(texts)
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        tokens = [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]
        return tokens, self._losses.dropped(texts, encodings)

    @cached_property
    def _losses(self) -> LossCounter:
        return LossCounter(self.path, self._backend)

    @cached_property
    def unknown(self) -> int | None:
        """Id of the token for unknown text; None if there is none."""
        return unknown_token(self.path)

    def decode(self, tokens: Iterable[int], skip_special: bool = False) -> str:
        """Return the text of `tokens`, with special tokens unless `skip_special`; invalid UTF-8 becomes U+FFFD."""
        return decoded(self._backend, [int(t) for t in tokens], self._added_texts, skip_special)

    def pieces_in(self, smaller: "Tokenizer", token: int) -> list[int]:
        """Return the ids with which `smaller` encodes the text of `token`, an id of this tokenizer.

        `smaller` is the same tokenizer with fewer tokens; see `token_text.pieces_of_token`.
        """
        return pieces_of_token(self._backend, smaller._backend, token)

    def declare_end(self, folder: Path) -> None:
        """Write the end-of-document token next to the copy in `folder`, if tokenizer.json itself does not name it."""
        vocabulary = read_vocabulary(self.path)
        name = declared_beside(self.path, vocabulary)
        is_usual = find_end_of_document(vocabulary, None) is not None or declared_within(self.path) is not None
        if name is not None and vocabulary[name] == self.end_of_document and not is_usual:
            write_declaration(folder, name)

    def save(self, path: str | Path) -> Path:
        """Copy the tokenizer.json to the file or existing folder `path`; return the path of the copy."""
        return Path(shutil.copyfile(self.path, tokenizer_file(path)))


def tokenizer_file(path: str | Path) -> Path:
    """Return the tokenizer.json at `path`, which is the file itself or its folder."""
    expanded = Path(os.path.expanduser(path)).absolute()
    return expanded / TOKENIZER if os.path.isdir(expanded) else expanded


def read_vocabulary(file: Path) -> dict[str, int]:
    """Return {token: id} of a tokenizer.json, including added tokens, read as JSON (`tokenizers` is not imported).

    Raises OSError if it cannot be read and ValueError if it is not a tokenizer.json.
    """
    try:
        content = json.loads(file.read_bytes())
        listed = content["model"]["vocab"]
        vocabulary = dict(listed) if isinstance(listed, dict) else {entry[0]: i for i, entry in enumerate(listed)}
        return vocabulary | {token["content"]: token["id"] for token in content.get("added_tokens", ())}
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        text = f"{file} is not a tokenizer.json of the `tokenizers` library: {format_problem(file)}"
        raise ValueError(text) from error


def find_end_of_document(vocabulary: dict[str, int], name: str | None, file: Path | None = None) -> int | None:
    """Return the id of the token that ends a document; None if absent.

    It is `name`; if that is None, the first token with a usual name, or else the one declared by the tokenizer.json
    `file` or the files next to it. Raises OSError and ValueError for one of these that cannot be read.
    """
    names = END_OF_DOCUMENT_NAMES if name is None else (name,)
    found = next((vocabulary[n] for n in names if n in vocabulary), None)
    if found is not None or name is not None or file is None:
        return found
    declared = declared_beside(file, vocabulary) or declared_within(file)
    return None if declared is None else vocabulary.get(declared)


def unusual_end_of_document(file: Path, ids: Sequence[int]) -> str | None:
    """Return the name of a model's end-of-document token if `Tokenizer(file)` would not find it; else None.

    `ids`: the model's end tokens, e.g. of its generation_config.json. Of several, one with a usual name
    (`END_OF_DOCUMENT_NAMES`) is preferred; ids that are not in the tokenizer.json `file` are ignored. Raises OSError
    and ValueError as `read_vocabulary` does.
    """
    vocabulary = read_vocabulary(file)
    tokens = {index: token for token, index in vocabulary.items()}
    ends = [tokens[index] for index in ids if index in tokens]
    chosen = next((name for name in END_OF_DOCUMENT_NAMES if name in ends), ends[0] if ends else None)
    return None if chosen is None or find_end_of_document(vocabulary, None) == vocabulary[chosen] else chosen


def declared_beside(file: Path, vocabulary: Mapping[str, int]) -> str | None:
    """Return the `eos_token` that a file next to a tokenizer.json declares; None if none does.

    Files are `DECLARING`; a token that is not in `vocabulary` does not count. Raises OSError and ValueError.
    """
    for name in DECLARING:
        if (file.parent / name).is_file():
            token = _mapping(file.parent / name).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and token in vocabulary:
                return token
    return None


def declared_within(file: Path) -> str | None:
    """Return the special token of a tokenizer.json that ends documents by its name (`END_MEANINGS`); None if absent.

    Raises OSError and ValueError.
    """
    special = [each["content"] for each in _mapping(file).get("added_tokens") or () if each.get("special")]
    by_meaning = {_letters(token): token for token in reversed(special)}
    return next((by_meaning[meaning] for meaning in END_MEANINGS if meaning in by_meaning), None)


def write_declaration(folder: Path, end_of_document: str) -> None:
    """Write tokenizer_config.json with this `eos_token` into `folder`, unless the file exists."""
    file = folder / DECLARING[0]
    if not file.exists():
        file.write_text(json.dumps({"eos_token": end_of_document}, ensure_ascii=False), encoding="utf-8")


def _letters(token: str) -> str:
    return "".join(each for each in unicodedata.normalize("NFKC", token).casefold() if each.isalnum())


def _mapping(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_bytes())
    return content if isinstance(content, dict) else {}


def sampling_in(file: Path) -> str | None:
    """Return the setting of a tokenizer.json that makes tokenization random, e.g. "dropout=0.1"; None if none does."""
    model = _mapping(file).get("model") or {}
    return next((f"{key}={model[key]}" for key in SAMPLING if model.get(key)), None)


def switch_off_sampling(backend: Any) -> None:
    """Make `backend` (`tokenizers` library) deterministic: the same text always gives the same tokens."""
    for key in SAMPLING:
        if getattr(backend.model, key, None) is not None:
            setattr(backend.model, key, None)


def unknown_token(file: Path) -> int | None:
    """Return the id of a tokenizer.json's token for unknown text; None if it has none."""
    model = _mapping(file).get("model") or {}
    vocabulary, name = model.get("vocab"), model.get("unk_token")
    found = vocabulary.get(name) if isinstance(vocabulary, dict) else model.get("unk_id")
    return found if isinstance(found, int) else None


def train_bpe(texts: Iterable[str], vocab_size: int, file: Path) -> None:
    """Train byte-level BPE (GPT-2's: Radford et al. 2019, section 2.2) on `texts` and write it to `file`.

    The same texts give the same file with any number of threads. The end-of-document token has id 0.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(iter(texts), trainer)
    backend.save(str(file))


def bytes_vocabulary() -> dict[str, int]:
    """Return {token: id} of the tokenizer of plain bytes: id = byte value, and end-of-document 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]  # GPT-2 shows these as the characters from 256 up, in order
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)} | {END_OF_DOCUMENT: 256}


def _copies_bytes(file: Path) -> bool:
    """Return whether a tokenizer.json with the byte vocabulary encodes a text as its unchanged bytes."""
    content = json.loads(file.read_bytes())
    model, split = content["model"], content.get("pre_tokenizer") or {}
    changes = model.get("merges"), model.get("continuing_subword_prefix"), model.get("end_of_word_suffix")
    splits_bytes = split.get("type") == "ByteLevel" and not split.get("add_prefix_space")
    return splits_bytes and not content.get("normalizer") and not any(changes)


def write_bytes_tokenizer(file: Path) -> None:
    """Write plain bytes as a byte-level BPE without merges: id = byte value, and end-of-document 256."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE(vocab=bytes_vocabulary(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True)])
    backend.save(str(file))


def format_problem(file: Path) -> str:
    """Return a text that names the format of `file`, which is not a tokenizer.json, and the command to convert it."""
    with file.open("rb") as opened:
        head = opened.read(4096)
    return next(_formats(file, head), "it is not JSON with the keys of such a file")


def _formats(file: Path, head: bytes) -> Iterator[str]:
    from_folder = (
        'python -c "from transformers import AutoTokenizer as A; '
        f"A.from_pretrained({str(file.parent)!r}).save_pretrained('converted')\""
    )
    first = head.split(b"\n", 1)[0].split()
    if len(first) == 2 and first[1].isdigit() and b"{" not in first[0]:
        text = "it is in tiktoken's format. Name it tokenizer.model and convert its folder (pip install tiktoken)"
        yield f"{text}: {from_folder}"
    elif b"tekken" in file.name.lower().encode() or b'"token_bytes"' in head:
        yield f"it is in Mistral's tekken format. Convert its folder (pip install mistral-common): {from_folder}"
    elif head[:1] == b"\n" or b"\x00" in head or file.suffix in (".model", ".spm"):
        yield f"it is a sentencepiece model. Convert its folder (pip install sentencepiece): {from_folder}"
    elif file.name in ("vocab.json", "merges.txt", "vocab.txt", *DECLARING):
        yield f"it is one part of a tokenizer. Convert its folder: {from_folder}"


def other_format_in(folder: Path) -> Path | None:
    """Return a file of `folder` that is a tokenizer in another format; None if there is none."""
    patterns = "tokenizer.model", "tekken.json", "*.tiktoken", "*.model", "vocab.json", "vocab.txt"
    return next((file for pattern in patterns for file in sorted(folder.glob(pattern))), None)
