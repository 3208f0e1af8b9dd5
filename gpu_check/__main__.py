"""`python -m gpu_check [CHECK ...]`: run the checks in turn, each in its own process with its share of eleven minutes.

Each row is written to disk as soon as it is measured; another call measures the missing rows."""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from gpu_check.check_process import ROOT, run_in_process
from gpu_check.checks import CHECKS, TOTAL_SECONDS, closing, seconds_for
from gpu_check.journal import Clock, Journal, journal_for, missing, table
from gpu_check.machine import install, machine_here, wheel_folder
from lightning_llm.base.hardware import has_nvidia_driver

RESULTS = ROOT / "benchmarks" / "results"


def main(argv: list[str] | None = None) -> int:
    """Run the named checks, or all; return 0, 1 if a row is off or failed, 2 for an unknown check."""
    arguments = _parser().parse_args(argv)
    if unknown := [name for name in arguments.checks if name not in CHECKS]:
        print(f"unknown check {', '.join(unknown)}. Use one of {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    names = [name for name in CHECKS if not arguments.checks or name in arguments.checks]
    clock, environment = Clock(arguments.seconds), dict(os.environ)
    folder = wheel_folder(arguments.wheels, ROOT)
    if folder is not None and has_nvidia_driver():
        _install(folder, environment)
    machine = machine_here(environment)
    if isinstance(machine, str):
        for name in names:
            print(table(name, CHECKS[name].title, [missing(name, machine)]))
        return 0
    journal = journal_for(machine, arguments.out or RESULTS, RESULTS, _commit())
    print(f"rows go to {journal.file}", flush=True)
    before = signal.signal(signal.SIGTERM, _stop)  # ends the processes that a check started, too
    try:
        return run(names, journal, environment, clock, arguments.again)
    finally:
        signal.signal(signal.SIGTERM, before)


def run(names: list[str], journal: Journal, environment: dict[str, str], clock: Clock, again: bool) -> int:
    """Run the checks in turn and print the rows of each, then the targets; return 0 or 1 as `main` does."""
    for name in names:
        run_in_process(name, CHECKS[name], journal, environment, seconds_for(name, names, clock.left), again)
        rows = [row for each in journal.results(name).values() for row in each]
        print(table(name, CHECKS[name].title, rows), flush=True)
    print("\n".join(closing(journal, tuple(names))), flush=True)
    found = [row for name in names for each in journal.results(name).values() for row in each]
    return int(any(row.status in ("off", "error") for row in found))


def _install(folder: Path, environment: dict[str, str]) -> None:
    site, said = install(folder)
    print(said, flush=True)
    paths = [str(site or ""), str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def _stop(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check", description="Checks that need a GPU; under eleven minutes.")
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"some of {', '.join(CHECKS)}; all without any")
    parser.add_argument("--again", action="store_true", help="measure items again that already have rows")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for all of them (default: %(default)g)")
    parser.add_argument("--wheels", help="folder of wheels that this machine lacks (default: GPU_CHECK_WHEELS, carry/)")
    parser.add_argument("--out", type=Path, help="folder for the rows (default: benchmarks/results)")
    return parser


def _commit() -> str | None:
    """Return the commit under test: $COMMIT (for a copy without history), else the checkout's, or None."""
    if named := os.environ.get("COMMIT"):
        return named
    try:
        git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return None
    return git.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
