"""Signs of life of what takes long before anything can be printed."""

import sys
import time


class Waiting:
    """Prints to stderr what is being done and how far it is, every `every_seconds`, the first time after as long."""

    def __init__(self, what: str, every_seconds: float = 5.0):
        self.what = what
        self.every_seconds = every_seconds
        self._told = time.monotonic()

    def tell(self, done: int) -> None:
        """Say that `done` of whatever is counted are done, if it is time to."""
        if (now := time.monotonic()) - self._told >= self.every_seconds:
            self._told = now
            print(f"note   {self.what}: {done} so far", file=sys.stderr, flush=True)


def show_progress(text: str) -> None:
    """Write `text` over the line that stands on stderr, "" to clear it; on a terminal alone."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
