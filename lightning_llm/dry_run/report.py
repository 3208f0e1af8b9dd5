"""What a dry run counted, as lines for a terminal."""

from typing import Any

from lightning_llm.plan.text.describe import memory_text, traffic_text


def render_counts(facts: dict[str, Any]) -> str:
    """Return the `dry_run` of `plan_facts` as lines, with where formulas and counts differ."""
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
