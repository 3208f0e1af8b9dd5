"""Report of a search: JSON data, text for a terminal, short names of layouts, and a plot of seconds over memory."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from lightning_llm.base.hardware import GIB
from lightning_llm.base.terminal import new_console
from lightning_llm.plan.degrees import replica_axes, shard_axes
from lightning_llm.plan.memory.fit import RESERVE, hardware_facts
from lightning_llm.plan.nodes import nodes_of_groups, ranks_per_node
from lightning_llm.plan.search import LISTED, SearchResult, pareto_front
from lightning_llm.plan.search.pricing import Priced, Pricer
from lightning_llm.plan.search.space import CHECKPOINTING
from lightning_llm.plan.stages import INTERLEAVED
from lightning_llm.plan.time.describe import assumptions, published_ratio, range_text, ratio_text
from lightning_llm.plan.time.step import StepTimer, no_time

SHOWN, SHOWN_EMULATED = 10, 3
"""Layouts on a terminal, and the minimum number of emulated ones, if any."""
COUNTS = ("considered", "refused", "too_large", "fitting", "slower", "emulated")
PARALLEL_PARTS = {"tensor_parallel": ("tp",), "context_parallel": ("cp",), "expert_parallel": ("ep",)}
LABELLED = 12
"""Number of layouts on the Pareto front that are labeled in the plot's legend."""
NEAR = 0.25
"""The limit is drawn if a layout exceeds this fraction of it."""


def search_facts(found: SearchResult, pricer: Pricer, planner: str) -> dict[str, Any]:
    """Return a search's result as plain data.

    - `counts`: `SearchResult.counts`. `refused`: {reason: number of layouts}. `no_time`: the same for emulated layouts.
    - `limit_bytes`: largest allowed bytes of a rank. `kept`: keys given on the command line, which are not varied.
    - `layouts`: the fastest first, then emulated ones (without a time) by bytes. `too_large`: those that exceed the
      limit least. Each has its `overrides`.
    - `pareto`: the layouts that no other beats in both time and memory.
    - `peak`: the peak that MFU refers to; `assumed`: assumptions of the times. None and empty without a time.
    """
    best = found.fitting[0] if found.fitting else None
    listed = [*found.fitting[:LISTED], *found.emulated]
    front = {id(priced) for priced in pareto_front(found.fitting)}
    return {
        "planner": planner,
        "cluster": pricer.cluster.name,
        "world": pricer.space.world,
        "kept": pricer.space.typed,
        "counts": {name: found.counts[name] for name in COUNTS},
        "refused": dict(found.reasons.most_common(5)),
        "no_time": dict(found.no_time.most_common(5)),
        "limit_bytes": pricer.limit_bytes,
        "peak": best.time.needed.text() if best and best.time else None,
        "assumed": list(assumptions(best.plan, pricer.cluster, StepTimer(best.plan, pricer.cluster))) if best else [],
        "layouts": [
            {"rank": rank, **_facts(priced, pricer), "why": why_slower(priced, best or priced)}
            for rank, priced in enumerate(listed, 1)
        ],
        "pareto": [
            {
                "rank": rank,
                "seconds": priced.seconds,
                "memory_bytes": priced.memory_bytes,
                "layout": layout_name(priced),
            }
            for rank, priced in enumerate(found.fitting, 1)
            if id(priced) in front
        ],
        "too_large": [_missing(priced, pricer) for priced in found.missing],
    }


def _facts(priced: Priced, pricer: Pricer) -> dict[str, Any]:
    time = priced.time
    return {
        "layout": layout_name(priced),
        "overrides": overrides_of(priced),
        "no_time": None if time else no_time(priced.plan, pricer.cluster),
        "seconds": time and time.total,
        "tokens_per_second": time and time.tokens_per_second,
        "mfu": time and time.mfu,
        "bubble_fraction": time and time.bubble_fraction,
        "step_seconds": time and time.seconds,
        "published": published_ratio(priced.plan.config, priced.plan.degrees).as_data(),
        "memory_bytes": priced.memory_bytes,
        "placement": asdict(priced.placement) if priced.placement else None,
    }


def overrides_of(priced: Priced) -> dict[str, Any]:
    """Return {key: value} that selects this layout."""
    parallel = priced.plan.config.parallel
    values = priced.choice.overrides() | {"parallel.activation_checkpoint": parallel.activation_checkpoint}
    if parallel.activation_checkpoint_layers is not None:
        values["parallel.activation_checkpoint_layers"] = list(parallel.activation_checkpoint_layers)
    return values


def _missing(priced: Priced, pricer: Pricer) -> dict[str, Any]:
    """Return a layout that is too large, with the missing bytes and the cheapest change that makes it fit."""
    change = hardware_facts(priced.plan)["change"]
    lacking = priced.memory_bytes - (pricer.limit_bytes or 0)
    return {
        "layout": layout_name(priced), "overrides": overrides_of(priced), "memory_bytes": priced.memory_bytes,
        "missing_bytes": lacking, "change": change,
    }  # fmt: skip


