"""Starting this machine's ranks of one command by torch.distributed.run's agent, and saying why they ended."""

import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_llm.errors import AgreedError
from lightning_llm.slow_imports import slow_imports
from lightning_llm.terminal.text import escaped

AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""What torch's agent sets handlers for (torch.distributed.elastic.multiprocessing.api.PContext.start)."""


def launch_ranks(
    count: int,
    words: Sequence[str],
    *,
    threads: int | None,
    shutdown_seconds: int,
    quiet: bool = False,
    first_alone: bool = False,
) -> None:
    """Run `lightning-llm WORDS` as `count` ranks on this machine, until all have ended.

    The agent watches the ranks: when one fails it ends the others, and passes SIGINT and SIGTERM on to all, which then
    have `shutdown_seconds`. `threads`: of each on the CPU; None: cores are shared out. `quiet`: nobody sees what they
    print on the standard output. `first_alone`: nor anything that ranks but the first print.

    Raises:
        ChildFailedError: of torch.distributed.elastic, a rank failed.
        SignalException: the same, this process was asked to stop.
    """
    with slow_imports():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they report is printed by the caller, in a line
    logs = tempfile.mkdtemp(prefix="lightning-llm-ranks-")  # ranks leave there what they raised
    hidden = dict.fromkeys(range(count), Std.OUT if quiet else Std.NONE)
    hidden |= dict.fromkeys(range(1, count), Std.ALL) if first_alone else {}
    settings = LaunchConfig(
        logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=hidden),
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        max_restarts=0,
        shutdown_timeout=shutdown_seconds,
    )
    try:
        with _for_ranks(threads or max(1, (os.cpu_count() or 1) // count)):
            elastic_launch(settings, sys.executable)("-m", "lightning_llm", *words)
    finally:
        shutil.rmtree(logs, ignore_errors=True)


@contextmanager
def _for_ranks(threads: int) -> Iterator[None]:
    """Share the cores out among the ranks; take back what they and the agent change of this process, which may go on.

    The agent makes every signal below a SignalException, and leaves it so.
    """
    handlers = {number: signal.getsignal(number) for number in AGENT_SIGNALS}
    ours = "OMP_NUM_THREADS" not in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    try:
        yield
    finally:
        if ours:
            del os.environ["OMP_NUM_THREADS"]
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


def say_refused(rank: int, failure: Any) -> None:
    """Say what is wrong with an input where another rank than the first found it: rank 0 may not get to it."""
    if failure.exitcode == 2 and rank != 0 and isinstance(failure.message, dict):
        kind, _, text = failure.message["message"].partition(": ")
        if kind != AgreedError.__name__:
            print(f"error: rank {rank}: {text}", file=sys.stderr)


def message_of(failure: Any) -> str:
    """Return what a failed rank raised, or the agent says of it."""
    return str(failure.message["message"] if isinstance(failure.message, dict) else failure.message)


def failure_line(rank: int, failure: Any) -> str:
    """Return in a line which rank failed first, how and why."""
    how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    return f"rank {rank} failed first ({how}): {escaped(message_of(failure).strip().splitlines()[0])}"
