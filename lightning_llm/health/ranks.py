"""Ranks of a health check: exchange of results, barriers, timing with a timeout, and detection of missing ranks."""

import json
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from lightning_llm.base.errors import UnhealthyError
from lightning_llm.parallel.torch_private import ranks_store
from lightning_llm.tracking.provenance import process_mark
from lightning_llm.tracking.rank_liveness import Beat


class PeerTimeoutError(RuntimeError):
    """Work on a CUDA device was not done within the timeout, because another rank does not take part."""


class Timer:
    """Clock for calls that start work on `device`; it waits at most `timeout_seconds` for that work."""

    def __init__(self, device: torch.device, timeout_seconds: float):
        self.device, self.timeout_seconds = device, timeout_seconds

    def seconds(self, call: Callable[[], Any], times: int = 1) -> float:
        """Return the mean seconds of `times` consecutive calls.

        Raises:
            PeerTimeoutError: the work was not done in time. On a CPU the process group raises its own error.
        """
        if self.device.type != "cuda":
            start = time.perf_counter()
            for _ in range(times):
                call()
            return (time.perf_counter() - start) / times
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            call()
        end.record()
        self._wait(end)
        return float(begin.elapsed_time(end)) / 1e3 / times  # elapsed_time is in milliseconds

    def wait(self) -> None:
        """Wait until all work on the device is done. Raises PeerTimeoutError as `seconds` does."""
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
            self._wait(done)

    def _wait(self, event: Any) -> None:
        """Poll `event`: synchronize could wait forever, or until NCCL ends the process."""
        deadline = time.monotonic() + self.timeout_seconds
        while not event.query():
            if time.monotonic() > deadline:
                raise PeerTimeoutError(f"not done on {self.device} within {self.timeout_seconds:g} s")
            time.sleep(20e-6)


NAMED_RANKS = 8
"""Maximum number of ranks named in an error."""
CHECKS = count()
"""Consecutive numbers of this process's checks, the same on all ranks."""
NOTICE_SECONDS = 1.0
"""Seconds in which the other ranks also time out after the first one has."""
STORE_SECONDS = 10.0
"""Timeout in seconds for the ranks' store, which is in the launcher's process or rank 0's."""


