"""Are these two Megatron logs different? Prints other arguments, the first other loss, and the verdict.

    python examples/megatron_logs.py old.log new.log
    python examples/megatron_logs.py old-seed1.log new-seed1.log old-seed2.log new-seed2.log   # decides more

Any other log that `compare --from` reads works, too. A single pair does not decide.
"""

import argparse

import numpy as np

from lightning_llm.__main__ import main
from lightning_llm.compare.curves.readers import read_table
from lightning_llm.compare.curves.table import LoggedTable


def differences(old: LoggedTable, new: LoggedTable) -> list[str]:
    """Return a line per setting that differs, and the first step at which a column of losses differs."""
    settings = sorted({*old.settings, *new.settings})
    lines = [
        f"{name}: {old.settings.get(name, 'not given')} -> {new.settings.get(name, 'not given')}"
        for name in settings
        if old.settings.get(name) != new.settings.get(name)
    ]
    _, here, there = np.intersect1d(old.columns["step"], new.columns["step"], return_indices=True)
    for name in old.columns:
        if "loss" in name and "scale" not in name and name in new.columns:
            before, after = old.columns[name][here], new.columns[name][there]
            other = np.flatnonzero((before != after) & ~(np.isnan(before) & np.isnan(after)))
            if other.size:
                at = other[0]
                step = int(old.columns["step"][here][at])
                lines.append(f"{name}: equal until step {step}, then {before[at]:g} and {after[at]:g}")
            else:
                lines.append(f"{name}: equal at all {here.size} common steps")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", nargs="+", help="old and new logs in turn, one pair per seed")
    logs = parser.parse_args().logs
    if len(logs) % 2:
        parser.error(f"{len(logs)} logs: give pairs, an old and a new log of each seed")
    words = []
    for pair, (old, new) in enumerate(zip(logs[::2], logs[1::2], strict=True)):
        tables = [read_table(old), read_table(new)]
        print("\n".join([f"{old} and {new}:", *(f"  {line}" for line in differences(*tables))]))
        stated = [str(table.settings.get("seed", pair)) for table in tables]
        words += [f"old/{stated[0]}={old}", f"new/{stated[1]}={new}"]
    raise SystemExit(main(["compare", "--from", *words, "--baseline", "old"]))
