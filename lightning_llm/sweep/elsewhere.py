"""Jobs that processes of another start train, such as one that was killed and left its jobs behind."""

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from lightning_llm.run.launch.lock import is_locked
from lightning_llm.run.launch.relay import Relay
from lightning_llm.tracking.files import summary_of
from lightning_llm.tracking.liveness import whose
from lightning_llm.tracking.provenance import is_of_this_machine
from lightning_llm.tracking.run_state import SETTLED, state_of
from lightning_llm.tracking.sweep_definition import Job

AWAITED_EVERY_SECONDS = 2.0
NAMED_AFTER_SECONDS = 60.0
"""Of waiting, after which it is said which processes are waited for: one may hang, or ignore SIGTERM."""


def runs_elsewhere(job: Job) -> bool:
    """Return whether a process trains the job, or is about to; to be asked while this start runs none for it."""
    return is_trained(job.folder)


def is_trained(folder: Path) -> bool:
    """Return whether a process trains the run in `folder`, or is about to.

    Its summary says "running" once the data are ready, and the lock of the run's folder is its before that.
    """
    state = state_of(folder)
    return state == "running" or (state not in SETTLED and is_locked(folder))


def await_elsewhere(
    jobs: Iterable[Job], relay: Relay, why: str, is_over: Callable[[Job], bool] = lambda job: False
) -> bool:
    """Wait for those of `jobs` that run elsewhere, until they have ended or `is_over` says so; whether any did.

    False, too, where a signal comes meanwhile. `why`: what is said of the wait, after the number of jobs. A wait has no
    end of its own: after `NAMED_AFTER_SECONDS` it is said once which process to end where it hangs.
    """

    def waited_for(job: Job) -> bool:
        return runs_elsewhere(job) and not is_over(job)

    elsewhere = [job for job in jobs if waited_for(job)]
    if not elsewhere:
        return False
    numbers = ", ".join(dict.fromkeys(str(job.number) for job in elsewhere))  # trials may share one
    print(f"sweep  waits for job {numbers}, which another start runs or has left behind: {why}", flush=True)
    seconds, are_named = 0.0, False
    while not relay.received and (left := [job for job in elsewhere if waited_for(job)]):
        if seconds >= NAMED_AFTER_SECONDS and not are_named:
            print("\n".join(dict.fromkeys(map(_what_to_end, left))), file=sys.stderr, flush=True)
            are_named = True
        time.sleep(AWAITED_EVERY_SECONDS)
        seconds += AWAITED_EVERY_SECONDS
    return not relay.received


def _what_to_end(job: Job) -> str:
    """Return which process trains the job, and how to end it where it hangs."""
    mark = str(summary_of(job.folder).get("process", "")) if state_of(job.folder) == "running" else ""
    number = mark.partition(" ")[2].partition(" ")[0]
    how = "" if not number else f": kill -9 {number}" if is_of_this_machine(mark) else " there"
    return (
        f"note   job {job.number} is still trained by {whose(mark)}, in {job.folder}, and this start waits on. If that "
        f"process hangs or does not stop, end it{how}"
    )
