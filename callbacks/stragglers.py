"""Stragglers: gathers each rank's seconds of every step and names the ranks that others wait for."""

import logging
import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.callbacks.throughput import FetchClock
from lightning_llm.health.stragglers import PARTS, WAIT, RankSeconds, Straggler, StragglerDetector
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.waiting import WaitClock, waits_counted
from lightning_llm.tracking.files import STRAGGLER, Record, Status

log = logging.getLogger(__name__)

DOING = {"data": "loading data", "compute": "computing", "rest": "between steps"}
LISTED_EVENTS = 100
"""Maximum number of stragglers in the summary."""


class _Host(NamedTuple):
    """Host times in seconds: clock, total wait for other ranks, total wait for batches (NaN: unknown)."""

    clock: float
    waited: float
    data: float


class Stragglers(pl.Callback):
    """Times steps on every rank; every `every_steps`, rank 0 gathers the times, records them and names slow ranks:

    - `ranks/compute_seconds`, `ranks/compute_seconds_max`: forward and backward without waits, median and maximum over
      ranks; `ranks/wait_seconds_min`, `ranks/wait_seconds_max`: waiting for other ranks meanwhile;
      `ranks/data_seconds_max`: waiting for the batch. All of the newest step
    - every `figures_every_steps`: `rank_compute_seconds/RANK` (median), `rank_jitter/RANK` (relative excess of the 95th
      percentile over it), `rank_wait_seconds/RANK` and `rank_data_seconds/RANK` (means), of up to 32 ranks
    - `event` "straggler", with `event_ranks`, if a rank or the links have become slow; `straggler/RANK`
      (`straggler/links`) is the slowdown as a share of a step, 0 once it is over

    The first `warmup_steps` after a start are excluded, because they include compiling and connecting. For the tests
    and groups of ranks see `health/stragglers.py`. It is also a `RunLogger`: `summary.json` has `ranks` and
    `stragglers`.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(self, every_steps: int = 1, warmup_steps: int = 5, figures_every_steps: int = 32):
        self.every_steps, self.warmup_steps, self.figures_every_steps = every_steps, warmup_steps, figures_every_steps
        arguments = {"every_steps": (every_steps, 1), "warmup_steps": (warmup_steps, 0)}
        arguments["figures_every_steps"] = (figures_every_steps, 2)
        wrong = [(name, its, least) for name, (its, least) in arguments.items() if its < least]
        if wrong:
            raise ConfigError([Problem(name, f"must be at least {least}.", its) for name, its, least in wrong])
        self.detector: StragglerDetector
        self._since: _Host
        self._fetched: FetchClock | None = None
        self._counting = ExitStack()
        self._figures = RankSeconds([])
        self._told: list[dict[str, Any]] = []

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Install the clock that times the loading of batches, unless `callbacks.throughput` did."""
        self._fetched = FetchClock.from_trainer(trainer)
        self._clock = WaitClock(trainer.strategy.root_device)
        self._restart()

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Start to measure the time that each rank waits for others. Collective."""
        layout: Layout = trainer.strategy.layout
        self.detector = StragglerDetector(counterparts(layout))
        self.hosts = [platform.node()] * layout.degrees.world
        if layout.degrees.world > 1:
            dist.all_gather_object(self.hosts, platform.node())
        self._figures = RankSeconds(self.hosts)
        self._counting.enter_context(waits_counted(self._clock))
        self._begin = self._reduced = self._clock.mark()
        self._steps, self._rows = 0, list[list[float]]()
        self._restart()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Record the time when the batch has arrived and computation begins."""
        self._begin = self._clock.mark()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Record the time when gradients are reduced over all ranks."""
        self._reduced = self._clock.mark()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Keep the step's seconds; gather them if due. The host has already waited for the device."""
        self._rows.append(self._row())
        self._steps += 1
        if len(self._rows) == self.every_steps:
            gathered = _gather(self._rows, trainer.strategy.layout)
            self._rows = []
            if gathered is not None:
                self._take(gathered, pl_module.step_record)
        self._restart()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Stop the step's clock while a validation runs."""
        self._validation = self._now()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Exclude the validation from the step's time."""
        self._since = _Host(
            *(then + took for then, took in zip(self._since, self._took(self._validation), strict=True))
        )

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Stop measuring."""
        self._counting.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Stop measuring."""
        self._counting.close()

    def _now(self) -> _Host:
        return _Host(self._clock.now(), self._clock.host_waited, self._fetched.seconds if self._fetched else np.nan)

    def _took(self, since: _Host) -> _Host:
        return _Host(*(now - then for now, then in zip(self._now(), since, strict=True)))

    def _restart(self) -> None:
        self._clock.forget()
        self._since = self._now()

    def _row(self) -> list[float]:
        """Return the seconds of the step for `PARTS`, and the seconds waited; NaN if unknown."""
        elapsed, waited = self._clock.between(self._begin, self._reduced)
        whole = self._took(self._since)
        rest = whole.clock - np.nan_to_num(whole.data) - elapsed - (whole.waited - waited)
        return [whole.data, elapsed - waited, rest if self._clock.host_waits else np.nan, waited]

    def _take(self, gathered: Any, record: dict[str, Any]) -> None:
        """Judge the steps up to `record`'s, [steps, ranks, columns]."""
        last = record["step"]
        found: list[Straggler] = []
        for place, seconds in enumerate(gathered):
            before = len(gathered) - 1 - place
            if self._steps - before <= self.warmup_steps:
                continue
            found += self.detector.take(last - before, seconds)
            self._figures.add(seconds)
            if self._figures.steps % self.figures_every_steps == 0:
                record.update(self._figures.since_last())
        record.update(_of_all(gathered[-1]))
        if found:
            self._tell(found, record)

    def _tell(self, found: Sequence[Straggler], record: dict[str, Any]) -> None:
        """Name them on the terminal and in the record; an event of the loss takes precedence."""
        named = [self._described(each) for each in found]
        record.update({f"straggler/{'links' if each.rank is None else each.rank}": each.share for each in found})
        for each in found:
            log.warning("step %d: %s", record["step"], self.sentence(each))
        if any(not each.over for each in found):
            record["event_ranks"] = [each for each in named if not each["over"]]
            record["event/straggler"] = 1
            if "event" not in record:
                record |= {"event": STRAGGLER, "event_action": "log"}
        self._told = (self._told + named)[:LISTED_EVENTS]

    def _described(self, straggler: Straggler) -> dict[str, Any]:
        host = None if straggler.rank is None else self.hosts[straggler.rank]
        return {**asdict(straggler), "host": host}

    def sentence(self, straggler: Straggler) -> str:
        """Return the message about `straggler`."""
        if straggler.rank is None:
            if straggler.over:
                return "links are as they were"
            return (
                f"links are slow: since step {straggler.since_step} even the rank that waits least waits "
                f"{straggler.seconds:.3g} s a step for others, {straggler.usual_seconds:.3g} s before "
                f"(+{straggler.share:.0%} of a step), and no rank takes longer by itself"
            )
        name = f"rank {straggler.rank} ({self.hosts[straggler.rank]})"
        if straggler.over:
            return f"{name} is no longer slow {DOING[straggler.work]}"
        return (
            f"{name} is slow {DOING[straggler.work]}: {straggler.seconds:.3g} s a step since step "
            f"{straggler.since_step}, where {straggler.usual_seconds:.3g} s is usual; the others wait for it, "
            f"{straggler.share:.0%} of a step"
        )

    def open(self, facts: Mapping[str, Any], resumed_from_step: int | None) -> None:
        """Do nothing: the run's folder calls `summary_fields`."""

    def record(self, record: Record) -> None:
        """Do nothing: the record already has its entries."""

    def close(self, status: Status, detail: str, figures: Mapping[str, Any]) -> None:
        """Do nothing."""

    def summary_fields(self) -> dict[str, Any]:
        """Return the seconds of each rank over all steps of this start, and the named stragglers."""
        if not self._figures.steps:
            return {}
        return {"ranks": self._figures.of_all_steps(), "stragglers": self._told}


