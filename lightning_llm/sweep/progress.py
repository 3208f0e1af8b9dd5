"""Progress of a sweep, line by line."""

import time

from lightning_llm.record.state import state_of
from lightning_llm.record.sweep_definition import Job
from lightning_llm.sweep.job_locks import Outcome


class Progress:
    """Prints a line as each of `jobs` jobs starts and ends; `outcomes` are in the order they ended.

    `queued`: jobs start, here, when they are submitted, and how many of them run is not known.
    """

    def __init__(self, jobs: int, *, queued: bool = False):
        self.jobs = jobs
        self.queued = queued
        self._began = time.monotonic()
        self.outcomes: list[Outcome] = []
        self._started = 0
        self._running: dict[int, float] = {}  # job number -> when it started
        self._side_by_side = 1

    def starting(self, job: Job) -> None:
        """Say that `job` starts."""
        self._started += 1
        self._running[job.number] = time.monotonic()
        self._side_by_side = max(self._side_by_side, len(self._running))
        print(f"job    {self._started}/{self.jobs} {job.name}", flush=True)

    def ended(self, outcome: Outcome) -> None:
        """Take in how a job came out, and say how long the others will take."""
        self.outcomes.append(outcome)
        self._running.pop(outcome.job.number, None)
        done, left = len(self.outcomes), self._seconds_left()
        how = "finished" if outcome.code == 0 else f"exit code {outcome.code}"
        if outcome.code and state_of(outcome.job.folder) == "diverged":
            how = "diverged"
        rest = f" | {done}/{self.jobs} ended, about {duration(left)} left" if done < self.jobs else ""
        print(f"job    {outcome.job.name}: {how} after {duration(outcome.seconds)}{rest}", flush=True)

    def _seconds_left(self) -> float:
        """Return the time for what is not done, jobs taking what they took so far, as many side by side as so far."""
        if self.queued:
            return (time.monotonic() - self._began) / len(self.outcomes) * (self.jobs - len(self.outcomes))
        each = sum(outcome.seconds for outcome in self.outcomes) / len(self.outcomes)
        now = time.monotonic()
        under_way = sum(min(each, now - began) for began in self._running.values())
        return (each * (self.jobs - len(self.outcomes)) - under_way) / self._side_by_side


def duration(seconds: float) -> str:
    """Return "12s", "3m05s" or "2h40m"."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
