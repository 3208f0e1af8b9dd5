"""Standard output and error that outlive whoever reads them: what trains for hours does not end with `| head -3`.

Whatever keeps a stream from being written counts as a reader that has gone: a closed pipe, descriptor or terminal, a
full disk.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache
from typing import Any, TextIO

_CLOSED = "was closed before the start"


class OutputGoneError(Exception):
    """The standard output cannot be written, and is all that the verb is for. `reader_left`: its reader has ended."""

    def __init__(self, reason: str, reader_left: bool):
        self.reader_left = reader_left
        super().__init__(f"the standard output cannot be written: {reason}. Nothing else keeps what it would have held")


class LastingStream:
    """A text stream as it is, until it cannot be written: then `on_gone` is told, and what follows is dropped."""

    def __init__(self, stream: TextIO, on_gone: Callable[[OSError | ValueError], None]):
        self._stream = stream
        self._on_gone = on_gone

    def write(self, text: str) -> int:
        """Write `text`, or drop it; characters that the stream's encoding lacks as escapes."""
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
        """Flush what was written, or drop it."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._drop(error)

    def _drop(self, error: OSError | ValueError) -> None:
        try:
            number = self._stream.fileno()
        except (OSError, ValueError):  # it has no descriptor, or lost it
            self._stream = _nothing()
        else:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)  # for what lies in the stream's buffer, and for child processes
            os.close(null)
        self._on_gone(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_standard_streams() -> None:
    """Have this process's standard streams open, on nothing where they were closed, and write any character.

    Descriptors 0 to 2 would otherwise be those of the next files that are opened.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free: `number`
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


@contextmanager
def lasting_output(*, needed: bool = False) -> Iterator[None]:
    """Have sys.stdout and sys.stderr drop what cannot be written any more, and say so once on the other of the two.

    Raises:
        OutputGoneError: `needed`, and the standard output cannot be written.
    """

    def note(gone: str, other: TextIO | None) -> Callable[[OSError | ValueError], None]:
        def said(error: OSError | ValueError) -> None:
            with suppress(OSError, ValueError):  # nobody is left to read it
                print(f"note   nobody reads this run's {gone} any more: it goes on without", file=other, flush=True)

        return said

    def refuse(error: OSError | ValueError) -> None:
        raise OutputGoneError(getattr(error, "strerror", None) or str(error), isinstance(error, BrokenPipeError))

    if sys.stdout is None and needed:
        raise OutputGoneError(_CLOSED, reader_left=False)
    out = LastingStream(sys.stdout or _nothing(), refuse if needed else note("output", sys.stderr))
    errors = LastingStream(sys.stderr or _nothing(), note("errors", None if needed else sys.stdout))
    with redirect_stdout(out), redirect_stderr(errors):
        try:
            yield
        finally:
            errors.flush()
            out.flush()


@cache
def _nothing() -> TextIO:
    """Return a stream to nowhere, open to the end of the process: libraries keep what they find as sys.stderr."""
    return open(os.devnull, "w", encoding="utf-8")
