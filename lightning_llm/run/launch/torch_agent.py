"""Starting this machine's ranks of one command by torch.distributed.run's agent, and saying why they ended."""

import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from lightning_llm.base.errors import AgreedError, ConfigError, RanksFailedError, Terminated, UnhealthyError
from lightning_llm.base.imports import slow_imports
from lightning_llm.base.interpreter import module_arguments, python_environment
from lightning_llm.base.signals import not_ignored
from lightning_llm.base.terminal import escaped
from lightning_llm.config.redact import redacted
from lightning_llm.run.launch.environment import die_with_launcher

Result = TypeVar("Result")

AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that torch's agent handles, unless they are ignored (LaunchConfig.signals_to_handle)."""

FOLLOWING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGABRT)
"""What ranks end by once another has failed: the agent's signals, and NCCL's watchdog."""

STOP_SECONDS = 10
"""How long ranks that have nothing to save may take to end after a signal."""

LOST_PEER = re.compile(r"gloo/transport|Connection (closed|reset) by peer|remote process exited|DistNetworkError")
"""What gloo, NCCL and torch's store say on a rank whose peer is gone."""


@dataclass(frozen=True)
class Node:
    """One of `count` machines whose ranks are one group, the `rank`-th. Agents meet at `endpoint` of the first."""

    rank: int
    count: int
    endpoint: str
    run_id: str


