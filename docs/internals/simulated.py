"""Record simulated tables in `simulated.json`, from which `docs/generate.py` writes docs/reference/error_rates.md.

`record` is the entry point that every `simulate_*.py` calls.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path

FILE = Path(__file__).parent / "simulated.json"


def record(tables: Mapping[str, Callable[[int], list[str]]], trials: int) -> None:
    """Parse the command line, simulate, and write each table to `simulated.json`.

    Args:
        tables: name -> function that takes the trials per cell and returns the table's rows.
        trials: default of `--trials`.
    """
    parser = argparse.ArgumentParser(description=f"Record simulated tables of the docs: {', '.join(tables)}.")
    parser.add_argument("--trials", type=int, default=trials, metavar="N", help=f"trials per cell ({trials})")
    parser.add_argument("--only", choices=tables, help="record only this table")
    chosen = parser.parse_args()
    for name in [chosen.only] if chosen.only else tables:
        rows = tables[name](chosen.trials)
        recorded = json.loads(FILE.read_text(encoding="utf-8")) | {name: rows}
        FILE.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print("run python docs/generate.py to write the tables into the docs")