class Ranks:
    """This process and the other ranks of a health check.

    `rank` is this process's number among all `world` ranks, `local_rank` its number among the `local_world` ranks of
    its machine. `hosts` lists the machine name of each rank.
    """

    def __init__(
        self,
        local_rank: int,
        local_world: int,
        timeout_seconds: float,
        group: dist.ProcessGroup | None = None,
    ):
        """Exchange machine names with the other ranks. Collective.

        `group`: process group of all ranks in order; None: the default group, or a single rank if there is none.
        """
        joined = dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        self.group, self.timeout_seconds = group, timeout_seconds
        self.local_rank, self.local_world = local_rank, local_world
        self._parts, self._store = 0, ranks_store() if self.world > 1 else None
        self._prefix = f"lightning_llm/health/{next(CHECKS)}"
        with self.part("the first meeting"):
            self.hosts: list[str] = self.share(platform.node())

    def name(self, rank: int) -> str:
        """Return `rank` with its machine, for messages: "rank 3 (node1)"."""
        return f"rank {rank} ({self.hosts[rank]})"

    def share(self, value: Any) -> list[Any]:
        """Return the list of all ranks' `value`, by rank. Collective."""
        found = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(found, value, group=self.group)
        return found

    def meet(self) -> None:
        """Wait until all ranks have called this (a barrier on the CPU)."""
        if self.world > 1:
            dist.all_reduce(torch.zeros(1), group=self.group)

    @contextmanager
    def groups(self, several: Sequence[Sequence[int]]) -> Iterator[list[dist.ProcessGroup | None]]:
        """Yield a process group for each of `several` sets of ranks; they are destroyed at the end. Collective.

        All ranks create all groups. torch 2.13 names a group created only by its members by a counter that may differ
        between them.
        """
        timeout = timedelta(seconds=self.timeout_seconds)
        made = [dist.new_group(list(members), timeout=timeout) for members in several]
        try:
            yield made
        finally:
            for members, group in zip(several, made, strict=True):
                if self.rank in members:
                    dist.destroy_process_group(group)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run the block as the part `name` of the check, and name the missing ranks if it times out.

        Raises:
            UnhealthyError: other ranks did not reach this part within the timeout.
        """
        self._parts += 1
        if self._store is not None:
            here = {"part": self._parts, "name": name, "host": platform.node(), "process": process_mark()}
            self._store.set(self._key(self.rank), json.dumps(here))
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            if self.world == 1 or not _is_of_peers(error):
                raise
            raise self._late(name) from error

    def _late(self, name: str) -> UnhealthyError:
        """Return the error that names missing or silent ranks. Only the first rank to get here reports it."""
        found: dict[int, dict[str, Any]] = {}
        waiting: set[int] = set()
        told: list[int] = []
        looking = threading.Thread(target=self._look, args=(found, waiting, told), daemon=True)
        looking.start()
        looking.join(NOTICE_SECONDS + STORE_SECONDS)
        waited = f"the others waited (parallel.timeout_seconds={self.timeout_seconds:g})"
        if not told:
            text = f"the store of the ranks, in rank 0's process or its launcher's, does not answer; {waited} in {name}"
            return UnhealthyError(text, reports=self.rank == 1)
        silent = [rank for rank in range(self.world) if self._is_late(found.get(rank))]
        silent = silent or [rank for rank in range(self.world) if rank not in waiting]
        if not silent:
            text = f"all ranks started it, but it did not end within {self.timeout_seconds:g} s; check the links"
            return UnhealthyError(f"{name}: {text}", reports=told == [1])
        beats = {rank: self._last_beat(rank, its) for rank, its in found.items()}
        listed = "; ".join(self._silence(rank, beats.get(rank), found.get(rank)) for rank in silent[:NAMED_RANKS])
        more = f"; and {len(silent) - NAMED_RANKS} more" if len(silent) > NAMED_RANKS else ""
        stopped = tuple(beats[rank].number for rank in silent if rank in beats and beats[rank].is_stopped)
        if told != [1]:
            time.sleep(NOTICE_SECONDS)  # if this rank ended now, a launcher would end the reporting one
        return UnhealthyError(f"{name}: {listed}{more}; {waited}", told == [1], stopped if told == [1] else ())

    def _look(self, found: dict[int, dict[str, Any]], waiting: set[int], told: list[int]) -> None:
        """Read each rank's last part from the store, and after a pause the ranks that have also timed out.

        Fills the arguments, as far as the store responds; `told` at last: the number of ranks that got here so far.
        """
        store: Any = self._store
        place = f"{self._prefix}/{self._parts}"
        store.set(f"{place}/waits/{self.rank}", "")
        for rank in range(self.world):
            if store.check([self._key(rank)]):
                found[rank] = json.loads(store.get(self._key(rank)))
        if not any(self._is_late(found.get(rank)) for rank in range(self.world)):
            time.sleep(NOTICE_SECONDS)
            waiting |= {rank for rank in range(self.world) if store.check([f"{place}/waits/{rank}"])}
        told.append(store.add(f"{place}/told", 1))

    def _is_late(self, its: dict[str, Any] | None) -> bool:
        return its is None or its["part"] < self._parts

    def _last_beat(self, rank: int, its: dict[str, Any]) -> Beat:
        return Beat(rank, its["process"], step=0, at=its["name"], age_seconds=self.timeout_seconds)

    def _silence(self, rank: int, beat: Beat | None, its: dict[str, Any] | None) -> str:
        """Return a description of a rank that others wait for."""
        if beat is None or its is None:
            return f"rank {rank} never started"
        state = ", which is stopped" if beat.is_stopped else ""
        what = f"did not reach it: it was last in {beat.at}" if self._is_late(its) else "reached it, then was silent"
        return f"rank {rank} ({its['host']}{state}) {what}"

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


def _is_of_peers(error: Exception) -> bool:
    """Return whether `error` is an error of gloo, NCCL or a timer about late or missing peers."""
    return isinstance(error, PeerTimeoutError | dist.DistError) or "gloo" in str(error).lower()
