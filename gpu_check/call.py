"""What a check is given when it is called."""

from dataclasses import dataclass
from pathlib import Path

from gpu_check.journal import Journal
from gpu_check.rows import Clock


@dataclass(frozen=True)
class Call:
    """The rows there are, of other checks too; the check's time; a folder that is deleted when the check has ended."""

    journal: Journal
    clock: Clock
    scratch: Path
