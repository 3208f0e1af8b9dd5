"""Fair comparison on a noisy machine: contenders take turns, and each is judged by its fastest step."""

import time
from collections.abc import Callable, Iterator, Mapping

import torch

Row = tuple[str, float | None, str]
"""What was measured, its value (None: it was not), and the target, or why there is no value."""


class InputError(Exception):
    """A file that a benchmark was given is not what it reads."""


_clock: Callable[[], float] = time.perf_counter


def judge_by_cpu_time() -> None:
    """Have contenders judged by CPU seconds, where other work is beside them: on one thread, as idle ones spin."""
    global _clock
    torch.set_num_threads(1)
    _clock = time.process_time


def by_cpu_time() -> bool:
    """Return whether they are."""
    return _clock is time.process_time


def interleaved_minima(
    contenders: Mapping[str, Iterator[None]],
    rounds: int,
    steps: int,
    warmup: int = 3,
    clock: Callable[[], float] | None = None,
) -> dict[str, float]:
    """Return each contender's fastest step in seconds of `clock`; None: by the clock on the wall, or CPU time.

    A contender is an iterator that takes one training step per `next`. Each round gives every contender `steps` steps,
    in an order that rotates, so that a slow spell of the machine hits all of them alike.
    """
    clock = clock or _clock
    names = list(contenders)
    best = dict.fromkeys(names, float("inf"))
    for name in names:
        for _ in range(warmup):
            next(contenders[name])
    for turn in range(rounds):
        for offset in range(len(names)):
            name = names[(turn + offset) % len(names)]
            for _ in range(steps):
                start = clock()
                next(contenders[name])
                best[name] = min(best[name], clock() - start)
    return best


def stepping(step: Callable[[], object]) -> Iterator[None]:
    """Return an iterator that calls `step` once per `next`."""
    while True:
        step()
        yield
