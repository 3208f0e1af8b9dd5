"""Dry run of a plan: one rank of each pipeline stage in a separate process, compared with the formulas.

The processes end with this one, by its first signal or when it dies.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from lightning_llm.base.errors import ConfigError, RanksFailedError
from lightning_llm.base.folders import use_short_sockets
from lightning_llm.base.signals import die_with_parent
from lightning_llm.base.terminal import Waiting
from lightning_llm.dry_run.rank import RankCounts, dry_rank
from lightning_llm.plan.describe import memory_text, traffic_text
from lightning_llm.plan.memory.rank_bytes import memory_bytes, peak_memory_pp_rank
from lightning_llm.plan.nodes import ranks_per_node
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.traffic import bytes_sent

EXACT = ("parameters", "gradients", "optimizer")
"""Kinds of `memory_bytes` for which the formulas are exact."""
AT_ONCE = 2
"""Number of processes at once; a rank of a large model takes half a gigabyte of real memory."""
KILLED = (
    "a rank's process was killed, probably because memory ran out. A rank of a large model takes "
    "about half a gigabyte, and two run at once. Free memory, or plan without --dry-run."
)
POLL_SECONDS = 0.5
"""Interval at which the progress line is updated while no rank reports."""


def dry_run(plan: Plan) -> dict[str, Any]:
    """Return the counts of `plan`'s ranks in one step on fake tensors.

    One rank per pipeline rank is run: the first, which has the largest shards.

    - `memory_bytes`: `parameters`, `gradients`, `optimizer`, `activations_and_buffers`; `total` is the peak of the rank
      with the most.
    - `peak_memory_pp_rank`: its pipeline rank.
    - `bytes_sent`, `traffic_bytes`: as in a plan, counted.
    - `differences`: where formula and count differ: `name`, `planned`, `counted`.
    - `ranks`: per pipeline rank the bytes held and sent, `calls` of collectives, `operations`, `host_waits` (times that
      the host waited for a value).

    Raises:
        ConfigError: where a rank cannot be run dry, with the reason.
        RanksFailedError: where a rank's process was killed.
    """
    stride = plan.degrees.world // plan.degrees.pp
    # The last stage takes longest because of its loss, so it starts first.
    counts = count_ranks(plan, range(0, plan.degrees.world, stride)[::-1])[::-1]
    peak = max(counts, key=lambda each: each.peak_bytes)
    planned_of = counts[peak_memory_pp_rank(plan)]
    return {
        "memory_bytes": _memory(peak),
        "peak_memory_pp_rank": peak.pp_rank,
        "bytes_sent": planned_of.sent_bytes,
        "traffic_bytes": _traffic(plan, planned_of),
        "differences": _differences(plan, planned_of),
        "ranks": [{key: value for key, value in asdict(each).items() if key != "between"} for each in counts],
    }


def _memory(counts: RankCounts) -> dict[str, int]:
    held = {kind: getattr(counts, f"{kind}_bytes") for kind in EXACT}
    return {**held, "activations_and_buffers": counts.peak_bytes - sum(held.values()), "total": counts.peak_bytes}


def _traffic(plan: Plan, counts: RankCounts) -> dict[str, int]:
    """Return the bytes within and between nodes: around a ring, or to each other rank in an all-to-all."""
    per_node, between = ranks_per_node(plan.config), 0.0
    for kind, ranks, size in counts.between:
        nodes = [rank // per_node for rank in ranks]
        own = nodes.count(counts.rank // per_node)
        share = (len(ranks) - own) / (len(ranks) - 1) if kind == "all_to_all" else len(set(nodes)) / len(ranks)
        between += size * (share if len(set(nodes)) > 1 else 0)
    return {"within_nodes": sum(size for *_, size in counts.between) - int(between), "between_nodes": int(between)}


def _differences(plan: Plan, counts: RankCounts) -> list[dict[str, Any]]:
    planned, sent = memory_bytes(plan), {kind: size for kind, size in bytes_sent(plan).items() if size}
    pairs = [(f"memory_bytes.{kind}", planned[kind], getattr(counts, f"{kind}_bytes")) for kind in EXACT]
    kinds = {*sent, *counts.sent_bytes}
    pairs += [(f"bytes_sent.{kind}", sent.get(kind, 0), counts.sent_bytes.get(kind, 0)) for kind in kinds]
    return [
        {"name": name, "planned": expected, "counted": counted}
        for name, expected, counted in sorted(pairs)
        if expected != counted
    ]


def count_ranks(plan: Plan, ranks: Sequence[int]) -> list[RankCounts]:
    """Return the counts of each of `ranks` in one step, in order, running at most `AT_ONCE` at a time.

    If this ends early (by a signal or a failing rank), all processes end at once.

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
    """Run `rank` dry; send None for each micro-batch that it begins, then its counts or its error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C and ends this one
    die_with_parent()
    with suppress(BrokenPipeError):  # the parent has ended
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


def render_counts(facts: dict[str, Any]) -> str:
    """Return the text of a dry run for the terminal: counts, and differences between formulas and counts.

    `facts`: the facts of a plan, with the result of `dry_run` under "dry_run".
    """
    counts = facts["dry_run"]
    memory, traffic = counts["memory_bytes"], counts["traffic_bytes"]
    within, between = traffic_text(traffic["within_nodes"]), traffic_text(traffic["between_nodes"])
    ranks = counts["ranks"]
    peak, planned = memory["total"], facts["memory_bytes"]["total"]
    rows = [
        ("dry run", f"one step of {_some(len(ranks), 'rank')} that differ{'' if len(ranks) > 1 else 's'}, counted"),
        (
            "  peak",
            f"{memory_text(peak)} on pipeline rank {counts['peak_memory_pp_rank']}; planned {memory_text(planned)}",
        ),
        *((f"    {kind}", memory_text(size)) for kind, size in memory.items() if kind != "total"),
        *((f"  sent, {kind}", traffic_text(size)) for kind, size in counts["bytes_sent"].items()),
        ("  to ranks", f"{within} within, {between} between machines"),
    ]
    for each in ranks:
        calls = ", ".join(f"{count:,} {kind}" for kind, count in sorted(each["calls"].items())) or "no collectives"
        waits = _some(each["host_waits"], "wait of the host", "waits of the host")
        rows.append((f"  pp rank {each['pp_rank']}", f"peak {memory_text(each['peak_bytes'])}, {calls}, {waits}"))
    for each in counts["differences"]:
        rows.append(("  differs", f"{each['name']}: planned {each['planned']:,}, counted {each['counted']:,} bytes"))
    if not counts["differences"]:
        rows.append(("  agrees", "parameters, gradients, optimizer and every kind of bytes sent are those planned"))
    width = max(17, *(len(name) for name, _ in rows))
    return "\n".join(f"{name:<{width}} {text}" for name, text in rows)


def _some(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
