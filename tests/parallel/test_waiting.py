"""Seconds that a rank waits for works: of the main thread only, and on a simulated CUDA of the compute stream only."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_llm.parallel.collectives import GroupRef, all_reduced
from lightning_llm.parallel.waiting import WaitClock, waited, waits_counted

CPU = torch.device("cpu")


class Time:
    """A clock that advances only when someone waits."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def pass_by(self, seconds: float) -> None:
        self.seconds += seconds


def counted_on_a_rank() -> list[float]:
    """Return the waits that the clock counted per kind of work; each reading advances the clock by 1."""
    reads = iter(range(10**6))
    clock, x = WaitClock(CPU, lambda: float(next(reads))), torch.ones(2)
    group = dist.group.WORLD
    found = []
    with waits_counted(clock):
        for call in (
            lambda: dist.all_reduce(x),
            lambda: dist.all_reduce(x, async_op=True).wait(),
            lambda: dist.barrier(),
            lambda: all_reduced(x, GroupRef.from_group(group)),
            lambda: [each.wait() for each in dist.batch_isend_irecv(exchange(x))],
        ):
            before = clock.host_waited
            call()
            found.append(clock.host_waited - before)
    dist.all_reduce(x)
    return [*found, clock.host_waited - sum(found)]


def exchange(x: torch.Tensor) -> list[dist.P2POp]:
    peer = 1 - dist.get_rank()
    return [dist.P2POp(dist.isend, x.clone(), peer), dist.P2POp(dist.irecv, x, peer)]


def test_every_way_to_wait_for_others_is_counted_and_none_afterwards(ranks):
    original = dist.Work.wait
    assert ranks(2).call(counted_on_a_rank) == [1.0, 1.0, 1.0, 1.0, 2.0, 0.0]
    assert dist.Work.wait is original


def test_waits_are_counted_once_and_other_threads_are_not():
    now = Time()
    clock = WaitClock(CPU, lambda: now.seconds)
    first = clock.mark()
    now.pass_by(2)
    clock.timed(lambda: clock.timed(now.pass_by, 3))
    with pytest.raises(RuntimeError):
        clock.timed(lambda: (now.pass_by(1), _fail()))
    saving = threading.Thread(target=lambda: clock.timed(now.pass_by, 5))
    saving.start()
    saving.join()
    assert clock.between(first, clock.mark()) == (11.0, 4.0)
    assert clock.host_waits
    assert waited(lambda value: value + 1, 1) == 2  # without a clock


def _fail() -> None:
    raise RuntimeError("the peer is gone")


def test_on_cuda_the_stream_that_computes_waits(monkeypatch):
    now, main, side = Time(), SimpleNamespace(device=torch.device("cuda")), SimpleNamespace()
    current = [main]

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self, stream):
            assert stream is main
            self.seconds = now.seconds

        def elapsed_time(self, later):
            return 1e3 * (later.seconds - self.seconds)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[0])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = WaitClock(torch.device("cuda"))
    clock.timed(now.pass_by, 7)
    clock.forget()
    first = clock.mark()
    now.pass_by(2)
    worker = threading.Thread(target=lambda: clock.timed(now.pass_by, 3))  # a backward pass' thread
    worker.start()
    worker.join()
    current[0] = side
    clock.timed(now.pass_by, 1)  # in parallel with the compute stream
    current[0] = main
    last = clock.mark()
    clock.timed(now.pass_by, 4)
    assert clock.between(first, last) == pytest.approx((6.0, 3.0))
    assert not clock.host_waits
