"""`python -m benchmarks [NAME ...]`: run the benchmarks, print a table, keep it in benchmarks/results/."""

import json
import platform
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

import torch

from benchmarks import (
    checkpoint,
    checkpoint_stall,
    health,
    loader,
    machine,
    parallel,
    peers,
    plan_memory,
    plan_time,
    planner,
    precision,
    roofline,
    startup,
    step_law,
    tokenise,
    tracking,
    trainer_overhead,
    weight_casts,
)
from benchmarks.rotation import InputError, Row
from benchmarks.shape import LARGE, MIDDLE, SMALL

BENCHMARKS: dict[str, Callable[[], Iterator[Row]]] = {
    "startup": startup.measure,
    "loader": loader.measure,
    "tokenise": tokenise.measure,
    "trainer_overhead": trainer_overhead.measure,
    "tracking": tracking.measure,
    "parallel": parallel.measure,
    "peers": partial(peers.measure, MIDDLE),
    "peers_2m": partial(peers.measure, SMALL),
    "peers_60m": partial(peers.measure, LARGE),
    "peers_1024": partial(peers.measure, replace(MIDDLE, length=1024, batch=2)),
    "plan_memory": plan_memory.measure,
    "roofline": partial(roofline.measure, MIDDLE),
    "precision": precision.measure,
    "weight_casts": weight_casts.measure,
    "health": health.measure,
    "checkpoint": checkpoint.measure,
    "checkpoint_stall": checkpoint_stall.measure,
    "plan_time": plan_time.measure,
    "planner": planner.measure,
    "machine": machine.measure,
    "step_law": step_law.measure,
}
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Run the benchmarks named on the command line, or all."""
    parser = ArgumentParser(prog="python -m benchmarks", description="Run the benchmarks named, or all.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--csv", type=Path, metavar="FILE", help="step_law: the released runs")
    given = parser.parse_args()
    chosen = given.names or list(BENCHMARKS)
    unknown = set(chosen) - BENCHMARKS.keys()
    if unknown:
        print(f"there is no benchmark {sorted(unknown)}; known: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    if given.csv is not None and not given.csv.is_file():
        print(f"--csv: there is no file {given.csv}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    for name in chosen:
        measure = partial(step_law.measure, given.csv) if name == "step_law" else BENCHMARKS[name]
        try:
            for what, value, target in measure():
                rows.append((what, value, target))
                number = "-" if value is None else f"{value:.4g}"
                print(f"{what:<72}{number:>12}   {target}", flush=True)
        except InputError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
    RESULTS.mkdir(exist_ok=True)
    machine = (
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    file = RESULTS / f"{date.today()}-{device.replace(' ', '-').lower()}-{'-'.join(chosen)}.json"
    file.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    print(f"\n{machine}; written to {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
