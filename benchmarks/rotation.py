"""Fair comparison on a noisy machine: contenders take turns, and each is judged by its fastest step."""

import time
from collections.abc import Callable, Iterator, Mapping

import torch

Row = tuple[str, float | None, str]
"""(name, value or None if not measured, target or the reason for a missing value)."""


class InputError(Exception):
    """The input file of a benchmark has another format."""


_clock: Callable[[], float] = time.perf_counter


def judge_by_cpu_time() -> None:
    """Judge contenders by CPU seconds, for a machine with other load; on one thread, because idle threads spin."""
    global _clock
    torch.set_num_threads(1)
    _clock = time.process_time


def by_cpu_time() -> bool:
    """Return whether contenders are judged by CPU seconds."""
    return _clock is time.process_time


def interleaved_minima(
    contenders: Mapping[str, Iterator[None]],
    rounds: int,
    steps: int,
    warmup: int = 3,
    clock: Callable[[], float] | None = None,
) -> dict[str, float]:
    """Return each contender's fastest step in seconds of `clock`; None: wall time, or CPU time if that is chosen.

    A contender is an iterator that makes one training step per `next`. Each round gives every contender `steps` steps,
    in a rotating order, so that a slow phase of the machine affects all of them equally.
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
