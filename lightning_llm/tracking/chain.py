"""A hash chain over the lines of `metrics.jsonl`, by which a run's records are verified.

The chain starts at 16 zero bytes. Each line, with its newline, moves it on: digest = BLAKE2b-128(digest before, line).
Its head stands in the manifest of each checkpoint and in the summary of a run that ended. It detects accidents and
careless edits. It is no signature: whoever edits a line on purpose can compute the chain anew. Imports nothing heavy.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

DIGEST_BYTES = 16
RECORDS = "records"
"""The key of the head in `summary.json` and in manifests."""


@dataclass(frozen=True)
class ChainHead:
    """The chain after `lines` lines. `unverified_steps`: an earlier release recorded the steps up to this one."""

    lines: int = 0
    digest: bytes = bytes(DIGEST_BYTES)
    unverified_steps: int = 0

    def after(self, line: bytes) -> "ChainHead":
        """Return the head after one more line, which ends with its newline."""
        digest = blake2b(self.digest + line, digest_size=DIGEST_BYTES).digest()
        return ChainHead(self.lines + 1, digest, self.unverified_steps)

    @classmethod
    def over(cls, lines: Iterable[bytes], unverified_steps: int = 0) -> "ChainHead":
        """Return the head after all of `lines`."""
        head = cls(unverified_steps=unverified_steps)
        for line in lines:
            head = head.after(line)
        return head

    def as_data(self) -> dict[str, Any]:
        """Return the head as JSON data."""
        unverified = {"unverified_steps": self.unverified_steps} if self.unverified_steps else {}
        return {"lines": self.lines, "chain": self.digest.hex(), **unverified}

    @classmethod
    def from_data(cls, data: Any) -> "ChainHead":
        """Return the head that `as_data` wrote. Raises ValueError if `data` is none."""
        try:
            head = cls(data["lines"], bytes.fromhex(data["chain"]), data.get("unverified_steps", 0))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"'{RECORDS}' is no head of a hash chain") from error
        if type(head.lines) is not int or type(head.unverified_steps) is not int or len(head.digest) != DIGEST_BYTES:
            raise ValueError(f"'{RECORDS}' is no head of a hash chain")
        return head

    def problem(self, found: "ChainHead", where: str = "") -> str | None:
        """Return how `found`, read from a file, contradicts this head, as the rest of a sentence; None if it does not.

        `where`: the part of the file that was read, " up to step 4".
        """
        if found.lines != self.lines:
            return f"has {_count(found.lines)}{where}, and {self.lines} were written: some were added or lost"
        if found.digest != self.digest:
            return f"does not hold what was written{where}: one of its {_count(self.lines)} was changed or moved"
        return None


class RecordChain:
    """The head of a file that grows, now and before the newest step: a step that is not kept may be written last."""

    def __init__(self, head: ChainHead | None = None):
        self.head = self._before = head or ChainHead()
        self._step: int | None = None

    def add(self, step: int, line: bytes) -> None:
        """Take the line of one record of `step` that was written."""
        if step != self._step:
            self._before, self._step = self.head, step
        self.head = self.head.after(line)

    def at(self, step: int) -> ChainHead:
        """Return the head after the records up to `step`, which is the newest step or the one before."""
        return self._before if self._step is not None and self._step > step else self.head


def _count(number: int) -> str:
    return f"{number} line{'' if number == 1 else 's'}"
