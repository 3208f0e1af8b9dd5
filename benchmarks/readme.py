"""Write the results in README.md from the newest file of each benchmark, with the reasons of missed targets."""

import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import wrap

from benchmarks import results
from benchmarks.missed import REASONS
from benchmarks.results import Result
from benchmarks.rotation import Row

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- generated: results -->", "<!-- /generated -->"
RATE = re.compile(r"(?P<who>.+?)(?P<own> in its process)?, (?P<how>(bf16|fp32)(, (eager|compiled))?), tokens/s")
TARGET = re.compile(r"(?P<sign><=|>=|<|>|below) ?(?P<limit>[\d.]+)")
COMPARED = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, "below": operator.lt, ">": operator.gt}
DIGITS, WIDTH = 4, 140
PEERS = {
    "peers_2m": "2M, 8 x 256 tokens",
    "peers": "7M, 8 x 256",
    "peers_1024": "7M, 2 x 1,024",
    "peers_60m": "62M, 2 x 256",
}
GLANCE = (
    "Tokens/s of `train`, as a user starts it, over the fastest of the peers' loops and Trainers (targets: 1.2 eager, "
    "1.15 compiled), and peak bytes of tensors over the leanest peer's (target: at most 1). Part of this is memory "
    "that a step frees and `train` keeps (docs/reference/run_folder.md), which the peers do not do. The load of the "
    "machine at each start is shown below."
)
AT_A_GLANCE = {
    "train over the fastest of all, {}": "{}",
    "train over the fastest of all, {}, compiled": "{}, compiled",
    "peak bytes of ours over the leanest's, {}, eager": "{}, peak bytes",
}
"""Rows of `peers*` and their titles in the first table; {} is the dtype."""
NO_REASON = "no reason is given"


def is_missed(row: Row) -> bool:
    """Return whether the row has a numeric target and missed it."""
    _, value, target = row
    wanted = TARGET.fullmatch(target)
    if value is None or wanted is None:
        return False
    limit = float(wanted["limit"])
    return not COMPARED[wanted["sign"]](value, limit)


def write(names: Iterable[str], readme: Path = README, folder: Path = results.FOLDER) -> None:
    """Put the newest results of the benchmarks of these names between the marks in `readme`."""
    text = readme.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n\n{rendered(names, folder)}\n{END}{after}")


def rendered(names: Iterable[str], folder: Path = results.FOLDER) -> str:
    """Return the results as Markdown, without benchmarks that have not run."""
    found = [result for name in names if (result := results.newest(name, folder)) is not None]
    return "\n".join([*_glance(found), *(line for result in found for line in _section(result))])


def _glance(found: Sequence[Result]) -> Iterator[str]:
    """Yield a table of `train` over the fastest peer at every measured shape."""
    columns = {row.format(dtype): name.format(dtype) for dtype in ("bf16", "fp32") for row, name in AT_A_GLANCE.items()}
    lines = []
    for result in (each for name in PEERS for each in found if each.name == name):
        rows = {row[0]: row for row in result.rows}
        if columns.keys() <= rows.keys():
            lines.append(f"| {PEERS[result.name]} | {' | '.join(_number(rows[column]) for column in columns)} |")
    if lines:
        yield from wrap(GLANCE, WIDTH, break_long_words=False, break_on_hyphens=False)
        yield ""
        yield f"| | {' | '.join(columns.values())} |"
        yield "|---" * (len(columns) + 1) + "|"
        yield from lines
        yield ""


def _section(result: Result) -> Iterator[str]:
    yield f"### `{result.name}`"
    yield ""
    facts = [result.day, f"`{result.command}`", result.machine]
    if result.clock is not None:
        facts.append("CPU time" if result.clock == "cpu" else "time by the clock")
    if result.versions:
        facts.append(", ".join(f"{name} {version}" for name, version in result.versions.items()))
    facts.append(f"[all rows](results/{result.file})")
    if result.beside is not None:
        facts.append(f"{result.beside:g} processes wanted a core as it began")
    yield from wrap("; ".join(facts) + ".", WIDTH, break_long_words=False, break_on_hyphens=False)
    yield ""
    yield from _rates(result)
    shown = _shown(result)
    if shown:
        yield "| | measured | target |"
        yield "|---|---|---|"
        yield from (_line(row) for row in shown)
        yield ""
    reasons = dict.fromkeys(_reason(result.name, row) for row in shown if is_missed(row))
    for reason in reasons:
        yield from wrap(f"- {reason}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    if reasons:
        yield ""


def _shown(result: Result) -> list[Row]:
    """Return the rows with a numeric target, with their titles; if there are none, the medians or all rows."""
    shown: list[Row] = []
    title = None
    for row in result.rows:
        if RATE.fullmatch(row[0]):
            continue
        if not row[0].startswith(" "):
            title = row
        if TARGET.fullmatch(row[2]) or (title in shown and row[0].startswith(" ")):
            if title not in shown and title is not None and row is not title:
                shown.append(title)
            shown.append(row)
    return shown or [row for row in result.rows if "median" in row[0]] or list(result.rows)


def _line(row: Row) -> str:
    what, _, target = row
    return f"| {what.strip()} | {_number(row)} | {target} |"


def _number(row: Row) -> str:
    value = row[1]
    number = "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.{DIGITS}g}"
    return f"**{number}**" if is_missed(row) else number


def _rates(result: Result) -> Iterator[str]:
    """Yield the tokens per second of all contenders side by side."""
    found: dict[str, dict[str, float]] = {}
    for what, value, _ in result.rows:
        if value is not None and (match := RATE.fullmatch(what)):
            own = match["own"] or match["who"] in ("train", "transformers' Trainer")
            found.setdefault(match["how"] + (", a process each" if own else ""), {})[match["who"]] = value
    for how, rates in found.items():
        yield f"| tokens/s, {how} | {' | '.join(rates)} |"
        yield "|---" * (len(rates) + 1) + "|"
        yield f"| | {' | '.join(f'{value:,.0f}' for value in rates.values())} |"
        yield ""


def _reason(name: str, row: Row) -> str:
    for benchmark, rows, reason in REASONS:
        if fnmatchcase(name, benchmark) and fnmatchcase(row[0].strip(), rows):
            return reason
    return f"`{row[0].strip()}`: {NO_REASON}."
