"""Jobs that processes of another start train, such as one that was killed and left its jobs behind."""

import time
from collections.abc import Callable, Iterable

from lightning_llm.record.state import SETTLED, state_of
from lightning_llm.record.sweep_definition import Job
from lightning_llm.run.lock import is_locked
from lightning_llm.run.relay import Relay

AWAITED_EVERY_SECONDS = 2.0


def runs_elsewhere(job: Job) -> bool:
    """Return whether a process trains the job, or is about to; to be asked while this start runs none for it.

    Its summary says "running" once the data are ready, and the lock of the run's folder is its before that.
    """
    state = state_of(job.folder)
    return state == "running" or (state not in SETTLED and is_locked(job.folder))


def await_elsewhere(
    jobs: Iterable[Job], relay: Relay, why: str, is_over: Callable[[Job], bool] = lambda job: False
) -> bool:
    """Wait for those of `jobs` that run elsewhere, until they have ended or `is_over` says so; whether any did.

    False, too, where a signal comes meanwhile. `why`: what is said of the wait, after the number of jobs.
    """

    def waited_for(job: Job) -> bool:
        return runs_elsewhere(job) and not is_over(job)

    elsewhere = [job for job in jobs if waited_for(job)]
    if not elsewhere:
        return False
    numbers = ", ".join(dict.fromkeys(str(job.number) for job in elsewhere))  # trials may share one
    print(f"sweep  waits for job {numbers}, which another start runs or has left behind: {why}", flush=True)
    while not relay.received and any(waited_for(job) for job in elsewhere):
        time.sleep(AWAITED_EVERY_SECONDS)
    return not relay.received