def render_search(facts: dict[str, Any]) -> str:
    """Return `search_facts` as text."""
    counts, limit = facts["counts"], facts["limit_bytes"]
    device = "memory unknown" if limit is None else f"limit {limit / GIB:.1f} GiB per rank"
    lines = [
        f"{facts['planner']} search on {facts['world']} ranks of {facts['cluster']}, {device}"
        + (f" (all but {RESERVE:.0%})" if limit else ""),
        f"{counts['considered']:,} layouts: {counts['fitting']:,} timed, {counts['slower']:,} slower, "
        f"{counts['too_large']:,} too large, {counts['refused']:,} refused by the checks, "
        f"{counts['emulated']:,} emulated",
    ]
    if facts["batch_note"]:
        lines.append(facts["batch_note"])
    if facts["kept"]:
        lines.append("kept as typed: " + ", ".join(f"{name}={value}" for name, value in facts["kept"].items()))
    timed, emulated = (
        [each for each in facts["layouts"] if (each["no_time"] is None) == native] for native in (True, False)
    )
    if facts["layouts"]:
        shown = timed[:SHOWN]
        lines += ["", _table([*shown, *emulated[: max(SHOWN_EMULATED, SHOWN - len(shown))]])]
    lines += list(_tail(facts, timed))
    return "\n".join(lines)


def _tail(facts: dict[str, Any], timed: list[dict[str, Any]]) -> Iterator[str]:
    if timed:
        yield f"\nMFU is relative to {facts['peak']}; published: published over predicted speed of the layout's family"
        for ratio in {each["published"]["family"]: each["published"] for each in timed[:SHOWN]}.values():
            yield f"  published  {ratio_text(ratio)}"
        yield from (f"  assumed    {each}" for each in facts["assumed"])
    if facts["no_time"]:
        yield "\nno time:"
        yield from (
            f"  {count:,} layouts: {reason}" for reason, count in list(facts["no_time"].items())[:SHOWN_EMULATED]
        )
    if facts["too_large"]:
        yield "\ntoo large, nearest first:"
    for each in facts["too_large"]:
        change = f"; {' '.join(each['change']['overrides'])} would fit" if each["change"] else ""
        held, lacking = each["memory_bytes"] / GIB, each["missing_bytes"] / GIB
        yield f"  {each['layout']}: {held:.1f} GiB, {lacking:.1f} too much{change}"
    if facts["refused"] and not facts["layouts"]:
        yield "\nrefused by the checks:"
        for reason, count in facts["refused"].items():
            yield f"  {count:,} layouts: {reason}"
    placement = timed[0]["placement"] if timed else None
    if placement:
        gain = placement["given_seconds"] / timed[0]["seconds"]
        yield f"\nmachines in the order of ranks: {', '.join(placement['order'])}"
        yield f"  {gain:.3g} times as fast as in the given order ({placement['given_seconds']:.4g} s)"
    if timed:
        words = [f"{key}={_word(value)}" for key, value in timed[0]["overrides"].items()]
        yield "\nthe fastest: " + " ".join(words)


def _word(value: Any) -> str:
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)


def _table(layouts: list[dict[str, Any]]) -> str:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in (("", "right"), ("layout", "left"), ("s/step", "right"), ("tokens/s", "right"), ("MFU", "right"),
                       ("GiB", "right"), ("bubble", "right"), ("published", "right"),
                       ("why it is slower", "left")):  # fmt: skip
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for each in layouts:
        rank, held = str(each["rank"]), f"{each['memory_bytes'] / GIB:.1f}"
        if each["no_time"] is not None:
            table.add_row(rank, each["layout"], "", "", "", held, "", "", f"no time: {each['no_time']}")
            continue
        table.add_row(
            rank, each["layout"], f"{each['seconds']:.4g}", f"{each['tokens_per_second']:,.4g}", f"{each['mfu']:.1%}",
            held, f"{each['bubble_fraction']:.1%}", range_text(each["published"]), each["why"],
        )  # fmt: skip
    text = io.StringIO()
    new_console(file=text, width=4000, color_system=None).print(table)  # reasons are long
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def layout_name(priced: Priced) -> str:
    """Return a short name of a layout, e.g. "tp 8, pp 4 x 2, dp 8, ZeRO-2, no recomputation, micro-batch 1"."""
    choice = priced.choice
    own = (("tp", choice.tp), ("cp", choice.cp), ("ep", choice.ep), *choice.further)
    words = [f"{axis} {size}" for axis, size in own if size > 1]
    if choice.pp > 1:
        stages = f" x {choice.virtual_stages}" if choice.schedule == INTERLEAVED else ""
        words.append(f"pp {choice.pp}{stages}{' gpipe' if choice.schedule == 'gpipe' else ''}")
    if (dp := choice.dp_replicate * choice.dp_shard) > 1 or not words:
        words.append(f"dp {choice.dp_replicate} x {choice.dp_shard}" if 1 < choice.dp_shard < dp else f"dp {dp}")
    words += [f"ZeRO-{choice.zero_stage}"] if choice.zero_stage else []
    return ", ".join([*words, checkpointing_name(priced), f"micro-batch {choice.micro_batch_size}"])


