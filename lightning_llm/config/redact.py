"""Credentials: left out of everything that is printed or written; those of addresses kept for this process's children.

A config never holds them (`withheld` takes them out where it is composed), so that no file, artifact, tag or checkpoint
can. `with_credentials` gives the whole address to what talks to the server.
"""

import os
import re
import sys
import traceback
from collections.abc import Container, Iterator
from functools import cache
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
_SECRET_PART = re.compile(
    r"\w*(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|APIKEY|CREDENTIAL|WEBHOOK)S?\d*|(KEY|PAT|PASS|PWD|AUTH|COOKIE|JWT)S?\d*",
    re.IGNORECASE,
)
"""A part, between underscores, of the name of a variable whose value is secret: HF_TOKEN, GITHUB_PAT, OPENAI_KEY_1."""
_TOKEN = re.compile(
    r"\b(gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{35}|xox[abeprs]-[\w-]{10,})"
)
"""Tokens that their beginning gives away, whichever variable holds them, or none."""
_interpolated: set[str] = set()
"""Variables that a config of this process took values from, by `oc.env`."""
_LEAST_SECRET = 8
"""Characters: what is shorter may stand anywhere by chance."""
_NO_WORD = 16
"""Characters: what is shorter may be a part of a longer word by chance."""


def redacted(text: str) -> str:
    """Return `text` without credentials of addresses, and with $NAME for the value of a secret variable.

    What a config took from any variable by `oc.env` is replaced, too, where it stands by itself: only who set that
    variable knows whether it is a secret.
    """
    for name, value in _secrets():
        text = text.replace(value, f"${name}")
    for name in sorted(_interpolated):
        if _may_be_secret(value := os.environ.get(name, "").strip()):
            text = _whole(value).sub(f"${name}", text)
    return _TOKEN.sub("[token]", redact_uri(text))


def secret_in(text: str, known: Container[str] = ()) -> str | None:
    """Return what is secret in `text`: the variable whose value it holds, "" for a password in an address, or None.

    `known`: words that are no secret, whichever variable has them.
    """
    for name, value in _secrets():
        if value in text and value not in known and (len(value) >= _NO_WORD or _is_whole(value, text)):
            return name
    is_address = "://" in text and (_USER_ALONE.search(text) or _SECRET.search(text))
    return "" if is_address or _TOKEN.search(text) else None


def note_interpolated(name: str) -> None:
    """Note that a config takes the value of the environment variable `name`, which `redacted` then knows."""
    _interpolated.add(name)


def _is_whole(value: str, text: str) -> bool:
    """Return whether `value` stands in `text` by itself, and not only within a word."""
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
