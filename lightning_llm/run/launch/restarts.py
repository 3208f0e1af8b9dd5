"""Ranks that were lost, and starting them again: a rank that was killed or hangs, a device or a machine that failed.

What comes back on the next try (a config that is wrong, a loss that is not finite, a full disk, a callback that fails)
is no loss of ranks. Imports no torch.
"""

import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

from lightning_llm.config.schema import Config
from lightning_llm.tracking.files import RESTARTS, read_records, summary_of, write_json

RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""How often torchrun has started its ranks again, and how often Slurm has queued its job again."""


class Ended(NamedTuple):
    """How a run's ranks ended: the exit code, and who was lost and how; None where nobody was."""

    code: int
    lost: str | None = None


class Restarts:
    """The restarts of one run: at most `trainer.max_restarts`, and none where the last one came no step further."""

    def __init__(self, config: Config):
        self.folder, self.most = Path(config.run.dir), config.trainer.max_restarts
        self.made = 0
        self._reached: int | None = None

    def again(self, ended: Ended) -> bool:
        """Return whether ranks that `ended` so are started again; say so, or why not, and note it in the summary."""
        if ended.lost is None or self.most == 0:
            return False
        if not (self.folder / "config.yaml").is_file():
            return False  # it had not begun, and would fail as it did
        reached = last_step(self.folder)
        if self.made == self.most:
            return _said(f"not started again: trainer.max_restarts={self.most} starts are used up")
        if self._reached is not None and reached <= self._reached:
            return _said(f"not started again: the last start came no further than step {self._reached} either")
        self.made, self._reached = self.made + 1, reached
        summary = summary_of(self.folder)
        event = {"lost": ended.lost, "reached_step": reached, "time": round(time.time(), 3)}
        write_json(self.folder / "summary.json", {**summary, RESTARTS: [*summary.get(RESTARTS, []), event]})
        _said(f"note   start {self.made} of at most {self.most} again, from the newest checkpoint that verifies")
        return True


def _said(text: str) -> bool:
    print(text, file=sys.stderr, flush=True)
    return False


def last_step(folder: Path) -> int:
    """Return the last step that the run's records tell of, 0 where they tell of none."""
    try:
        return max((int(record["step"]) for record in read_records(folder / "metrics.jsonl")), default=0)
    except (OSError, ValueError):
        return 0


def is_started_again() -> bool:
    """Return whether whoever started this process did so after an earlier start of it was lost."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in RESTART_COUNTS)


def goes_on(config: Config) -> Config:
    """Return `config` of a run that is started again: it goes on from its own folder's newest checkpoint."""
    return config if config.resume == "auto" else config.model_copy(update={"resume": "auto"})
