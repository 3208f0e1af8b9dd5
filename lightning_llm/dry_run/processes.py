"""Dry ranks in processes of their own, which end with this one: by its first signal, or with its death."""

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess

from lightning_llm.base.errors import ConfigError, RanksFailedError
from lightning_llm.base.folders import use_short_sockets
from lightning_llm.base.signals import die_with_parent
from lightning_llm.base.terminal import Waiting
from lightning_llm.dry_run.rank import RankCounts, dry_rank
from lightning_llm.plan.resolve import Plan

AT_ONCE = 2
"""Processes: one rank of a large model takes half a gigabyte of real memory."""
KILLED = (
    "a rank's process was ended from outside, as the system does where memory runs out. A rank of a large model takes "
    "about half a gigabyte, and two run at once: free some, or plan without --dry-run."
)
POLL_SECONDS = 0.5
"""How often the line of progress is looked at while no rank reports anything."""


def count_ranks(plan: Plan, ranks: Sequence[int]) -> list[RankCounts]:
    """Return what each of `ranks` does in a step, in their order, at most `AT_ONCE` of them at a time.

    Whatever ends this early (a signal, a rank that fails) ends all processes at once.

    Raises:
        ConfigError: where a rank cannot be run dry, with the reason.
        RanksFailedError: where a rank's process was killed.
    """
    use_short_sockets()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning_llm.dry_run.rank", "torch.testing._internal.distributed.fake_pg"])
    left, running, found = list(ranks), dict[Connection, ForkServerProcess](), dict[int, RankCounts]()
    started, begun, at_once = time.monotonic(), 0, min(AT_ONCE, os.cpu_count() or 1)
    total = len(ranks) * plan.micro_batches * plan.config.parallel.virtual_stages
    with ExitStack() as stack:
        waiting = stack.enter_context(Waiting("micro-batches run dry", of=total))
        stack.callback(_kill, running)
        while left or running:
            while left and len(running) < at_once:
                connection, process = _start(context, plan, left.pop(0))
                running[connection] = process
            for ready in wait(list(running), POLL_SECONDS):
                if not isinstance(ready, Connection):
                    continue
                message = _received(ready)
                if message is None:
                    begun += 1
                    continue
                running.pop(ready).join()
                ready.close()
                if isinstance(message, Exception):
                    raise message
                found[message.rank] = message
            elapsed = time.monotonic() - started
            rest = elapsed * (total - begun) / begun if begun else 0.0
            waiting.tell(begun, f", about {rest:,.0f} s left" if begun else "")
    return [found[rank] for rank in ranks]


def _start(context: ForkServerContext, plan: Plan, rank: int) -> tuple[Connection, ForkServerProcess]:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, plan, rank), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _run(connection: Connection, plan: Plan, rank: int) -> None:
    """Run `rank` dry, and send None for each micro-batch that it begins, then its counts or its error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one, and ends it
    die_with_parent()
    with suppress(BrokenPipeError):  # nobody waits for this rank any more
        try:
            connection.send(dry_rank(plan, rank, lambda: connection.send(None)))
        except ConfigError as error:
            connection.send(error)


def _received(connection: Connection) -> RankCounts | Exception | None:
    try:
        message: RankCounts | Exception | None = connection.recv()
    except EOFError:
        return RanksFailedError(1, KILLED)
    return message


def _kill(running: dict[Connection, ForkServerProcess]) -> None:
    for process in running.values():
        process.kill()
    for connection, process in running.items():
        process.join()
        connection.close()
