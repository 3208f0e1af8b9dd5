"""Ends jobs while they run: looks at what they have recorded so far, and has them save and stop."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lightning_llm.run.launch.relay import Relay
from lightning_llm.tracking.sweep_definition import Job

SECONDS = 0.5
"""Between two looks."""


@contextmanager
def watched(jobs: Sequence[Job], is_over: Callable[[Job], bool], relay: Relay) -> Iterator[None]:
    """Stop each of `jobs` that is running once `is_over` says so, while the context lasts; raise what that raises."""
    end = threading.Event()
    errors: list[BaseException] = []

    def look() -> None:
        over: set[int] = set()
        try:
            while not end.wait(SECONDS):
                for job in jobs:
                    if job.number not in over and relay.runs(job.number) and is_over(job):
                        over.add(job.number)
                        relay.stop(job.number)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=look, name="search", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
    if errors:
        raise errors[0]
