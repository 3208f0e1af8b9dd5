"""Remove credentials from everything that is printed or written; keep those of URIs for child processes.

A config never contains them (`withheld` removes them during composition), so no file, artifact, tag or checkpoint can.
`with_credentials` returns the full URI for connecting to the server.
"""

import os
import re
import sys
import traceback
from collections.abc import Container, Iterator
from functools import cache
from types import TracebackType

WHOLE_URIS_VARIABLE = "LIGHTNING_LLM_TRACKING_URIS"
"""Environment variable with the tracking URIs as given, one per line, for this process and its children."""

# Hydra writes the colons of swept values as "\:".
# A password may contain any character that is not percent-encoded: remove everything from the colon to the last @.
_USER = re.compile(r"(\b(?!sqlite|file)[A-Za-z][\w+.\-]*\\?://)[^/:@?#\s'\"]*(?::[^\s'\"]*)?@")
_USER_ALONE = re.compile(r"\b(?!sqlite|file)[A-Za-z][\w+.\-]*\\?://[^/:@?#\s'\"]*(?::[^/\s'\"]*)?@")
"""Strict form for standard URIs: the path after "/" may contain an @."""
_SECRET = re.compile(
    r"(?<=[?&;#])[\w-]*(?:password|passwd|pwd|token|secret|key)(?:[_-]?id)?=[^&;#\s'\"]*&?", re.IGNORECASE
)
_LEFT_OVER = re.compile(r"(://[^\s'\"]*)[?&;#](?=$|[\s'\"])")
_SECRET_PART = re.compile(
    r"\w*(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|APIKEY|CREDENTIAL|WEBHOOK)S?\d*|(KEY|PAT|PASS|PWD|AUTH|COOKIE|JWT)S?\d*",
    re.IGNORECASE,
)
"""Part of a variable's name, between underscores, that marks a secret: HF_TOKEN, GITHUB_PAT, OPENAI_KEY_1."""
_TOKEN = re.compile(
    r"\b(gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{35}|xox[abeprs]-[\w-]{10,})"
)
"""Tokens that are recognized by their prefix."""
_interpolated: set[str] = set()
"""Variables that a config of this process read by `oc.env`."""
_LEAST_SECRET = 8
"""Minimum length of a secret; shorter texts may occur by chance."""
_NO_WORD = 16
"""Minimum length of a secret within a longer word; shorter texts may occur by chance."""


def redacted(text: str) -> str:
    """Return `text` without credentials in URIs, and with $NAME in place of the value of a secret variable.

    Values that a config read from any variable by `oc.env` are also replaced where they are whole words, since they may
    be secret.
    """
    for name, value in _secrets():
        text = text.replace(value, f"${name}")
    for name in sorted(_interpolated):
        if _may_be_secret(value := os.environ.get(name, "").strip()):
            text = _whole(value).sub(f"${name}", text)
    return _TOKEN.sub("[token]", redact_uri(text))


def secret_in(text: str, known: Container[str] = ()) -> str | None:
    """Return the kind of secret in `text`: the name of its environment variable, or "" for a password or token.

    None if there is no secret. `known`: words that are not secret.
    """
    for name, value in _secrets():
        if value in text and value not in known and (len(value) >= _NO_WORD or _is_whole(value, text)):
            return name
    is_address = "://" in text and (_USER_ALONE.search(text) or _SECRET.search(text))
    return "" if is_address or _TOKEN.search(text) else None


def note_interpolated(name: str) -> None:
    """Record that a config reads the environment variable `name`, for `redacted`."""
    _interpolated.add(name)


def _is_whole(value: str, text: str) -> bool:
    """Return whether `value` occurs in `text` as a whole word."""
    return _whole(value).search(text) is not None


def _whole(value: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w-]){re.escape(value)}(?![\w-])")


def _may_be_secret(value: str) -> bool:
    return len(value) >= _LEAST_SECRET and not os.path.exists(value)


def _secrets() -> Iterator[tuple[str, str]]:
    for name, value in os.environ.items():
        if _is_secret_name(name) and _may_be_secret(value.strip()):
            yield name, value.strip()


@cache
def _is_secret_name(name: str) -> bool:
    return any(map(_SECRET_PART.fullmatch, name.split("_")))


def print_redacted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception as Python does (`sys.excepthook`), without secrets."""
    print(redacted("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr, flush=True)


def redact_uri(text: str) -> str:
    """Return `text` with user names, passwords and tokens removed from its URIs."""
    return _LEFT_OVER.sub(r"\1", _SECRET.sub("", _USER.sub(r"\1", text)))


def withheld(uri: str) -> str:
    """Return `uri` without credentials, and store the full URI in the environment of this process."""
    clean = redact_uri(uri)
    if clean != uri:
        others = [each for each in _whole_uris() if redact_uri(each) != clean]
        os.environ[WHOLE_URIS_VARIABLE] = "\n".join([*others, uri])  # jobs of a sweep may have one each
    return clean


def with_credentials(uri: str) -> str:
    """Return `uri` as given in this process, in a parent process or in MLFLOW_TRACKING_URI; else `uri` itself."""
    known = [*_whole_uris(), os.environ.get("MLFLOW_TRACKING_URI", "")]
    return next((whole for whole in known if whole and redact_uri(whole) == uri), uri)


def _whole_uris() -> list[str]:
    return os.environ.get(WHOLE_URIS_VARIABLE, "").splitlines()
