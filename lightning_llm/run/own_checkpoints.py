"""Looks at a checkpoint beyond its own bytes: whose it is, and whether the records of its steps are there. No torch."""

import sys
from pathlib import Path
from typing import Any

from lightning_llm.config.commands import resume_elsewhere_command
from lightning_llm.config.schema import Config
from lightning_llm.record.files import damaged_record, summary_of
from lightning_llm.train.checkpoint.manifest import Checkpoint, Damage, Verify
from lightning_llm.train.checkpoint.ownership import RunIdentity

RECORDS = "metrics.jsonl"


def of_its_run(verify: Verify) -> Verify:
    """Return `verify` for checkpoints of the run whose folder they lie in, as far as its summary says which it is."""

    def of_its_run(checkpoint: Checkpoint) -> list[Damage]:
        run = RunIdentity.of_summary(known_summary(checkpoint.run_folder))
        foreign = run and run.foreign(checkpoint)
        return [foreign] if foreign else verify(checkpoint)

    return of_its_run


def with_records(config: Config, verify: Verify) -> Verify:
    """Return `verify` with a look at the records of the steps before: a checkpoint goes on from those, too.

    Where an earlier release began the folder nothing says after which step: where it was resumed last, or before.
    """
    folder = Path(config.run.dir)
    summary = known_summary(folder)
    known = RunIdentity.of_summary(summary)
    begun = known.begun_at_step if known else None
    at_latest = (summary.get("resumed_from_step") or 0) if summary else sys.maxsize

    def with_records(checkpoint: Checkpoint) -> list[Damage]:
        after = at_latest if begun is None else begun
        problem = damaged_record(folder / RECORDS, checkpoint.step, after, or_earlier=begun is None)
        if problem:
            elsewhere = resume_elsewhere_command(checkpoint.folder, folder, config.trainer.max_steps)
            problem += f" (without these records, in a new folder: {elsewhere})"
        return [*([Damage(checkpoint.folder, RECORDS, problem)] if problem else []), *verify(checkpoint)]

    return with_records


def known_summary(folder: Path) -> dict[str, Any]:
    """Return the folder's summary, {} where it is damaged: that is reported by whoever needs what it says."""
    try:
        return summary_of(folder)
    except ValueError:
        return {}
