"""`python -m benchmarks [--cpu-time] [--readme] [NAME ...]`: run benchmarks, print rows, keep them in results/."""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks import (
    casts,
    checkpoint,
    checkpoint_stall,
    experts,
    health,
    loader,
    machine,
    parallel,
    peers,
    plan_memory,
    plan_time,
    planner,
    precision,
    readme,
    records,
    results,
    roofline,
    rotation,
    search,
    startup,
    step_law,
    tokenise,
    tracking,
    trainer_overhead,
    weight_casts,
)
from benchmarks.rotation import Row
from benchmarks.shape import LARGE, LONG, MIDDLE, SMALL

BENCHMARKS: dict[str, Callable[[], Iterator[Row]]] = {
    "startup": startup.measure,
    "startup_casts": startup.measure_casts,
    "loader": loader.measure,
    "tokenise": tokenise.measure,
    "trainer_overhead": trainer_overhead.measure,
    "tracking": tracking.measure,
    "records": records.measure,
    "parallel": parallel.measure,
    "peers": partial(peers.measure, MIDDLE),
    "peers_2m": partial(peers.measure, SMALL),
    "peers_60m": partial(peers.measure, LARGE),
    "peers_1024": partial(peers.measure, LONG),
    "plan_memory": plan_memory.measure,
    "roofline": partial(roofline.measure, MIDDLE),
    "roofline_60m": partial(roofline.measure, LARGE),
    "roofline_1024": partial(roofline.measure, LONG),
    "precision": precision.measure,
    "casts": casts.measure,
    "experts": experts.measure,
    "weight_casts": weight_casts.measure,
    "health": health.measure,
    "checkpoint": checkpoint.measure,
    "checkpoint_stall": checkpoint_stall.measure,
    "plan_time": plan_time.measure,
    "planner": planner.measure,
    "search": search.measure,
    "machine": machine.measure,
    "step_law": step_law.measure,
}


def main() -> int:
    """Run the benchmarks named on the command line, or all; `--readme` alone runs none, and writes README.md's results.

    `--cpu-time`: contenders are judged by the CPU time of one thread.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; by default all")
    parser.add_argument("--cpu-time", action="store_true", help="judge by the CPU time of one thread")
    parser.add_argument("--readme", action="store_true", help="put the newest results of all into README.md")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="step_law: the released runs")
    chosen = parser.parse_args()
    unknown = set(chosen.names) - BENCHMARKS.keys()
    if unknown:
        print(f"there is no benchmark {sorted(unknown)}; known: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    if chosen.csv is not None and not chosen.csv.is_file():
        print(f"--csv: there is no file {chosen.csv}", file=sys.stderr)
        return 2
    if chosen.cpu_time:
        rotation.judge_by_cpu_time()
    for name in chosen.names or ([] if chosen.readme else BENCHMARKS):
        try:
            _run(name, partial(step_law.measure, chosen.csv) if name == "step_law" else BENCHMARKS[name])
        except rotation.InputError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
    if chosen.readme:
        readme.write(BENCHMARKS)
        print(f"written: {readme.README}")
    return 0


def _run(name: str, measure: Callable[[], Iterator[Row]]) -> None:
    rows: list[Row] = []
    beside = results.load()
    for what, value, target in measure():
        rows.append((what, value, target))
        number = "-" if value is None else f"{value:.4g}"
        print(f"{what:<72}{number:>12}   {target}", flush=True)
    result = results.here(name, rows, beside)
    print(f"\n{result.machine}, load {beside:.1f} as it began; written to {results.write(result)}")


if __name__ == "__main__":
    sys.exit(main())
