"""The process group of a run's ranks: rendezvous at a store, joining, leaving, and a record of this rank's collectives.

torch waits for missing ranks in C++, up to half an hour, silently and ignoring signals. Here a rank waits in short
slices, so that signals end the wait, and reports which ranks are missing.
"""

import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.parallel.cuda_environment import GLOO, NCCL, set_missing
from lightning_llm.parallel.torch_private import private

Value = TypeVar("Value")

NOTED_AFTER_SECONDS = 10.0
"""Ranks on busy machines start seconds apart, so shorter waits are not reported."""
SLICES = (0.002, 0.25)
"""Shortest and longest pause between two checks, in seconds."""
MOST_NAMED = 16
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Wait:
    """A wait of this rank for an event; a wait of more than `NOTED_AFTER_SECONDS` is reported once.

    `timeout`: seconds until the wait fails. `now` and `sleep`: the clock, in seconds.
    """

    def __init__(
        self, timeout: float, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ):
        self._timeout, self._now, self._sleep = timeout, now, sleep

    def until(self, done: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait until `done()`; after `NOTED_AFTER_SECONDS` print a note with `what()`, the awaited event.

        Raises:
            ConfigError: `timeout` seconds have passed.
        """
        began, pause, noted = self._now(), SLICES[0], False
        while not done():
            waited = self._now() - began
            if waited >= self._timeout:
                text = (
                    f"timed out after {self._timeout:g} s (parallel.timeout_seconds) waiting for {what()}. {_remedy()}"
                )
                raise ConfigError(Problem("WORLD_SIZE", text))
            if waited >= NOTED_AFTER_SECONDS and not noted:
                noted = True
                print(f"note   waiting for {what()}. {_remedy()}", file=sys.stderr, flush=True)
            self._sleep(pause)
            pause = min(2 * pause, SLICES[1])


def open_store(rank: int, timeout_seconds: float) -> Any:
    """Return the store at MASTER_ADDR:MASTER_PORT; rank 0 opens it unless torchrun's agent has.

    Raises:
        ConfigError: the address is missing or in use, or the store was not opened in time.
    """
    host, port = _address()
    timeout = timedelta(seconds=timeout_seconds)
    opens = rank == 0 and os.environ.get(AGENT_STORE) != str(True)
    if not opens:
        where = f"rank 0 to open {host}:{port} ({_origin()})"
        Wait(timeout_seconds).until(lambda: _listens(host, port), lambda: where)
    with _port_usable(host, port):
        return dist.TCPStore(host, port, is_master=opens, timeout=timeout, wait_for_workers=False, multi_tenant=opens)


def meet(store: Any, rank: int, world: int, timeout_seconds: float) -> None:
    """Wait until all ranks have reached `store`. Collective.

    Rank 0 opens a meeting under a new key, each other rank answers with a unique token, and rank 0 closes the meeting
    with the list of tokens. So keys that an earlier start left in the store have no effect.

    Raises:
        ConfigError: not all ranks came in time.
    """
    host, port = _address()
    wait, where = Wait(timeout_seconds), f"at {host}:{port} ({_origin()})"
    own = uuid.uuid4().hex
    if rank == 0:
        meeting = own
        store.set("meeting", meeting)
        away = set(range(1, world))

        def all_here() -> bool:
            away.difference_update([each for each in away if store.check([f"{meeting}/{each}"])])
            return not away

        wait.until(all_here, lambda: f"{len(away)} of {world} ranks {where}: {_named(sorted(away))}")
        store.set(f"{meeting}/all", b" ".join(store.get(f"{meeting}/{each}") for each in range(1, world)))
        return
    answered = ""

    def closed() -> bool:
        nonlocal answered
        if store.check(["meeting"]) and (meeting := store.get("meeting").decode()) != answered:
            answered = meeting
            store.set(f"{meeting}/{rank}", own)
        closing = f"{answered}/all"
        return bool(answered and store.check([closing]) and own.encode() in store.get(closing))

    wait.until(closed, lambda: f"other ranks than {rank} of {world} {where}; rank 0 names them")


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def _address() -> tuple[str, int]:
    problems = []
    for name, what in (("MASTER_ADDR", "the host of rank 0"), ("MASTER_PORT", "a port that is free there")):
        value = os.environ.get(name, "").strip()
        if not value or (name == "MASTER_PORT" and not (value.isdecimal() and 0 < int(value) < 1 << 16)):
            text = f"must be {what}, where ranks meet. Use torchrun, which sets it, or set it on all ranks."
            problems.append(Problem(name, text, repr(value)))
    if problems:
        raise ConfigError(problems)
    return os.environ["MASTER_ADDR"].strip(), int(os.environ["MASTER_PORT"])


@contextmanager
def _port_usable(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        why = str(error).splitlines()[0]
        text = (
            f"{host}:{port} cannot be used as the ranks' store ({why}). If the port is in use, set another MASTER_PORT."
        )
        raise ConfigError(Problem("MASTER_PORT", text)) from error


def _origin() -> str:
    source = (
        "srun's variables SLURM_PROCID, SLURM_NTASKS; " if "SLURM_PROCID" in os.environ else "torchrun's variables "
    )
    known = " ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
    return f"from {source}{known}"


def _remedy() -> str:
    return (
        "Start the missing ranks. If these variables are left over from an earlier start, stop this one and unset them"
    )


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:MOST_NAMED]))
    return shown + (f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else "")


JOINED = "lightning-llm/joined"
"""Key in the ranks' store: number of process groups that have joined through it."""


def join_process_group(device: torch.device, world: int, timeout_seconds: float) -> None:
    """Join the ranks given by torchrun's variables; one rank needs no variables. A second call does nothing.

    On CUDA there is also a gloo group for CPU tensors, through which checkpoints are written.

    Raises:
        ConfigError: rank 0's port is in use, or a rank did not come in time, see `meet`.
    """
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    if world == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    set_missing(NCCL if device.type == "cuda" else GLOO)
    rank = int(os.environ["RANK"])
    try:
        store = open_store(rank, timeout_seconds)
        # torchrun's store may outlive its ranks (torch 2.13, --rdzv-backend=c10d). Restarted ranks must not read
        # addresses written by lost ones, so each group gets a new prefix. All ranks read the count before it changes.
        joined = store.add(JOINED, 0)
        meet(dist.PrefixStore(f"meeting_{joined}", store), rank, world, timeout_seconds)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"joined_{joined}", store),
            rank=rank,
            world_size=world,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        if rank == 0:
            store.add(JOINED, 1)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        text = f"not all of {world} ranks joined within {timeout_seconds:g} s ({error}). Start the missing ones."
        raise ConfigError(Problem("WORLD_SIZE", text)) from error


