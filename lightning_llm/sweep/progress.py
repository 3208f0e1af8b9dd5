"""Progress of a sweep: a printed line as each job starts and ends, with the remaining time."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from lightning_llm.base.signals import STOPPING, exit_code
from lightning_llm.sweep.job_locks import Outcome
from lightning_llm.tracking.run_state import state_of
from lightning_llm.tracking.sweep_definition import Job

STOPPED = {exit_code(number) for number in STOPPING}
"""Exit codes of a job that was asked to save and stop."""


@dataclass(frozen=True)
class SearchPhase:
    """A phase of a search, which may stop jobs on purpose: at a rung, to resume later, or for good.

    Functions: `stopped` returns the reason if the search has stopped a job, else None. If the length of the search is
    known, `step_of` returns the steps that a job has made, and `steps_left` the remaining steps of all jobs.
    """

    stopped: Callable[[Job], str | None]
    step_of: Callable[[Job], int] | None = None
    steps_left: Callable[[], int] | None = None


class Progress:
    """Printer of a line as each job starts and ends; `outcomes`: those of ended jobs, in the order of their ends.

    A line names a job by its number (from 0, as its folder), followed by the count of started or ended jobs.
    """

    def __init__(self, jobs: int, *, queued: bool = False, phase: SearchPhase | None = None):
        """`jobs`: their number. `queued`: jobs are submitted to a queue. `phase`: the phase of a search, if any."""
        self.jobs = jobs
        self.queued = queued
        self.phase = phase
        self._from: dict[int, int] = {}  # job number -> steps made before this start
        self._steps = 0  # made by the jobs that have ended
        self._began = time.monotonic()
        self.outcomes: list[Outcome] = []
        self._started = 0
        self._running: dict[int, float] = {}  # job number -> when it started
        self._side_by_side = 1

    def starting(self, job: Job) -> None:
        """Report that `job` starts."""
        self._started += 1
        self._running[job.number] = time.monotonic()
        self._side_by_side = max(self._side_by_side, len(self._running))
        if self.phase and self.phase.step_of:
            self._from[job.number] = self.phase.step_of(job)
        how = "queued" if self.queued else "starts"
        print(f"job    {job.name}: {how}, {self._started} of {self.jobs} so far", flush=True)

    def left_alone(self, job: Job) -> None:
        """Report that `job` is skipped, because it runs in a process of another start, and do not count it."""
        if self._running.pop(job.number, None) is not None:
            self._started -= 1
            self._from.pop(job.number, None)
        self.jobs -= 1
        print(f"job    {job.name}: runs in a process that another start left behind, skipped", flush=True)

    def ended(self, outcome: Outcome) -> None:
        """Record the outcome of a job; print it with the estimated remaining time."""
        self.outcomes.append(outcome)
        self._running.pop(outcome.job.number, None)
        if self.phase and self.phase.step_of:
            self._steps += self.phase.step_of(outcome.job) - self._from[outcome.job.number]
        how = "finished" if outcome.code == 0 else f"exit code {outcome.code}"
        if outcome.code and state_of(outcome.job.folder) == "diverged":
            how = "diverged"
        elif outcome.code in STOPPED and self.phase and (stopped := self.phase.stopped(outcome.job)):
            how = stopped
        rest = self._rest(len(self.outcomes))
        print(f"job    {outcome.job.name}: {how} after {duration(outcome.seconds)}{rest}", flush=True)

    def _rest(self, done: int) -> str:
        """Return the remaining work as text."""
        if self.phase and self.phase.steps_left:
            steps = self.phase.steps_left()
            if not steps or self._steps <= 0:
                return ""
            seconds = sum(outcome.seconds for outcome in self.outcomes) / self._steps * steps / self._side_by_side
            return f" | {done} of {self.jobs} ended, at most about {duration(seconds)} left of the search"
        return (
            f" | {done} of {self.jobs} ended, about {duration(self._seconds_left())} left" if done < self.jobs else ""
        )

    def _seconds_left(self) -> float:
        """Return the remaining time, from the mean time of a job and the number of parallel jobs so far."""
        if self.queued:
            return (time.monotonic() - self._began) / len(self.outcomes) * (self.jobs - len(self.outcomes))
        each = sum(outcome.seconds for outcome in self.outcomes) / len(self.outcomes)
        now = time.monotonic()
        under_way = sum(min(each, now - began) for began in self._running.values())
        return (each * (self.jobs - len(self.outcomes)) - under_way) / self._side_by_side


def duration(seconds: float) -> str:
    """Return a duration as text: "12s", "3m05s" or "2h40m"."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
