"""What a search found as data, and as text for a terminal."""

import io
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.table import Table

from lightning_llm.plan.fit import GIB, RESERVE, hardware_facts
from lightning_llm.planner.pricing import Priced, Pricer
from lightning_llm.planner.search import Found, pareto_front
from lightning_llm.planner.wording import layout_words, why_slower
from lightning_llm.terminal.console import new_console

LISTED, SHOWN, SHOWN_TOO_LARGE = 100, 10, 3
"""Layouts in the data, and on a terminal."""


def search_facts(found: Found, pricer: Pricer, planner: str) -> dict[str, Any]:
    """Return what was found as plain data.

    `counts` (`Found.counts`), `refused` (why, and of how many layouts), `limit_bytes` that a rank may hold,
    `kept` (keys that were typed, and so not varied); `layouts`, the fastest first, and `too_large`, those that lack the
    fewest bytes, each with its `overrides`; `pareto`, the ranks of those than which none is both faster and smaller.
    """
    best = found.fitting[0] if found.fitting else None
    front = {id(priced) for priced in pareto_front(found.fitting)}
    return {
        "planner": planner,
        "cluster": pricer.cluster.name,
        "world": pricer.space.world,
        "kept": pricer.space.typed,
        "counts": {name: found.counts[name] for name in ("considered", "refused", "too_large", "fitting")},
        "refused": dict(found.reasons.most_common(5)),
        "limit_bytes": pricer.limit_bytes,
        "layouts": [
            {"rank": rank, **_facts(priced), "why": why_slower(priced, best or priced)}
            for rank, priced in enumerate(found.fitting[:LISTED], 1)
        ],
        "pareto": [
            {
                "rank": rank,
                "seconds": priced.seconds,
                "memory_bytes": priced.memory_bytes,
                "layout": layout_words(priced),
            }
            for rank, priced in enumerate(found.fitting, 1)
            if id(priced) in front
        ],
        "too_large": [_missing(priced, pricer) for priced in found.missing[:SHOWN_TOO_LARGE]],
    }


def _facts(priced: Priced) -> dict[str, Any]:
    time = priced.time
    if time is None:
        raise ValueError("a layout that was not timed has no rank")
    return {
        "layout": layout_words(priced),
        "overrides": overrides_of(priced),
        "seconds": time.total,
        "tokens_per_second": time.tokens_per_second,
        "mfu": time.mfu,
        "bubble_fraction": time.bubble_fraction,
        "step_seconds": time.seconds,
        "memory_bytes": priced.memory_bytes,
        "placement": asdict(priced.placement) if priced.placement else None,
    }


def overrides_of(priced: Priced) -> dict[str, Any]:
    """Return the keys and values that make a config's layout this one."""
    parallel = priced.plan.config.parallel
    values = priced.choice.overrides() | {"parallel.activation_checkpoint": parallel.activation_checkpoint}
    if parallel.activation_checkpoint_layers is not None:
        values["parallel.activation_checkpoint_layers"] = list(parallel.activation_checkpoint_layers)
    return values


def _missing(priced: Priced, pricer: Pricer) -> dict[str, Any]:
    """Return a layout that holds too much, with the bytes that it lacks and the cheapest change by which it fits."""
    change = hardware_facts(priced.plan)["change"]
    lacking = priced.memory_bytes - (pricer.limit_bytes or 0)
    return {
        "layout": layout_words(priced), "overrides": overrides_of(priced), "memory_bytes": priced.memory_bytes,
        "missing_bytes": lacking, "change": change,
    }  # fmt: skip


def render_search(facts: dict[str, Any]) -> str:
    """Return `search_facts` as text."""
    counts, limit = facts["counts"], facts["limit_bytes"]
    device = "whose memory is not known" if limit is None else f"of which {limit / GIB:.1f} GiB may be held"
    lines = [
        f"{facts['planner']} search on {facts['world']} ranks of {facts['cluster']}, {device}"
        + (f" (all but {RESERVE:.0%})" if limit else ""),
        f"{counts['considered']:,} layouts: {counts['fitting']:,} fit, {counts['too_large']:,} hold too much, "
        f"{counts['refused']:,} the checks refuse",
    ]
    if facts["kept"]:
        lines.append("kept as typed: " + ", ".join(f"{name}={value}" for name, value in facts["kept"].items()))
    if facts["layouts"]:
        lines += ["", _table(facts["layouts"][:SHOWN])]
    lines += list(_tail(facts))
    return "\n".join(lines)


def _tail(facts: dict[str, Any]) -> Iterator[str]:
    if facts["too_large"]:
        yield "\nhold too much, nearest first:"
    for each in facts["too_large"]:
        change = f"; {' '.join(each['change']['overrides'])} would fit" if each["change"] else ""
        held, lacking = each["memory_bytes"] / GIB, each["missing_bytes"] / GIB
        yield f"  {each['layout']}: {held:.1f} GiB, {lacking:.1f} too many{change}"
    if facts["refused"] and not facts["layouts"]:
        yield "\nrefused by the checks:"
        for reason, count in facts["refused"].items():
            yield f"  {count:,} layouts: {reason}"
    placement = facts["layouts"][0]["placement"] if facts["layouts"] else None
    if placement:
        gain = placement["given_seconds"] / facts["layouts"][0]["seconds"]
        yield f"\nmachines in the order of ranks: {', '.join(placement['order'])}"
        yield f"  {gain:.3g} times as fast as in the order they were given in ({placement['given_seconds']:.4g} s)"
    if facts["layouts"]:
        words = [f"{key}={_word(value)}" for key, value in facts["layouts"][0]["overrides"].items()]
        yield "\nthe fastest: " + " ".join(words)


def _word(value: Any) -> str:
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)


def _table(layouts: list[dict[str, Any]]) -> str:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in (("", "right"), ("layout", "left"), ("s/step", "right"), ("tokens/s", "right"), ("MFU", "right"),
                       ("GiB", "right"), ("bubble", "right"), ("why it is slower", "left")):  # fmt: skip
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for each in layouts:
        table.add_row(
            str(each["rank"]), each["layout"], f"{each['seconds']:.4g}", f"{each['tokens_per_second']:,.4g}",
            f"{each['mfu']:.1%}", f"{each['memory_bytes'] / GIB:.1f}", f"{each['bubble_fraction']:.1%}", each["why"],
        )  # fmt: skip
    text = io.StringIO()
    new_console(file=text, width=400, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
