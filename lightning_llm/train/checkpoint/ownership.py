"""The run that a checkpoint belongs to: an id in the run's summary.json and in the manifest of each of its checkpoints.

The id says which run, not which config: two runs of one config may have other learning rates at the same step (another
trainer.max_steps) or another machine's kernels. A folder that is moved or copied whole keeps it. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from lightning_llm.train.checkpoint.manifest import MANIFEST, Checkpoint, Damage

SHOWN_DIGITS = 8


@dataclass(frozen=True)
class RunIdentity:
    """`id`: 32 hex digits. `begun_at_step`: the folder's own records follow this step.

    It is 0 unless the folder was begun from another run's checkpoint, and None where an earlier release began the
    folder, whose checkpoints carry no id.
    """

    id: str
    begun_at_step: int | None = 0

    @classmethod
    def new(cls, begun_at_step: int | None = 0) -> "RunIdentity":
        """Return the identity of a run that begins now."""
        return cls(uuid4().hex, begun_at_step)

    @classmethod
    def of_summary(cls, summary: Mapping[str, Any]) -> "RunIdentity | None":
        """Return what `summary.json` says, None where it says nothing."""
        run_id, begun = summary.get("run_id"), summary.get("begun_at_step")
        return cls(run_id, begun if isinstance(begun, int) else None) if isinstance(run_id, str) else None

    def facts(self) -> dict[str, Any]:
        """Return what `summary.json` is to say."""
        begun = {} if self.begun_at_step is None else {"begun_at_step": self.begun_at_step}
        return {"run_id": self.id, **begun}

    def foreign(self, checkpoint: Checkpoint) -> Damage | None:
        """Return that `checkpoint` is another run's, None if it is this one's."""
        if checkpoint.run_id == self.id or (checkpoint.run_id is None and self.begun_at_step is None):
            return None
        here = f"here it is {self.id[:SHOWN_DIGITS]}"
        if checkpoint.run_id is None:
            text = f"names no run, as those of earlier releases do (run id: {here})"
        else:
            written = f", written in {Path(checkpoint.written_in).parent}" if checkpoint.written_in else ""
            text = f"is of another run (run id {checkpoint.run_id[:SHOWN_DIGITS]}{written}; {here})"
        return Damage(checkpoint.folder, MANIFEST, text, foreign=True)
