"""Ranks of a check: who they are, how they meet and time work with a limit, and which of them has not come."""

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
    """What was started on a CUDA device is not done in time: a peer has not come."""


class Timer:
    """Times calls on `device`; none waits longer than `timeout_seconds` for what they have started there."""

    def __init__(self, device: torch.device, timeout_seconds: float):
        self.device, self.timeout_seconds = device, timeout_seconds

    def seconds(self, call: Callable[[], Any], times: int = 1) -> float:
        """Return the mean seconds of `times` calls, one behind the other.

        Raises:
            PeerTimeoutError: they are not done in time. On a CPU the process group says so by itself.
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
        return float(begin.elapsed_time(end)) / 1e3 / times  # in milliseconds

    def wait(self) -> None:
        """Return once all that was started on the device is done. Raises as `seconds` does."""
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
            self._wait(done)

    def _wait(self, event: Any) -> None:
        """Look whether `event` has come: to wait for it (synchronize) would be to wait for ever, or for NCCL's end."""
        deadline = time.monotonic() + self.timeout_seconds
        while not event.query():
            if time.monotonic() > deadline:
                raise PeerTimeoutError(f"not done on {self.device} within {self.timeout_seconds:g} s")
            time.sleep(20e-6)


NAMED_RANKS = 8
"""How many ranks an error names, of thousands."""
CHECKS = count()
"""Numbers of this process's checks: all ranks make as many."""
NOTICE_SECONDS = 1.0
"""How long after the first rank that has waited in vain the others notice it, too."""
STORE_SECONDS = 10.0
"""How long the ranks' store may take to say where they are: it lies in the launcher's process, or in rank 0's."""


class Ranks:
    """This process among `world` ranks, `local_world` of them on its machine; `hosts`: the machine of each."""

    def __init__(
        self,
        local_rank: int,
        local_world: int,
        timeout_seconds: float,
        group: dist.ProcessGroup | None = None,
    ):
        """`group`: of all ranks in their order; None: the one that was joined, or no other rank. Collective."""
        joined = dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        self.group, self.timeout_seconds = group, timeout_seconds
        self.local_rank, self.local_world = local_rank, local_world
        self._parts, self._store = 0, ranks_store() if self.world > 1 else None
        self._prefix = f"lightning_llm/health/{next(CHECKS)}"
        with self.part("the first meeting"):
            self.hosts: list[str] = self.share(platform.node())

    def name(self, rank: int) -> str:
        """Return `rank` and its machine, for a reader."""
        return f"rank {rank} ({self.hosts[rank]})"

    def share(self, value: Any) -> list[Any]:
        """Return every rank's `value`. Collective."""
        found = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(found, value, group=self.group)
        return found

    def meet(self) -> None:
        """Wait for all ranks, on the CPU."""
        if self.world > 1:
            dist.all_reduce(torch.zeros(1), group=self.group)

    @contextmanager
    def groups(self, several: Sequence[Sequence[int]]) -> Iterator[list[dist.ProcessGroup | None]]:
        """Yield a group for each of `several` sets of ranks, for its members, while the block runs. Collective.

        Torch names a group that its members alone make by how many they have made (2.13), which may not be as many on
        each; so all ranks make all.
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
        """Run a part of the check; what fails because a rank has not come to it says which.

        Raises:
            UnhealthyError: with the ranks that have not.
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
        """Return the error that names the ranks which are not here, or are silent. The first that looks speaks."""
        found: dict[int, dict[str, Any]] = {}
        waiting: set[int] = set()
        told: list[int] = []
        looking = threading.Thread(target=self._look, args=(found, waiting, told), daemon=True)
        looking.start()
        looking.join(NOTICE_SECONDS + STORE_SECONDS)
        waited = f"the others waited (parallel.timeout_seconds={self.timeout_seconds:g})"
        if not told:
            text = f"the store of the ranks, in rank 0's process or its launcher's, does not answer; {waited} in {name}"
            return UnhealthyError(text, speaks=self.rank == 1)
        silent = [rank for rank in range(self.world) if self._is_late(found.get(rank))]
        silent = silent or [rank for rank in range(self.world) if rank not in waiting]
        if not silent:
            text = f"all ranks came, and it did not end within {self.timeout_seconds:g} s; look at the links"
            return UnhealthyError(f"{name}: {text}", speaks=told == [1])
        beats = {rank: self._last_beat(rank, its) for rank, its in found.items()}
        listed = "; ".join(self._silence(rank, beats.get(rank), found.get(rank)) for rank in silent[:NAMED_RANKS])
        more = f"; and {len(silent) - NAMED_RANKS} more" if len(silent) > NAMED_RANKS else ""
        stopped = tuple(beats[rank].number for rank in silent if rank in beats and beats[rank].is_stopped)
        if told != [1]:
            time.sleep(NOTICE_SECONDS)  # its end would end, by a launcher, the one that speaks
        return UnhealthyError(f"{name}: {listed}{more}; {waited}", told == [1], stopped if told == [1] else ())

    def _look(self, found: dict[int, dict[str, Any]], waiting: set[int], told: list[int]) -> None:
        """Read from the store what each rank has come to, and, a moment later, which have waited in vain, as this one.

        Fills the arguments, as far as the store answers; `told` at last: how many ranks have come here, itself too.
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
        """Return what is known of a rank that others wait for."""
        if beat is None or its is None:
            return f"rank {rank} never began"
        state = ", which is stopped" if beat.is_stopped else ""
        what = f"did not come: it was last in {beat.at}" if self._is_late(its) else "came, and has been silent since"
        return f"rank {rank} ({its['host']}{state}) {what}"

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


def _is_of_peers(error: Exception) -> bool:
    """Return whether `error` is what gloo, NCCL or a timer say of peers that are late or gone."""
    return isinstance(error, PeerTimeoutError | dist.DistError) or "gloo" in str(error).lower()
