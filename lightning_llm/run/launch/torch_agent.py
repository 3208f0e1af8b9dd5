"""Start the ranks of a command on this machine with torch.distributed.run's agent, and report their failures."""

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
from lightning_llm.base.process import module_arguments, python_environment, slow_imports
from lightning_llm.base.signals import not_ignored
from lightning_llm.base.terminal import escaped
from lightning_llm.config.redact import redacted
from lightning_llm.run.launch.environment import die_with_launcher

Result = TypeVar("Result")

AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that torch's agent handles, unless they are ignored (LaunchConfig.signals_to_handle)."""

FOLLOWING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGABRT)
"""Signals that end ranks after another has failed: those of the agent, and of NCCL's watchdog."""

STOP_SECONDS = 10
"""Time for ranks without a state to save to end after a signal."""

LOST_PEER = re.compile(r"gloo/transport|Connection (closed|reset) by peer|remote process exited|DistNetworkError")
"""Errors of gloo, NCCL and torch's store on a rank that has lost a peer."""


@dataclass(frozen=True)
class Node:
    """One machine of a run on several machines, as torch's agent there needs to know it."""

    rank: int
    """Number of this machine, from 0."""
    count: int
    """Number of machines."""
    endpoint: str
    """"ADDRESS:PORT" on the first machine, to which the agents of all machines connect."""
    run_id: str
    """Any text that is the same on all machines."""


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

    The agent ends all ranks when one fails, and forwards SIGINT and SIGTERM to them.

    Args:
        threads: CPU threads of each rank; None: split the cores among ranks.
        shutdown_seconds: time for the ranks to end after a signal.
        quiet: discard the ranks' stdout.
        first_alone: also discard all output of ranks other than the first.
        environment: default values of environment variables of the ranks.
        node: this machine in a group of several; None: all ranks are here and use only the loopback interface.

    Raises:
        ChildFailedError: a rank failed (from torch.distributed.elastic).
        SignalException: this process received a signal (from torch.distributed.elastic).
    """
    with slow_imports():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        from lightning_llm.run.launch.rendezvous import LOOPBACK

    for name in ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the caller reports failures in one line
    logs = tempfile.mkdtemp(prefix="lightning-llm-ranks-")  # ranks write their exceptions there
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
    """Return the rendezvous settings of torch's LaunchConfig."""
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
    """Run `launch_ranks` with only the first rank's output; report the first failed rank and its reason.

    Raises:
        RanksFailedError: a rank failed (already reported on stderr).
        KeyboardInterrupt: SIGINT was received; its subclass Terminated for other signals.
    """
    seconds = shutdown_seconds
    with failures_reported():
        launch_ranks(count, words, threads=threads, shutdown_seconds=seconds, first_alone=True, environment=environment)


def as_rank(work: Callable[[], Result]) -> Result:
    """Run `work` as one of the ranks of `launch_reported`, torchrun or srun; return its result.

    Raises:
        ConfigError: as `work`.
        RanksFailedError: `work` failed; the launcher reports the first failure. Without a launcher that collects
            errors, the exception of `work` is raised instead.
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
def failures_reported(*, by_ranks: bool = False) -> Iterator[None]:
    """Report the first failed rank and its reason if `launch_ranks` in the block fails.

    `by_ranks`: a rank that exits with 1 and records no exception has already reported the reason.

    Raises:
        RanksFailedError: a rank failed (already reported on stderr).
        KeyboardInterrupt: SIGINT was received; its subclass Terminated for other signals.
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
        refused, recorded = report_refused(rank, failure), isinstance(failure.message, dict)
        reported = by_ranks and failure.exitcode == 1 and not recorded
        if not refused and not reported and not found_unhealthy(error):
            if recorded:
                print(redacted(failure.message["extraInfo"]["py_callstack"]), file=sys.stderr)
            print(f"error: {failure_line(rank, failure)}", file=sys.stderr)
        raise RanksFailedError(2 if refused else 1, failure_line(rank, failure)) from error


@contextmanager
def _for_ranks(environment: Mapping[str, str]) -> Iterator[None]:
    """Set the ranks' environment; afterwards restore this process's environment and signal handlers.

    The agent installs signal handlers that raise SignalException and does not remove them.
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
    """Add to the agent's failures those of ranks that had recorded an exception but not yet exited.

    While a failed rank exits, its peers lose the connection, fail and may exit first. `first_rank`: of this machine.
    """
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    for file in logs.glob("*/attempt_0/*/error.json"):  # RUN/attempt_0/LOCAL_RANK
        local = int(file.parent.name)
        if (rank := first_rank + local) not in error.failures:
            error.failures[rank] = ProcessFailure(local_rank=local, pid=0, exitcode=1, error_file=str(file))


def first_failure(error: Any) -> tuple[int, Any]:
    """Return the rank that failed first and its failure, from a ChildFailedError.

    The agent's times are in seconds. Among failures of the same second, a rank that has lost a peer was not the first.
    """
    rank, first = error.get_first_failure()
    if not LOST_PEER.search(message_of(first)):
        return rank, first
    for each, other in sorted(error.failures.items(), key=lambda item: item[1].timestamp):
        recorded = isinstance(other.message, dict) and not LOST_PEER.search(message_of(other))
        killed = other.exitcode < 0 and -other.exitcode not in FOLLOWING
        if (recorded or killed) and other.timestamp <= first.timestamp + 1:
            return each, other
    return rank, first


def report_refused(rank: int, failure: Any) -> bool:
    """Return whether rank `rank` failed because of an invalid input; print the problem if rank 0 has not found it, too.

    Problems found by all ranks are reported by rank 0; the rank that recorded them may end by the agent's signal
    instead of with exit code 2.
    """
    kind, _, text = message_of(failure).partition(": ")
    if kind == AgreedError.__name__:
        return True
    if failure.exitcode == 2 and rank != 0 and isinstance(failure.message, dict):
        print(f"error: rank {rank}: {text}", file=sys.stderr)
    return bool(failure.exitcode == 2)


def found_unhealthy(error: Any) -> bool:
    """Return whether any rank of a ChildFailedError raised UnhealthyError, which it has already reported."""
    return any(message_of(each).startswith(UnhealthyError.__name__) for each in error.failures.values())


def message_of(failure: Any) -> str:
    """Return the text of the exception that a failed rank recorded ("TYPE: TEXT"), or the agent's message about it."""
    return redacted(str(failure.message["message"] if isinstance(failure.message, dict) else failure.message))


def failure_line(rank: int, failure: Any) -> str:
    """Return one line about a failure: the rank that failed first, its signal or exit code, and the reason."""
    how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    return f"rank {rank} failed first ({how}): {escaped(message_of(failure).strip().splitlines()[0])}"
