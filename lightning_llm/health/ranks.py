"""The ranks of a check: who they are, how they meet, and which of them has not come where the others wait."""

import json
import platform
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_llm.errors import UnhealthyError
from lightning_llm.health.timer import PeerTimeoutError
from lightning_llm.parallel.torch_private import ranks_store

NAMED_RANKS = 8
"""How many ranks an error names, of thousands."""
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
        name = (group or dist.group.WORLD).group_name if self.world > 1 else ""
        self._prefix = f"lightning_llm/health/{name}"
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
            here = {"part": self._parts, "name": name, "host": platform.node()}
            self._store.set(self._key(self.rank), json.dumps(here))
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            if self.world == 1 or not _is_of_peers(error):
                raise
            raise self._late(name) from error

    def _late(self, name: str) -> UnhealthyError:
        """Return the error that names the ranks which are not here. The first rank that looks speaks for all."""
        found: dict[int, dict[str, Any]] = {}
        first: list[bool] = []

        def look() -> None:
            store: Any = self._store
            for rank in range(self.world):
                if store.check([self._key(rank)]):
                    found[rank] = json.loads(store.get(self._key(rank)))
            first.append(store.add(f"{self._prefix}/{self._parts}/told", 1) == 1)

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        looking.join(STORE_SECONDS)
        waited = f"the others waited (parallel.timeout_seconds={self.timeout_seconds:g})"
        if not first:
            text = f"the store of the ranks, in rank 0's process or its launcher's, does not answer; {waited} in {name}"
            return UnhealthyError(text, speaks=self.rank == min(1, self.world - 1))
        late = [rank for rank in range(self.world) if found.get(rank, {"part": 0})["part"] < self._parts]
        if not late:
            text = f"{name}: all ranks came, and it did not end within {self.timeout_seconds:g} s; look at the links"
            return UnhealthyError(text, speaks=first[0])
        listed = []
        for rank in late[:NAMED_RANKS]:
            its = found.get(rank)
            at = f"({its['host']}) did not come: it was last in {its['name']}" if its else "never began"
            listed.append(f"rank {rank} {at}")
        more = f"; and {len(late) - NAMED_RANKS} more" if len(late) > NAMED_RANKS else ""
        return UnhealthyError(f"{name}: {'; '.join(listed)}{more}; {waited}", speaks=first[0])

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


def _is_of_peers(error: Exception) -> bool:
    """Return whether `error` is what gloo, NCCL or a timer say of peers that are late or gone."""
    return isinstance(error, PeerTimeoutError | dist.DistError) or "gloo" in str(error).lower()
