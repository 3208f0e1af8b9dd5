"""Hash chain over the lines of `metrics.jsonl`, which verifies the step metrics of a run.

The chain starts at 16 zero bytes; each line with its newline extends it: digest = BLAKE2b-128(previous digest, line).
Its head is stored in the manifest of each checkpoint and in the summary of a run that ended. It detects accidents and
careless edits. It is not a signature: the chain can be recomputed after a deliberate edit. No slow imports.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

DIGEST_BYTES = 16
RECORDS = "records"
"""Key of the head in `summary.json` and in manifests."""


@dataclass(frozen=True)
class ChainHead:
    """Head of the chain: its digest after `lines` lines.

    Steps up to `unverified_steps` were written by an earlier release, without a chain.
    """

    lines: int = 0
    digest: bytes = bytes(DIGEST_BYTES)
    unverified_steps: int = 0

    def after(self, line: bytes) -> "ChainHead":
        """Return the head after one more line, including its newline."""
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
        """Return the head as JSON data, for a summary or a manifest."""
        unverified = {"unverified_steps": self.unverified_steps} if self.unverified_steps else {}
        return {"lines": self.lines, "chain": self.digest.hex(), **unverified}

    @classmethod
    def from_data(cls, data: Any) -> "ChainHead":
        """Return the head written by `as_data`. Raises ValueError if `data` is invalid."""
        try:
            head = cls(data["lines"], bytes.fromhex(data["chain"]), data.get("unverified_steps", 0))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"'{RECORDS}' is not the head of a hash chain") from error
        if type(head.lines) is not int or type(head.unverified_steps) is not int or len(head.digest) != DIGEST_BYTES:
            raise ValueError(f"'{RECORDS}' is not the head of a hash chain")
        return head

    def problem(self, found: "ChainHead", where: str = "") -> str | None:
        """Return the problem of a file with the head `found` if this recorded head differs; None if they agree.

        The text continues a sentence that begins with the file's name. `where`: the part of the file that was read,
        such as " up to step 4".
        """
        if found.lines != self.lines:
            return f"has {_count(found.lines)}{where}, but {self.lines} were written: lines were added or lost"
        if found.digest != self.digest:
            return f"was changed{where}: one of its {_count(self.lines)} was edited or moved"
        return None


class RecordChain:
    """Chain of a growing `metrics.jsonl`: its head now, and before the newest step, which may be discarded."""

    def __init__(self, head: ChainHead | None = None):
        self.head = self._before = head or ChainHead()
        self._step: int | None = None

    def add(self, step: int, line: bytes) -> None:
        """Add `line`, the written record of `step`, to the chain."""
        if step != self._step:
            self._before, self._step = self.head, step
        self.head = self.head.after(line)

    def at(self, step: int) -> ChainHead:
        """Return the head after the records up to `step`, which is the newest step or the one before."""
        return self._before if self._step is not None and self._step > step else self.head


def _count(number: int) -> str:
    return f"{number} line{'' if number == 1 else 's'}"