def record_collectives(device: torch.device, run_dir: Path) -> None:
    """Make NCCL's flight recorder write to `run_dir`/ranks/nccl_RANK when a collective times out."""
    if device.type != "cuda" or not dist.is_initialized():
        return
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        os.environ.setdefault(name, str(run_dir / "ranks" / "nccl_"))


def leave_process_group() -> None:
    """Leave the process group if one was joined, so that other ranks see a clean end instead of a lost peer."""
    if dist.is_initialized():
        dist.destroy_process_group()


FIELDS = ("record_id", "profiling_name", "collective_seq_id", "input_sizes", "input_dtypes", "output_sizes")


def collectives() -> list[dict[str, Any]]:
    """Return this rank's recorded gloo collectives, oldest first; [] for other backends or without a process group.

    Each has `FIELDS`, its `group`, `ended` (whether this rank's part is done) and `age_seconds` (time since it was
    begun).
    """
    if not dist.is_initialized() or dist.get_backend() != "gloo":
        return []
    entries = json.loads(private(_distributed_c10d, "_dump_fr_trace_json")(True, False)).get("entries", [])
    now = time.time()
    return [_described(each, now) for each in sorted(entries, key=lambda each: each["record_id"])]


def _described(entry: Mapping[str, Any], now: float) -> dict[str, Any]:
    number, name = entry["process_group"]
    return {
        **{key: entry[key] for key in FIELDS},
        "group": number if name in ("", "undefined") else name,
        "ended": entry["retired"],
        "age_seconds": round(now - entry["time_created_ns"] / 1e9, 3),
    }


def gather_objects(value: Value) -> list[Value]:
    """Return every rank's `value` in rank order; `[value]` for a single rank. Collective."""
    found = [value]
    if dist.is_initialized():
        found *= dist.get_world_size()
        dist.all_gather_object(found, value)
    return found


def object_of_first(value: Value) -> Value:
    """Return rank 0's `value`. Collective."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]
