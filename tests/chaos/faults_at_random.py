"""Faults of a campaign, drawn by a seed: the kind, the moment and the process of each."""

import os
import random
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_llm.train.checkpoint.manifest import step_folders
from tests.chaos.chaos_job import ChaosJob

KINDS = ("kill a rank", "stop a rank", "SIGTERM", "SIGUSR1", "no disk space", "damage", "MLflow gone", "kill launcher")
LAYOUTS = {"single": 1, "ddp": 2, "zero3": 2, "zero1": 2, "tp": 2, "pp": 2, "cp": 2, "hsdp": 4}
RECIPES = ("fp32", "bf16", "fp8_delayed", "mxfp4_sr", "fp16")
STEPS = 12
OF_RANKS = ("kill a rank", "damage", "stop a rank")
ROTATED_SHARDS = ("model.hidden_size=128", "model.ffn_hidden_size=128", "data.sequence_length=256")
"""Sizes with parts under tp and cp that fit MXFP4's rotations of 64."""


@dataclass(frozen=True)
class Fault:
    """One: `kind` befalls a run of `layout` and `recipe` after `step`, or, where that is 0, `seconds` after its start.

    `place`: which rank or file, by a number of [0, 1). `restarts`: trainer.max_restarts.
    """

    kind: str
    layout: str
    recipe: str
    step: int
    seconds: float
    place: float
    restarts: int

    @classmethod
    def drawn(cls, seed: int, number: int) -> "Fault":
        """Return fault `number` of a campaign: every kind in turn, the rest at random."""
        draw = random.Random(f"{seed} {number}")
        layout, early = draw.choice(list(LAYOUTS)), draw.random() < 0.2
        return cls(
            kind=KINDS[number % len(KINDS)],
            layout=layout,
            recipe=draw.choice(RECIPES),
            step=0 if early else draw.randint(1, STEPS - 1),
            seconds=draw.uniform(0, 3) if early else draw.uniform(0, 0.05),
            place=draw.random(),
            restarts=draw.choice((0, 2)),
        )

    @property
    def world(self) -> int:
        """Ranks of the run."""
        return LAYOUTS[self.layout]

    def words(self) -> list[str]:
        """Return the overrides that make its run."""
        launched = self.world > 1 or self.kind == "kill launcher"
        return [
            f"parallel={self.layout}", f"precision={self.recipe}", f"trainer.devices={self.world}",
            *(["parallel.dp_shard=2"] if self.layout == "hsdp" else []),
            *(ROTATED_SHARDS if self.recipe == "mxfp4_sr" and self.layout in ("tp", "cp") else ()),
            f"trainer.max_restarts={max(1, self.restarts) if launched and self.world == 1 else self.restarts}",
            f"logger={'mlflow' if self.kind == 'MLflow gone' else 'none'}",
        ]  # fmt: skip

    def befall(self, job: ChaosJob) -> bool:
        """Wait for its moment and let it happen; return whether the run was still there."""
        metrics = job.run / "metrics.jsonl"
        while self.step and job.code is None and not (metrics.is_file() and _lines(metrics) >= self.step):
            time.sleep(0.005)
        time.sleep(self.seconds)
        if job.code is not None:
            return False
        try:
            self._strike(job)
        except ProcessLookupError:
            return False
        return True

    def _strike(self, job: ChaosJob) -> None:
        ranks = sorted(job.ranks())
        rank = ranks[int(self.place * len(ranks))]
        if rank == job.pid and self.world > 1 and self.kind in OF_RANKS:
            raise ProcessLookupError("its ranks have not begun: that is the launcher")
        if self.kind in ("kill a rank", "damage"):
            os.kill(rank, signal.SIGKILL)
        elif self.kind == "stop a rank":
            os.kill(rank, signal.SIGSTOP if self.world > 1 else signal.SIGKILL)  # nobody waits for one alone
        elif self.kind in ("SIGTERM", "SIGUSR1"):
            os.kill(job.pid, signal.Signals[self.kind])
        elif self.kind == "kill launcher":
            os.kill(job.pid, signal.SIGKILL)
        elif self.kind == "no disk space":
            job.fill_disk()
        elif self.kind == "MLflow gone":
            (job.run.parent / "mlflow.db").unlink(missing_ok=True)

    def after(self, job: ChaosJob) -> None:
        """Apply the fault of a run that has ended: damage its newest checkpoint."""
        saved = step_folders(job.run / "checkpoints")
        if self.kind == "damage" and len(saved) > 1:
            files = sorted(path for path in saved[0].rglob("*") if path.is_file())
            damage(files[int(self.place * len(files))], random.Random(self.place))

    def as_data(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


def damage(file: Path, draw: random.Random) -> None:
    """Flip a bit of `file`, cut it, or remove it."""
    content = bytearray(file.read_bytes())
    how = draw.choice(("flip", "cut", "remove")) if content else "remove"
    if how == "remove":
        file.unlink()
    elif how == "cut":
        file.write_bytes(content[: draw.randrange(len(content))])
    else:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(content)


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n")
