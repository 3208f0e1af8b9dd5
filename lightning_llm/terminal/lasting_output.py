"""Standard output and error that outlive whoever reads them: what trains for hours does not end with `| head -3`."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO


class LastingStream:
    """A text stream as it is, until its reader has gone: what is written from then on is dropped."""

    def __init__(self, stream: TextIO, on_gone: Callable[[], None]):
        self._stream = stream
        self._on_gone = on_gone

    def write(self, text: str) -> int:
        """Write `text`, or drop it."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._drop()
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write `lines`, or drop them."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush what was written, or drop it."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._drop()

    def _drop(self) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())  # for what lies in the stream's buffer, and for child processes
        os.close(null)
        self._on_gone()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Have sys.stdout and sys.stderr drop what nobody reads any more, and say so once on the other of the two."""

    def say(gone: str, other: TextIO) -> Callable[[], None]:
        def said() -> None:
            with suppress(BrokenPipeError):  # nobody is left to read it
                print(f"note   nobody reads this run's {gone} any more: it goes on without", file=other, flush=True)

        return said

    out = LastingStream(sys.stdout, say("output", sys.stderr))
    errors = LastingStream(sys.stderr, say("errors", sys.stdout))
    with redirect_stdout(out), redirect_stderr(errors):
        try:
            yield
        finally:
            out.flush()
            errors.flush()
