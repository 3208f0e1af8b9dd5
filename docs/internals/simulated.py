"""Write the simulated tables of the docs; the entry point that every `simulate_*.py` calls.

A table is between `<!-- simulated: NAME -->` and `<!-- /simulated -->`.
"""

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]


def fill_in(tables: Mapping[str, Callable[[int], list[str]]], trials: int) -> None:
    """Parse the command line, simulate, and write each table into the page of docs/ that has its markers.

    Args:
        tables: name -> function that takes the trials per cell and returns the table's rows.
        trials: default of `--trials`.
    """
    parser = argparse.ArgumentParser(description=f"Write simulated tables of the docs: {', '.join(tables)}.")
    parser.add_argument("--trials", type=int, default=trials, metavar="N", help=f"trials per cell ({trials})")
    parser.add_argument("--only", choices=tables, help="write only this table")
    asked = parser.parse_args()
    for name in [asked.only] if asked.only else tables:
        body = "\n".join(tables[name](asked.trials))
        section = re.compile(rf"(<!-- simulated: {name} -->\n).*?(<!-- /simulated -->)", re.DOTALL)
        for page in DOCS.rglob("*.md"):
            text = page.read_text(encoding="utf-8")
            new = section.sub(lambda found, body=body: f"{found[1]}\n{body}\n\n{found[2]}", text)
            if new != text:
                page.write_text(new, encoding="utf-8")
