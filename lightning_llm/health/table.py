"""What a check found, as tables for a terminal."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from lightning_llm.base.terminal import new_console
from lightning_llm.health.report import HealthReport

MOST_ROWS = 16
"""Of ranks: above, the matrix of pairs is left to its file."""
WIDEST = 1000


def print_report(report: HealthReport) -> None:
    """Print all tables that have rows, a line between them."""
    tables = [each for each in (_ranks(report), _collectives(report), _links(report), _disks(report)) if each.row_count]
    width = max(new_console(width=WIDEST).measure(each).maximum for each in tables)
    console = new_console(
        width=max(width, new_console().width)
    )  # nothing is cut off where no terminal says how wide it is
    for table in tables:
        console.print(table)
        console.print()


def verdict_lines(report: HealthReport, failing: Sequence[str]) -> Iterator[str]:
    """Yield a line for each number that is wrong, slow rank and figure below its threshold; or that all is well."""
    faults = [("wrong", each) for each in report.wrong] + [("slow", each) for each in report.slow_lines()]
    faults += [("below", each) for each in failing]
    yield from (f"{word:<11}{text}" for word, text in faults or [("healthy", "values are right, and no rank is slow")])


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    return table


def _ranks(report: HealthReport) -> Table:
    formats = list(report.ranks[0].tflops)
    memory = "copy GB/s", "free GiB", "all GiB", "verified GiB"
    table = _table("rank", *(f"{name} TFLOP/s" for name in formats), *memory, "device")
    for each in report.ranks:
        speeds = [_of_peak(each.tflops[name], each.peaks[name]) for name in formats if name in each.tflops]
        sizes = [f"{size / 2**30:.2f}" for size in (each.free_bytes, each.total_bytes, each.verified_bytes)]
        table.add_row(f"{each.rank} {each.host}", *speeds, f"{each.copy_gb_per_second:.1f}", *sizes, each.device)
    return table


def _of_peak(tflops: float, peak: float | None) -> str:
    return f"{tflops:.3g}" if peak is None else f"{tflops:.3g} ({tflops / peak:.0%})"


def _collectives(report: HealthReport) -> Table:
    table = _table("collective", "bytes", "microseconds", "algorithm GB/s", "bus GB/s", "calls")
    for each in report.collectives:
        speeds = [f"{speed:.3g}" for speed in (each.algorithm_gb_per_second, each.bus_gb_per_second)]
        row = f"{each.size_bytes:,}", f"{each.seconds * 1e6:.1f}", *speeds, str(each.times)
        table.add_row(each.collective, *row)
    return table


def _links(report: HealthReport) -> Table:
    links = report.links
    if links is None or len(report.ranks) > MOST_ROWS:
        return _table("p2p")
    table = _table(f"p2p GB/s, {links.size_bytes:,} bytes", *(f"to {each.rank}" for each in report.ranks))
    for row, each in zip(links.gb_per_second, report.ranks, strict=True):
        rates = ["-" if to == each.rank else f"{rate:.3g}" for to, rate in enumerate(row)]
        table.add_row(f"from {each.rank} {each.host}", *rates)
    return table


def _disks(report: HealthReport) -> Table:
    table = _table("disk", "write GB/s", "read GB/s", "fsync ms", "free GiB", "folder")
    for host, disk in report.disks.items():
        speeds = f"{disk.write_gb_per_second:.3g}", f"{disk.read_gb_per_second:.3g}", f"{disk.fsync_seconds * 1e3:.3g}"
        table.add_row(host, *speeds, f"{disk.free_bytes / 2**30:.1f}", disk.folder)
    return table