def launch_ranks(
    count: int,
    words: Sequence[str],
    *,
    threads: int | None,
    shutdown_seconds: int,
    quiet: bool = False,
    first_alone: bool = False,
    environment: Mapping[str, str] | None = None,
    node: Node | None = None,
) -> None:
    """Run `lightning-llm WORDS` as `count` ranks on this machine, until all have ended.

    The agent watches the ranks: when one fails it ends the others, and passes SIGINT and SIGTERM on to all, which then
    have `shutdown_seconds`. `threads`: of each on the CPU; None: cores are shared out. `quiet`: nobody sees what they
    print on the standard output. `first_alone`: nor anything that ranks but the first print. `environment`: of the
    ranks, where this process has none of a variable. `node`: this machine among others; None: ranks are here alone, and
    so are their sockets.

    Raises:
        ChildFailedError: of torch.distributed.elastic, a rank failed.
        SignalException: the same, this process was asked to stop.
    """
    with slow_imports():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        from lightning_llm.run.launch.rendezvous import LOOPBACK

    for name in ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they report is printed by the caller, in a line
    logs = tempfile.mkdtemp(prefix="lightning-llm-ranks-")  # ranks leave there what they raised
    hidden = dict.fromkeys(range(count), Std.OUT if quiet else Std.NONE)
    hidden |= dict.fromkeys(range(1, count), Std.ALL) if first_alone else {}
    settings = LaunchConfig(
        logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=hidden),
        nproc_per_node=count,
        max_restarts=0,
        shutdown_timeout=shutdown_seconds,
        signals_to_handle=",".join(each.name for each in not_ignored(AGENT_SIGNALS)),
        **_meeting(node),
    )
    try:
        cores = threads or max(1, (os.cpu_count() or 1) // count)
        own = {} if node else LOOPBACK
        with _for_ranks({"OMP_NUM_THREADS": str(cores), **own, **(environment or {})}):
            elastic_launch(settings, sys.executable)(*module_arguments("lightning_llm", *words))
    except ChildFailedError as error:
        _add_failures(error, Path(logs), first_rank=node.rank * count if node else 0)
        raise
    finally:
        shutil.rmtree(logs, ignore_errors=True)


def _meeting(node: Node | None) -> dict[str, Any]:
    """Return the part of torch's LaunchConfig that says where agents meet."""
    if node is None:
        from lightning_llm.run.launch.rendezvous import register

        return {"min_nodes": 1, "max_nodes": 1, "run_id": uuid.uuid4().hex, "rdzv_backend": register()}
    return {
        "min_nodes": node.count,
        "max_nodes": node.count,
        "run_id": node.run_id,
        "rdzv_backend": "static",
        "rdzv_endpoint": node.endpoint,
        "rdzv_configs": {"rank": node.rank},
    }


def launch_reported(
    count: int,
    words: Sequence[str],
    *,
    threads: int | None,
    shutdown_seconds: int,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run `lightning-llm WORDS` as `launch_ranks` does, the first rank alone heard; say which failed first, and why.

    Raises:
        RanksFailedError: a rank failed.
        KeyboardInterrupt: this process was asked to stop; Terminated where not by SIGINT.
    """
    seconds = shutdown_seconds
    with failure_said():
        launch_ranks(count, words, threads=threads, shutdown_seconds=seconds, first_alone=True, environment=environment)


def as_rank(work: Callable[[], Result]) -> Result:
    """Return what `work` does on one of the ranks of `launch_reported`, or of torchrun or srun.

    Raises:
        ConfigError: what `work` refuses.
        RanksFailedError: it failed, and the launcher says which rank did first, and why. Where nobody gathers what
            ranks say, what it raised comes through.
    """
    with slow_imports():
        from torch.distributed.elastic.multiprocessing.errors import record

    die_with_launcher()
    try:
        return cast(Result, record(work)())
    except (KeyboardInterrupt, Exception) as error:
        if isinstance(error, ConfigError) or "TORCHELASTIC_ERROR_FILE" not in os.environ:
            raise
        raise RanksFailedError(130 if isinstance(error, KeyboardInterrupt) else 1, str(error)) from error


@contextmanager
def failure_said(*, by_ranks: bool = False) -> Iterator[None]:
    """Say which rank failed first, and why, where `launch_ranks` in the block fails; signals are this process's again.

    `by_ranks`: one that ends with 1 and hands nothing on has said why.

    Raises:
        RanksFailedError: a rank failed, which is said.
        KeyboardInterrupt: or Terminated, for the signal that asked this process to stop.
    """
    with slow_imports():
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        yield
    except SignalException as stop:
        raise (KeyboardInterrupt() if stop.sigval == signal.SIGINT else Terminated(stop.sigval)) from stop
    except ChildFailedError as error:
        rank, failure = first_failure(error)
        refused, handed_on = say_refused(rank, failure), isinstance(failure.message, dict)
        said = by_ranks and failure.exitcode == 1 and not handed_on
        if not refused and not said and not found_unhealthy(error):
            if handed_on:
                print(redacted(failure.message["extraInfo"]["py_callstack"]), file=sys.stderr)
            print(f"error: {failure_line(rank, failure)}", file=sys.stderr)
        raise RanksFailedError(2 if refused else 1, failure_line(rank, failure)) from error


@contextmanager
def _for_ranks(environment: Mapping[str, str]) -> Iterator[None]:
    """Set the ranks' environment; take back what they and the agent change of this process, which may go on.

    The agent makes every signal that it handles a SignalException, and leaves it so.
    """
    handlers = {number: signal.getsignal(number) for number in AGENT_SIGNALS}
    before = dict(os.environ)
    os.environ.update({**environment, **before, **python_environment()})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _add_failures(error: Any, logs: Path, first_rank: int) -> None:
    """Add to the failures that the agent has seen those of ranks that had written down theirs and had not ended yet.

    A rank takes a moment to end, in which its peers lose it, fail and may end before it. `first_rank`: of this machine.
    """
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    for file in logs.glob("*/attempt_0/*/error.json"):  # RUN/attempt_0/LOCAL_RANK
        local = int(file.parent.name)
        if (rank := first_rank + local) not in error.failures:
            error.failures[rank] = ProcessFailure(local_rank=local, pid=0, exitcode=1, error_file=str(file))


def first_failure(error: Any) -> tuple[int, Any]:
    """Return the rank that failed first, and its failure, of a ChildFailedError.

    The agent knows the second of each. Of those within one, a rank that has lost a peer was not the first.
    """
    rank, first = error.get_first_failure()
    if not LOST_PEER.search(message_of(first)):
        return rank, first
    for each, other in sorted(error.failures.items(), key=lambda item: item[1].timestamp):
        said = isinstance(other.message, dict) and not LOST_PEER.search(message_of(other))
        killed = other.exitcode < 0 and -other.exitcode not in FOLLOWING
        if (said or killed) and other.timestamp <= first.timestamp + 1:
            return each, other
    return rank, first


def say_refused(rank: int, failure: Any) -> bool:
    """Say what is wrong with an input where another rank than the first found it; return whether an input is wrong.

    Of what all ranks found, which rank 0 says, the first to write it down may end by the agent's signal, not with 2.
    """
    kind, _, text = message_of(failure).partition(": ")
    if kind == AgreedError.__name__:
        return True
    if failure.exitcode == 2 and rank != 0 and isinstance(failure.message, dict):
        print(f"error: rank {rank}: {text}", file=sys.stderr)
    return bool(failure.exitcode == 2)


def found_unhealthy(error: Any) -> bool:
    """Return whether a rank of a ChildFailedError found others unfit, which it has said, whoever failed first."""
    return any(message_of(each).startswith(UnhealthyError.__name__) for each in error.failures.values())


def message_of(failure: Any) -> str:
    """Return what a failed rank raised, or the agent says of it."""
    return redacted(str(failure.message["message"] if isinstance(failure.message, dict) else failure.message))


def failure_line(rank: int, failure: Any) -> str:
    """Return in a line which rank failed first, how and why."""
    how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    return f"rank {rank} failed first ({how}): {escaped(message_of(failure).strip().splitlines()[0])}"
