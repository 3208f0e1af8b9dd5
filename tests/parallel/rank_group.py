"""A group of ranks that lives for many cases: forkserver children joined by gloo, called by function and arguments.

A case that fails on one rank ends its whole group at once, since the others may wait for it; the next case gets a new
group. Where a rank crashed (it wrote where it must not), the group had run other cases before, and
its memory may have been theirs: the case is tried once more, in a new group, with a warning that has its stacks.
"""

import copy
import faulthandler
import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.forkserver import _forkserver
from pathlib import Path
from typing import Any

CASE_SECONDS = 240
CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
forkserver = multiprocessing.get_context("forkserver")
"""Starts processes with the imports of a run already done, which cost 9 CPU seconds in each new interpreter."""
forkserver.set_forkserver_preload(
    [
        "lightning_llm",  # first: it puts off what Lightning wants of torchmetrics
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch.distributed.checkpoint",
        "torch._dynamo",
        "lightning.pytorch",
        "lightning_llm.run.fit",
        "lightning_llm.run.rank",
        "lightning_llm.train.run_folder",
        "lightning_llm.config.compose",
        "lightning_llm.model.decoder",
        "lightning_llm.plan.check",
        "lightning_llm.plan.resolve",
        "torch.distributed.tensor.debug",
        "lightning_llm.cli.train",
        "lightning_llm.tracking.mlflow.writer",
        "mlflow.store.tracking.sqlalchemy_store",
        "tests.composed_once",
    ]
)


def server_address() -> str:
    """Return the address of the forkserver, for `use_server` in a process that it forks."""
    _forkserver.ensure_running()
    address: str = _forkserver._forkserver_address
    return address


def use_server(address: str) -> None:
    """Fork this process's own processes from that server: multiprocessing would start another, which imports all."""
    _forkserver._forkserver_address, _forkserver.ensure_running = address, lambda: None


class RankCrashedError(RuntimeError):
    """A rank's process was ended by one of `CRASHES`."""


class RankGroup:
    """`world` ranks. `call(function, *arguments)` runs a module-level function on all, and returns rank 0's result.

    `fake`: only rank 0 exists; torch's fake process group simulates the others, and its collectives send nothing.
    """

    def __init__(self, world: int, *, fake: bool = False):
        self.world, self.fake = world, fake
        self._children: list[Any] = []
        self._pipes: list[Any] = []

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Raise RuntimeError with the traceback of the rank that failed first."""
        used = bool(self._children)
        try:
            return self._call(function, arguments)
        except RankCrashedError as crash:
            if not used:
                raise
            warnings.warn(f"{crash}\ntried again in new processes", stacklevel=2)
            return self._call(function, arguments)

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if not self._children:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results: dict[int, Any] = {}
        while len(results) < len(self._pipes):
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = multiprocessing.connection.wait(waiting, timeout=CASE_SECONDS)
            if not ready:
                self.close()
                raise RuntimeError(f"no rank of {self.world} answered in {CASE_SECONDS} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    failure, results[rank] = pipe.recv()
                except EOFError:
                    self._children[rank].join()
                    code, stacks = self._children[rank].exitcode, self._stacks(rank).read_text()
                    self.close()
                    kind = RankCrashedError if -(code or 0) in CRASHES else RuntimeError
                    text = f"rank {rank} of {self.world} died: its exit code was {code}\n{stacks}"
                    raise kind(text) from None
                if failure is not None:
                    if (killed := self._killed_peer()) is not None:  # which is why this one failed
                        failure = f"rank {killed} died: its exit code was {self._children[killed].exitcode}\n{failure}"
                    self.close()
                    raise RuntimeError(f"rank {rank} of {self.world} failed:\n{failure}")
        return copy.deepcopy(results[0])  # each tensor that came by a pipe keeps a file open, a copy of it does not

    def _killed_peer(self) -> int | None:
        """Return a rank that ended by a signal, None if there is none within half a second."""
        multiprocessing.connection.wait([child.sentinel for child in self._children], timeout=0.5)
        codes = [(rank, child.exitcode) for rank, child in enumerate(self._children)]
        return next((rank for rank, code in codes if code is not None and code < 0), None)

    def close(self) -> None:
        """End every rank."""
        for child in self._children:
            child.kill()
        for child in self._children:
            child.join()
        self._children, self._pipes = [], []

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp())
        for rank in range(1 if self.fake else self.world):
            ours, theirs = forkserver.Pipe()
            meeting = None if self.fake else str(self._folder / "rendezvous")
            places = rank, self.world, meeting, str(self._stacks(rank))
            child = forkserver.Process(target=_serve, args=(*places, theirs), daemon=True)
            child.start()
            theirs.close()
            self._children.append(child)
            self._pipes.append(ours)

    def _stacks(self, rank: int) -> Path:
        """Return the file with the stacks of `rank`'s threads at a crash."""
        return self._folder / f"stacks.{rank}"


def _serve(rank: int, world: int, meeting: str | None, stacks: str, pipe: Any) -> None:
    faulthandler.enable(open(stacks, "w"))  # noqa: SIM115  (for as long as the process lives)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    if world > 1:
        os.environ.update({name: str(value) for name, value in names.items()})
    if meeting is None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    else:
        _share_one_device()
        wait = timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=wait)
    from lightning.fabric.utilities import registry

    from lightning_llm.parallel import layout
    from lightning_llm.train import run_folder

    # Each run of a rank's life has the groups of the one before it under the same axes: new ones cost threads and
    # connections, and DTensor's caches hold a mesh for every equal one to come, groups and all.
    layout.init_device_mesh = functools.cache(layout.init_device_mesh)
    registry.entry_points = functools.cache(registry.entry_points)
    run_folder.draw_losses = lambda *_: None  # half a second per run, and looked at elsewhere
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            result = function(*arguments)
            pipe.send((None, result if rank == 0 else None))
        except BaseException:
            pipe.send((traceback.format_exc(), None))


def _share_one_device() -> None:
    """Have all groups of this process share one of gloo's devices.

    Each has a thread that wakes a hundred times a second: of twelve ranks with twenty groups each, a tenth of a core.
    """
    from torch.distributed import ProcessGroupGloo, distributed_c10d

    device = ProcessGroupGloo.create_default_device()

    kind: Any = type(ProcessGroupGloo)

    class AnyGloo(kind):
        def __instancecheck__(cls, instance: Any) -> bool:
            return type.__instancecheck__(
                ProcessGroupGloo, instance
            )  # torch checks the type of objects returned from C++

    class OnOneDevice(ProcessGroupGloo, metaclass=AnyGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, enable_reconfigure: bool = False):
            if enable_reconfigure:  # torch 2.14's argument
                raise NotImplementedError("groups that are reconfigured")
            options = ProcessGroupGloo._Options()
            options._devices, options._timeout, options._threads = [device], timeout, 2
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnOneDevice
