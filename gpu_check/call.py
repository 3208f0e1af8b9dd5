"""Inputs of a check."""

from dataclasses import dataclass
from pathlib import Path

from gpu_check.journal import Journal
from gpu_check.rows import Clock


@dataclass(frozen=True)
class Call:
    """Existing rows, including those of other checks; the check's time; a folder that is deleted after the check."""

    journal: Journal
    clock: Clock
    scratch: Path
