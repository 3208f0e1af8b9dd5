"""Output on a terminal: safe text, rich consoles, progress, and standard streams that survive a closed reader.

Untrusted text (of a model, of an exception) may contain any byte; `escaped`, `shown`, `excerpt` and `one_line` make it
safe and short. With `lasting_output` a run continues when its output can no longer be written (`| head -3`, a closed
descriptor or terminal, a full disk).
"""

import os
import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
_DIRECTION = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that can make text appear different (Unicode TR 36)."""
_CLOSED = "was closed before the start"


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
    """Return nested data with all strings escaped, including keys, newlines and tabs, so that no line is forged."""
    if isinstance(value, str):
        return value if value.isprintable() else escaped(value).replace("\n", "\\n").replace("\t", "\\t")
    if isinstance(value, Mapping):
        return {shown(key): shown(each) for key, each in value.items()}
    return [shown(each) for each in value] if isinstance(value, list | tuple) else value


def excerpt(text: str, max_lines: int = 40, max_columns: int = 400) -> tuple[str, int]:
    """Return (`text` escaped, without repeated blank lines, at most `max_lines` long; number of omitted lines)."""
    lines = _BLANK_LINES.sub("\n\n", escaped(text).strip("\n")).splitlines()
    shown = [line if len(line) <= max_columns else f"{line[:max_columns]} ..." for line in lines[:max_lines]]
    return "\n".join(shown), max(0, len(lines) - max_lines)


def one_line(text: str, max_columns: int = 600) -> str:
    """Return `text` escaped, as one line of at most `max_columns` characters."""
    line = " ".join(escaped(text).split())
    return line if len(line) <= max_columns else f"{line[:max_columns]} ..."


def new_console(**options: Any) -> "Console":
    """Return a rich console with these options that writes to the current `sys.stdout`.

    In a notebook, rich bypasses `sys.stdout` by default and would ignore `redirect_stdout` and so `quiet=True`.
    """
    from rich.console import Console

    return Console(force_jupyter=False, **options)


class Waiting:
    """Printer of the progress of a long operation on stderr, used as a context.

    On a terminal one line is rewritten and cleared at the end; otherwise a line is printed every `every_seconds`.
    """

    def __init__(self, what: str, of: int | None = None, every_seconds: float = 30.0):
        self.what, self.of = what, of
        self.every_seconds = 0.5 if sys.stderr.isatty() else every_seconds
        self._last = time.monotonic()

    def tell(self, done: int, more: str = "") -> None:
        """Report that `done` items are done, unless the last report is too recent; `more` is text after the count."""
        if (now := time.monotonic()) - self._last < self.every_seconds:
            return
        self._last = now
        text = f"note   {self.what}: {done:,}{f' of {self.of:,}' if self.of is not None else ' so far'}{more}"
        if sys.stderr.isatty():
            show_progress(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        show_progress("")


def show_progress(text: str) -> None:
    """Replace the current line of stderr by `text` ("" clears it), if stderr is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


class OutputGoneError(Exception):
    """stdout, the only output of a verb, cannot be written. `reader_left`: True if its reader closed the pipe."""

    def __init__(self, reason: str, reader_left: bool):
        self.reader_left = reader_left
        super().__init__(f"stdout cannot be written: {reason}. The output is lost")


class LastingStream:
    """Text stream that drops its output once it can no longer be written; it then calls `on_gone` once."""

    def __init__(self, stream: TextIO, on_gone: Callable[[OSError | ValueError], None]):
        self._stream = stream
        self._on_gone = on_gone

    def write(self, text: str) -> int:
        """Write `text`, or drop it; characters outside of the stream's encoding are escaped."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError as error:
            return self.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except (OSError, ValueError) as error:
            self._drop(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write `lines`, or drop them."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream, or drop its content."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._drop(error)

    def _drop(self, error: OSError | ValueError) -> None:
        try:
            number = self._stream.fileno()
        except (OSError, ValueError):  # it has no descriptor
            self._stream = _nothing()
        else:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)  # for the stream's buffer and child processes
            os.close(null)
        self._on_gone(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_standard_streams() -> None:
    """Replace closed standard streams of this process by /dev/null, and let all of them write any character.

    Otherwise the next opened files would get the descriptors 0 to 2.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


@contextmanager
def lasting_output(*, needed: bool = False) -> Iterator[None]:
    """Context in which sys.stdout and sys.stderr drop output that cannot be written, with one note on the other stream.

    Raises:
        OutputGoneError: `needed` is set and stdout cannot be written.
    """

    def note(gone: str, other: TextIO | None) -> Callable[[OSError | ValueError], None]:
        def report(error: OSError | ValueError) -> None:
            with suppress(OSError, ValueError):  # the other stream may be closed, too
                print(f"note   {gone} can no longer be written: the run continues", file=other, flush=True)

        return report

    def refuse(error: OSError | ValueError) -> None:
        raise OutputGoneError(getattr(error, "strerror", None) or str(error), isinstance(error, BrokenPipeError))

    if sys.stdout is None and needed:
        raise OutputGoneError(_CLOSED, reader_left=False)
    out = LastingStream(sys.stdout or _nothing(), refuse if needed else note("stdout", sys.stderr))
    errors = LastingStream(sys.stderr or _nothing(), note("stderr", None if needed else sys.stdout))
    with redirect_stdout(out), redirect_stderr(errors):
        try:
            yield
        finally:
            errors.flush()
            out.flush()


@cache
def _nothing() -> TextIO:
    """Return a stream to /dev/null that stays open, since libraries keep a reference to sys.stderr."""
    return open(os.devnull, "w", encoding="utf-8")
