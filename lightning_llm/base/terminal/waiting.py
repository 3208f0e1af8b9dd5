"""Progress of what takes long before anything can be printed."""

import sys
import time
from typing import Self


class Waiting:
    """Prints to stderr what is being done and how much of it is done.

    On a terminal one line that is rewritten, and cleared at the end; elsewhere a line every `every_seconds`, the first
    after as long.
    """

    def __init__(self, what: str, of: int | None = None, every_seconds: float = 30.0):
        self.what, self.of = what, of
        self.every_seconds = 0.5 if sys.stderr.isatty() else every_seconds
        self._last = time.monotonic()

    def tell(self, done: int, more: str = "") -> None:
        """Report that `done` of whatever is counted are done, if it is time to; `more` follows the count."""
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
    """Write `text` over the line that stands on stderr, "" to clear it; on a terminal alone."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
