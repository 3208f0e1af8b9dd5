"""Files next to or instead of a tokenizer.json: their declarations, and commands that convert other formats."""

import json
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DECLARING = ("tokenizer_config.json", "special_tokens_map.json")
SAMPLING = "dropout", "alpha", "nbest_size"
"""Sampling parameters of the library's models: BPE's dropped merges, Unigram's temperature and number of paths."""
END_MEANINGS = ("endoftext", "endofdocument", "endofsentence", "eos", "eod")
"""Names of special tokens that end a document, letters alone: DeepSeek's has bars and underscores of other scripts."""


def declared_beside(file: Path, vocabulary: Mapping[str, int]) -> str | None:
    """Return the `eos_token` of the files next to a tokenizer.json. Raises OSError and ValueError."""
    for name in DECLARING:
        if (file.parent / name).is_file():
            token = _mapping(file.parent / name).get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and token in vocabulary:
                return token
    return None


def declared_within(file: Path) -> str | None:
    """Return the special token of a tokenizer.json with a name that means the end. Raises OSError and ValueError."""
    special = [each["content"] for each in _mapping(file).get("added_tokens") or () if each.get("special")]
    by_meaning = {_letters(token): token for token in reversed(special)}
    return next((by_meaning[meaning] for meaning in END_MEANINGS if meaning in by_meaning), None)


def write_declaration(folder: Path, end_of_document: str) -> None:
    """Write the end-of-document token next to the tokenizer.json of `folder`, unless a file declares it."""
    file = folder / DECLARING[0]
    if not file.exists():
        file.write_text(json.dumps({"eos_token": end_of_document}, ensure_ascii=False), encoding="utf-8")


def _letters(token: str) -> str:
    return "".join(each for each in unicodedata.normalize("NFKC", token).casefold() if each.isalnum())


def _mapping(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_bytes())
    return content if isinstance(content, dict) else {}


def sampling_in(file: Path) -> str | None:
    """Return the "key=value" of a tokenizer.json that makes tokenization random, None if there is none."""
    model = _mapping(file).get("model") or {}
    return next((f"{key}={model[key]}" for key in SAMPLING if model.get(key)), None)


def switch_off_sampling(backend: Any) -> None:
    """Make `backend` (`tokenizers` library) deterministic: the same text always gives the same tokens."""
    for key in SAMPLING:
        if getattr(backend.model, key, None) is not None:
            setattr(backend.model, key, None)


def unknown_token(file: Path) -> int | None:
    """Return the id of the token for unknown text, None if there is none."""
    model = _mapping(file).get("model") or {}
    vocabulary, name = model.get("vocab"), model.get("unk_token")
    found = vocabulary.get(name) if isinstance(vocabulary, dict) else model.get("unk_id")
    return found if isinstance(found, int) else None


def format_problem(file: Path) -> str:
    """Return the format of `file`, which is no tokenizer.json, and how to convert it."""
    with file.open("rb") as opened:
        head = opened.read(4096)
    return next(_formats(file, head), "it is no JSON with the keys of such a file")


def _formats(file: Path, head: bytes) -> Iterator[str]:
    from_folder = (
        'python -c "from transformers import AutoTokenizer as A; '
        f"A.from_pretrained({str(file.parent)!r}).save_pretrained('converted')\""
    )
    first = head.split(b"\n", 1)[0].split()
    if len(first) == 2 and first[1].isdigit() and b"{" not in first[0]:
        yield f"it is tiktoken's. Name it tokenizer.model and convert its folder (pip install tiktoken): {from_folder}"
    elif b"tekken" in file.name.lower().encode() or b'"token_bytes"' in head:
        yield f"it is Mistral's tekken. Convert its folder (pip install mistral-common): {from_folder}"
    elif head[:1] == b"\n" or b"\x00" in head or file.suffix in (".model", ".spm"):
        yield f"it is a model of sentencepiece. Convert its folder (pip install sentencepiece): {from_folder}"
    elif file.name in ("vocab.json", "merges.txt", "vocab.txt", *DECLARING):
        yield f"it is one part of a tokenizer. Convert its folder: {from_folder}"


def other_format_in(folder: Path) -> Path | None:
    """Return a file of `folder` that is a tokenizer in another format, None where there is none."""
    patterns = "tokenizer.model", "tekken.json", "*.tiktoken", "*.model", "vocab.json", "vocab.txt"
    return next((file for pattern in patterns for file in sorted(folder.glob(pattern))), None)