def counterparts(layout: Layout) -> list[list[int]]:
    """Return the ranks that do the same work: those of one pipeline stage. Other stages have other layers."""
    groups: dict[int, list[int]] = {}
    for rank in range(layout.degrees.world):
        groups.setdefault(layout.degrees.coordinates(rank).pp, []).append(rank)
    return list(groups.values())


def _gather(rows: list[list[float]], layout: Layout) -> Any:
    """Return [steps, ranks, columns] on rank 0, None on others. Collective on the CPU, without waiting for a device."""
    own = torch.tensor(rows, dtype=torch.float64)
    if layout.degrees.world == 1:
        return own[:, None].numpy()
    parts = [torch.empty_like(own) for _ in range(layout.degrees.world)] if layout.rank == 0 else None
    dist.gather(own, parts, dst=0)
    return None if parts is None else torch.stack(parts, dim=1).numpy()


def _of_all(seconds: Any) -> dict[str, float]:
    """Return a step's figures over all ranks, from [ranks, columns]."""
    data, compute, wait = (seconds[:, column] for column in (PARTS.index("data"), PARTS.index("compute"), WAIT))
    figures = {
        "ranks/compute_seconds": float(np.median(compute)),
        "ranks/compute_seconds_max": float(compute.max()),
        "ranks/wait_seconds_min": float(wait.min()),
        "ranks/wait_seconds_max": float(wait.max()),
    }
    return figures if np.isnan(data).any() else {**figures, "ranks/data_seconds_max": float(data.max())}