def checkpointing_name(priced: Priced) -> str:
    """Return the recomputation of blocks, e.g. "selective recomputation" or "24 full + 8 none"."""
    modes = priced.plan.config.parallel.activation_checkpoint_layers
    if modes is None:
        mode = priced.choice.activation_checkpoint
        return "no recomputation" if mode == "none" else f"{mode} recomputation"
    return " + ".join(f"{modes.count(mode)} {mode}" for mode in reversed(CHECKPOINTING) if mode in modes)


def why_slower(priced: Priced, best: Priced) -> str:
    """Return a text on why `priced` is slower than the fastest layout, such as "+0.2 s recomputation".

    The text names the part of a step with the largest extra time; "as fast" without a noticeable one. It is "" for the
    fastest layout itself, and if one of the two has no step time.
    """
    if priced.time is None or best.time is None or priced is best:
        return ""
    more = {part: seconds - best.time.seconds.get(part, 0.0) for part, seconds in priced.time.seconds.items()}
    part = max(more, key=lambda each: more[each])
    if more[part] <= 1e-3 * priced.seconds:
        return "as fast"
    return f"+{more[part]:.3g} s {_part_words(part, priced, best)}"


def _part_words(part: str, priced: Priced, best: Priced) -> str:
    choice = priced.choice
    if part == "bubble" and priced.time is not None:
        return f"waiting for stages ({priced.time.bubble_fraction:.0%} of the step)"
    if part in ("gemm", "attention", "memory_bound") and _recomputed(priced) > _recomputed(best):
        return "recomputation"
    if part == "gemm":
        return f"smaller GEMMs (tp {choice.tp}, micro-batch {choice.micro_batch_size})"
    if part == "optimizer":
        return "update of a larger share of the optimizer"
    if part in PARALLEL_PARTS:
        return f"{part.replace('_', ' ')} collectives {_where(priced, PARALLEL_PARTS[part])}"
    if part == "gathers":
        return f"exposed gathers of weights {_where(priced, shard_axes())}"
    if part == "reductions":
        return f"exposed sums of gradients {_where(priced, (*replica_axes(), *shard_axes()))}"
    return part.replace("_", " ") + " operators"


def _recomputed(priced: Priced) -> float:
    """Return the mean over blocks of the recomputation mode as a number, for comparison."""
    config = priced.plan.config
    modes = [config.parallel.checkpointing_of(index) for index in range(config.model.num_layers)]
    return sum(map(CHECKPOINTING.index, modes)) / len(modes)


def _where(priced: Priced, axes: tuple[str, ...]) -> str:
    crosses = nodes_of_groups(priced.plan.degrees, axes, ranks_per_node(priced.plan.config)) > 1
    return "between machines" if crosses else "within a machine"


def draw_front(layouts: Sequence[Priced], limit_bytes: int | None, title: str, path: Path) -> None:
    """Plot seconds per step over GiB per rank to `path`, PNG or SVG by its suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not pyplot: it keeps global state
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="peak GiB per rank", ylabel="seconds per step", title=title)
    axes.scatter(*_points(layouts), s=10, color="#999999", label=f"{len(layouts):,} layouts that fit")
    front = pareto_front(layouts)
    axes.step(*_points(front), where="pre", color="C0", marker="o", markersize=4, label="Pareto front")
    for number, priced in enumerate(front[:LABELLED], 1):
        place = priced.memory_bytes / GIB, priced.seconds
        axes.annotate(str(number), place, xytext=(5, 4), textcoords="offset points", fontsize=8)
    words = [f"{number}  {layout_name(priced)}" for number, priced in enumerate(front[:LABELLED], 1)]
    axes.text(1.01, 1.0, "\n".join(words), transform=axes.transAxes, va="top", fontsize=8)
    if limit_bytes is not None and max(priced.memory_bytes for priced in layouts) > limit_bytes * NEAR:
        axes.axvline(limit_bytes / GIB, color="C3", linestyle="--", label=f"limit, {limit_bytes / GIB:.1f} GiB")
    axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=120, format=path.suffix.removeprefix("."))


def _points(layouts: Sequence[Priced]) -> tuple[list[float], list[float]]:
    return [priced.memory_bytes / GIB for priced in layouts], [priced.seconds for priced in layouts]
