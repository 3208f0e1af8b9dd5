"""How far a sweep is, line by line."""

import time

from lightning_llm.sweep.definition import Job
from lightning_llm.sweep.state import Outcome


class Progress:
    """Prints a line as each of `jobs` jobs starts and ends; `outcomes` are in the order they ended."""

    def __init__(self, jobs: int):
        self.jobs = jobs
        self.outcomes: list[Outcome] = []
        self._started = 0
        self._began = time.monotonic()

    def starting(self, job: Job) -> None:
        """Say that `job` starts."""
        self._started += 1
        print(f"job    {self._started}/{self.jobs} {job.name}", flush=True)

    def ended(self, outcome: Outcome) -> None:
        """Take in how a job came out; the time left is that of the jobs so far, at their pace."""
        self.outcomes.append(outcome)
        done = len(self.outcomes)
        left = (time.monotonic() - self._began) / done * (self.jobs - done)
        how = "finished" if outcome.code == 0 else f"exit code {outcome.code}"
        rest = f" | {done}/{self.jobs} done, about {duration(left)} left" if done < self.jobs else ""
        print(f"job    {outcome.job.name}: {how} after {duration(outcome.seconds)}{rest}", flush=True)


def duration(seconds: float) -> str:
    """Return "12s", "3m05s" or "2h40m"."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
