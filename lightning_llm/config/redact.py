"""Credentials: left out of everything that is printed or written; those of addresses kept for this process's children.

A config never holds them (`withheld` takes them out where it is composed), so that no file, artifact, tag or checkpoint
can. `with_credentials` gives the whole address to what talks to the server.
"""

import os
import re
import sys
import traceback
from collections.abc import Container, Iterator
from types import TracebackType

WHOLE_URIS_VARIABLE = "LIGHTNING_LLM_TRACKING_URIS"
"""Of the environment: tracking addresses as they were given, one a line, for this process and those it starts."""

# Hydra writes the colons of swept values as "\:".
# A password may hold whatever its owner did not percent-encode: behind a colon everything up to the last @ goes.
_USER = re.compile(r"(\b(?!sqlite|file)[A-Za-z][\w+.\-]*\\?://)[^/:@?#\s'\"]*(?::[^\s'\"]*)?@")
_USER_ALONE = re.compile(r"\b(?!sqlite|file)[A-Za-z][\w+.\-]*\\?://[^/:@?#\s'\"]*(?::[^/\s'\"]*)?@")
"""As a standard address has it: behind a "/" begins a path, which may hold an @."""
_SECRET = re.compile(
    r"(?<=[?&;#])[\w-]*(?:password|passwd|pwd|token|secret|key)(?:[_-]?id)?=[^&;#\s'\"]*&?", re.IGNORECASE
)
_LEFT_OVER = re.compile(r"(://[^\s'\"]*)[?&;#](?=$|[\s'\"])")


_SECRET_VARIABLE = re.compile(
    r"\w*(PASSWORD|APIKEY)|(\w+_)?(TOKEN|SECRET|PASSWD|PASSPHRASE|KEY|ACCESS_KEY_ID|CREDENTIALS?|WEBHOOK(_URL)?)",
    re.IGNORECASE,
)
"""Of the environment: what a variable is called whose value is for nobody else: HF_TOKEN, AWS_SECRET_ACCESS_KEY, ..."""
_LEAST_SECRET = 8
"""Characters: what is shorter may stand anywhere by chance."""
_NO_WORD = 16
"""Characters: what is shorter may be a part of a longer word by chance."""


def redacted(text: str) -> str:
    """Return `text` without credentials of addresses, and with $NAME for the value of a secret variable."""
    for name, value in _secrets():
        text = text.replace(value, f"${name}")
    return redact_uri(text)


def secret_in(text: str, known: Container[str] = ()) -> str | None:
    """Return what is secret in `text`: the variable whose value it holds, "" for a password in an address, or None.

    `known`: words that are no secret, whichever variable has them.
    """
    for name, value in _secrets():
        if value in text and value not in known and (len(value) >= _NO_WORD or _is_whole(value, text)):
            return name
    is_address = "://" in text and (_USER_ALONE.search(text) or _SECRET.search(text))
    return "" if is_address else None


def _is_whole(value: str, text: str) -> bool:
    """Return whether `value` stands in `text` by itself, and not only within a word."""
    return re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", text) is not None


def _secrets() -> Iterator[tuple[str, str]]:
    for name, value in os.environ.items():
        if _SECRET_VARIABLE.fullmatch(name) and len(value) >= _LEAST_SECRET and not os.path.exists(value):
            yield name, value


def print_redacted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print what ends this process as Python does (`sys.excepthook`), but for what is secret in it."""
    print(redacted("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr, flush=True)


def redact_uri(text: str) -> str:
    """Return `text`, an address or words with addresses in it, without their user names, passwords and tokens."""
    return _LEFT_OVER.sub(r"\1", _SECRET.sub("", _USER.sub(r"\1", text)))


def withheld(uri: str) -> str:
    """Return `uri` without credentials, and keep it whole in the environment of this process."""
    clean = redact_uri(uri)
    if clean != uri:
        others = [each for each in _whole_uris() if redact_uri(each) != clean]
        os.environ[WHOLE_URIS_VARIABLE] = "\n".join([*others, uri])  # jobs of a sweep may have one each
    return clean


def with_credentials(uri: str) -> str:
    """Return `uri` as it was given, where that was in this process, one that started it, or MLFLOW_TRACKING_URI."""
    known = [*_whole_uris(), os.environ.get("MLFLOW_TRACKING_URI", "")]
    return next((whole for whole in known if whole and redact_uri(whole) == uri), uri)


def _whole_uris() -> list[str]:
    return os.environ.get(WHOLE_URIS_VARIABLE, "").splitlines()
