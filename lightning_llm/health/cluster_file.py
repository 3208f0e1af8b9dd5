"""What a check has measured, as files that `plan` reads: `cluster=measured`, and the matrix for `--links`."""

from collections.abc import Callable
from pathlib import Path
from statistics import median

import yaml

from lightning_llm.base.hardware import planned_hardware
from lightning_llm.config.commands import command
from lightning_llm.health.report import HealthReport
from lightning_llm.plan.cluster import write_cluster

LINKS_FILE = "links.yaml"
HOW = "These machines by the clock, by `lightning-llm health`."


def write_measured(report: HealthReport, devices_per_node: int, folder: Path) -> list[str]:
    """Write `folder`/links.yaml, a row for each device, and `folder`/cluster/measured.yaml; return what to say of it.

    A collective's start is the fastest of the smallest ones; a hop between machines takes what a message between them
    takes longer than one within.
    """
    links = report.links
    if links is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    matrix = {
        "names": [f"{each.host} rank {each.rank}" for each in report.ranks],
        "gb_per_second": [[float(f"{rate:.4g}") for rate in row] for row in links.gb_per_second],
    }
    text = yaml.safe_dump(matrix, sort_keys=False, default_flow_style=None)
    (folder / LINKS_FILE).write_text(f"# {HOW}\n{text}", encoding="utf-8")
    lines = [f"written    {folder / LINKS_FILE}, for plan --search --planner pipette --links FILE"]
    first = report.ranks[0]
    hardware = "cpu" if first.device_type == "cpu" else planned_hardware(first.device)
    if hardware is None or {each.device for each in report.ranks} != {first.device}:
        return [*lines, f"note       no cluster file: hardware= has no {first.device}, or ranks have unlike devices"]
    pairs = [(a.rank, b.rank) for a in report.ranks for b in report.ranks if a.rank != b.rank]
    within = [(a, b) for a, b in pairs if report.ranks[a].host == report.ranks[b].host] or pairs
    between = [(a, b) for a, b in pairs if report.ranks[a].host != report.ranks[b].host] or within

    def middle(matrix: list[list[float]], pairs: list[tuple[int, int]]) -> float:
        return median(matrix[a][b] for a, b in pairs)

    hop = max(0.0, middle(links.latency_seconds, between) - middle(links.latency_seconds, within))
    values = {
        "hardware": hardware,
        "devices_per_node": devices_per_node,
        "memory_gb_per_second": _middle(report, lambda each: each.copy_gb_per_second),
        "within_node": {"gb_per_second": middle(links.gb_per_second, within), "latency_microseconds": 0.0},
        "between_nodes": {"gb_per_second": middle(links.gb_per_second, between), "latency_microseconds": hop * 1e6},
        "start_microseconds": min(each.seconds for each in report.collectives) * 1e6,
        "overlap": hardware != "cpu",
        "peak_tflops": {name: _middle(report, lambda each, name=name: each.tflops[name]) for name in first.tflops},
    }
    file = write_cluster(folder, values, HOW)
    return [*lines, f"written    {file}, for {command('plan', '--config-dir', str(folder), 'cluster=measured')}"]


def _middle(report: HealthReport, figure: Callable[..., float]) -> float:
    """Return the median over ranks."""
    return median(map(figure, report.ranks))
