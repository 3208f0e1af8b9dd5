"""The numbers of one log, as its reader found them; and the registry entry of a reader. Imports no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]


@dataclass(frozen=True)
class LoggedTable:
    """All numeric columns of one log. A general table has its rows in the order of the file, unsorted and unrepaired.

    The log of a known program has ascending steps, one row each: where it resumed, the abandoned attempts are left out,
    and a note says so.

    `format`: name of the reader; `source`: path or URI, as given. `columns`: {name: float64, [rows]}, all of one
    length. NaN marks a row that has no value of the column; a NaN that was logged (the run diverged) is stored as
    infinity. `mixed`: {column with some values that are no numbers: the first of them and its line}.

    `settings`: facts that the log itself states, and only those. Standard keys, where the log has them: `seed`,
    `total_steps`, `global_batch_size` (sequences), `sequence_length` (tokens), `tokens_per_step`, `tokenizer`,
    `vocab_size`, `loss_unit` ("nats", "bits"), `world_size`, `bytes_per_token`; all others keep their own name,
    nested ones with dots.
    `smoothed`: {column that the program smooths before it logs it: how}. `notes`: one sentence each for the audit.
    """

    format: str
    source: str
    columns: dict[str, Column]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    mixed: Mapping[str, str] = field(default_factory=dict)
    smoothed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LogSource:
    """The log to read. `path`: its file or folder, None for a URI; `head`: the start of a file as text, else "".

    `part`: one of several runs in a file, from an address such as "chart.csv#RUN".
    """

    address: str
    path: Path | None
    head: str = ""
    part: str = ""

    @property
    def is_folder(self) -> bool:
        """Whether the log is a folder."""
        return self.path is not None and self.path.is_dir()

    @property
    def first_line(self) -> str:
        """The first line of the file that is not blank; "" without one."""
        return next((line for line in self.head.splitlines() if line.strip()), "")


@dataclass(frozen=True)
class Reader:
    """Reader of one format.

    `recognizes`: whether a source has this format, judged by its content, never by its name alone. `read`: returns the
    table; raises ConfigError with key `source.address` for a log that is damaged, and ValueError or OSError, whose text
    is reported as "cannot be read as FORMAT: text".
    """

    format: str
    recognizes: Callable[[LogSource], bool]
    read: Callable[[LogSource], LoggedTable]
