"""The simulated tables of docs/*.md: what each `simulate_*.py` does when it is run.

A table stands between `<!-- simulated: NAME -->` and `<!-- /simulated -->`.
"""

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parent


def fill_in(document: str, tables: Mapping[str, Callable[[int], list[str]]], trials: int) -> None:
    """Simulate as the command line says, and write every table into a document of this folder.

    Args:
        document: the file's name.
        tables: {name: what returns a table's rows, of so many trials per cell}.
        trials: per cell, unless `--trials` says otherwise.
    """
    parser = argparse.ArgumentParser(description=f"Write the simulated tables of docs/{document}: {', '.join(tables)}.")
    parser.add_argument("--trials", type=int, default=trials, metavar="N", help=f"trials per cell ({trials})")
    parser.add_argument("--only", choices=tables, help="this table alone")
    asked = parser.parse_args()
    for name in [asked.only] if asked.only else tables:
        body = "\n".join(tables[name](asked.trials))
        section = re.compile(rf"(<!-- simulated: {name} -->\n).*?(<!-- /simulated -->)", re.DOTALL)
        text = (DOCS / document).read_text(encoding="utf-8")
        (DOCS / document).write_text(
            section.sub(lambda found, body=body: f"{found[1]}\n{body}\n\n{found[2]}", text), encoding="utf-8"
        )
