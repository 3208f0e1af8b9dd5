"""Text from elsewhere (a model's, an exception's), made safe and short enough to show: it may hold any byte."""

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
_DIRECTION = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""They let text read otherwise than it is (Unicode TR 36)."""


def escaped(text: str) -> str:
    r"""Return `text` with control characters (C0, C1, DEL, lone surrogates, changes of direction) as \x1b or \u202e.

    Newlines and tabs stay.
    """
    return "".join(_escape(letter) for letter in text)


def _escape(letter: str) -> str:
    if letter in "\n\t" or (unicodedata.category(letter) not in ("Cc", "Cs") and letter not in _DIRECTION):
        return letter
    return f"\\x{ord(letter):02x}" if ord(letter) < 256 else f"\\u{ord(letter):04x}"


def shown(value: Any) -> Any:
    """Return nested data with all text, keys included, escaped: a newline or tab, too, so that no line is forged."""
    if isinstance(value, str):
        return value if value.isprintable() else escaped(value).replace("\n", "\\n").replace("\t", "\\t")
    if isinstance(value, Mapping):
        return {shown(key): shown(each) for key, each in value.items()}
    return [shown(each) for each in value] if isinstance(value, list | tuple) else value


def excerpt(text: str, max_lines: int = 40, max_columns: int = 400) -> tuple[str, int]:
    """Return `text` escaped, runs of blank lines as one, cut after `max_lines`; and how many lines that leaves out."""
    lines = _BLANK_LINES.sub("\n\n", escaped(text).strip("\n")).splitlines()
    shown = [line if len(line) <= max_columns else f"{line[:max_columns]} ..." for line in lines[:max_lines]]
    return "\n".join(shown), max(0, len(lines) - max_lines)


def one_line(text: str, max_columns: int = 600) -> str:
    """Return `text` escaped, in one line of at most `max_columns`."""
    line = " ".join(escaped(text).split())
    return line if len(line) <= max_columns else f"{line[:max_columns]} ..."
