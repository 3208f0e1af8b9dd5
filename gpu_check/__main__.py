"""`python -m gpu_check [G1 ...]`: each check in a process of its own and in its time, one JSON and a table of all."""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from gpu_check.rows import Clock, Row, append, as_data, guarded, missing, read, table
from gpu_check.wheels import install, lacking, wheel_folder
from lightning_llm.precision.capability import DRIVER_FILES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


class Check(NamedTuple):
    """One of G1 to G5: what it does, the module whose `check(clock)` yields its rows, its seconds, what it imports."""

    title: str
    module: str
    seconds: int
    needs: tuple[str, ...]


MODEL = ("torch", "pydantic", "yaml")
RUN = (*MODEL, "lightning", "hydra", "omegaconf", "platformdirs", "safetensors", "psutil", "rich", "matplotlib")
CHECKS = {
    "G1": Check("Transformer Engine loads, and agrees with a product in fp32", "library", 60, MODEL),
    "G2": Check("native against emulated: codes, scales, products", "agreement", 75, MODEL),
    "G3": Check("GPU tests, and a step of every recipe", "steps", 100, MODEL),
    "G4": Check("speed, against compiled bf16 and a hand-written loop", "speed", 155, MODEL),
    "G5": Check("loss curves of every native recipe against bf16", "curves", 120, RUN),
}
"""510 seconds in all, which leaves half a minute of nine for the wheels."""


def main(argv: list[str] | None = None) -> int:
    """Run the checks named, or all; return 0, 1 where something is off or broke, 2 for a name that is none."""
    arguments = _parser().parse_args(argv)
    if unknown := [name for name in arguments.checks if name not in CHECKS]:
        print(f"there is no check {', '.join(unknown)}; known: {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    if arguments.rows:
        return run_here(arguments.checks[0], arguments.seconds, arguments.rows)
    began, machine, environment = time.monotonic(), _machine(), dict(os.environ)
    gpu = any(Path(file).exists() for file in DRIVER_FILES)
    folder = wheel_folder(arguments.wheels, ROOT)
    if gpu and folder is not None:
        site, said = install(folder)
        machine["wheels"] = said
        paths = [str(site or ""), str(ROOT), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    found: dict[str, list[Row]] = {}
    for name in arguments.checks or CHECKS:
        found[name] = run_apart(name, environment) if gpu else [missing(name, "this machine has no NVIDIA driver")]
        print(table(name, CHECKS[name].title, found[name]), flush=True)
    machine["seconds"] = round(time.monotonic() - began, 1)
    if gpu or arguments.out:
        print(f"\nwritten to {write(found, machine, arguments.out or RESULTS)}")
    return int(any(row.status in ("off", "error") for rows in found.values() for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check", description="Checks that need a GPU; under nine minutes in all.")
    parser.add_argument("checks", nargs="*", metavar="G", help=f"some of {', '.join(CHECKS)}; all without any")
    parser.add_argument("--wheels", help="folder of wheels that this machine lacks (default: GPU_CHECK_WHEELS, carry/)")
    parser.add_argument("--out", type=Path, help="folder for the JSON (default: benchmarks/results, with a GPU)")
    parser.add_argument("--seconds", type=float, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # of a check's own process: where its rows go
    return parser


def run_apart(name: str, environment: dict[str, str], seconds: float | None = None) -> list[Row]:
    """Run one check in a process of its own, which a crash or the clock may end; return the rows it had by then."""
    seconds = CHECKS[name].seconds if seconds is None else seconds
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.jsonl")
        # The process plans for less, so that it ends by itself.
        command = [sys.executable, "-m", "gpu_check", name, "--rows", str(rows), "--seconds", str(0.9 * seconds)]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, timeout=seconds, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            return [*read(rows), Row("the rest", None, "", "not available", f"stopped after {seconds:g} s")]
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["without a word"])[-1]
            return [*read(rows), Row("the rest", None, "", "error", f"exit code {done.returncode}: {last[:300]}")]
        return read(rows)


def run_here(name: str, seconds: float, rows: Path) -> int:
    """Run one check in this process, writing its rows."""
    check = CHECKS[name]
    if gone := lacking(check.needs):
        text = f"{', '.join(gone)} not installed: put the wheels beside the others (docs/native.md)"
        append(rows, missing(check.title, text))
        return 0
    import torch

    if not torch.cuda.is_available():
        append(rows, missing(check.title, f"torch {torch.__version__} finds no CUDA device"))
        return 0
    properties = torch.cuda.get_device_properties(0)
    text = f"{properties.name}, {properties.major}.{properties.minor}, torch {torch.__version__}"
    append(rows, Row("device", None, "", "measured", text))
    clock = Clock(seconds)
    for row in guarded(check.title, rows_of, check, clock):
        append(rows, row)
    return 0


def rows_of(check: Check, clock: Clock) -> Iterator[Row]:
    """Import the check and yield its rows."""
    yield from importlib.import_module(f"gpu_check.{check.module}").check(clock)


def write(found: dict[str, list[Row]], machine: dict[str, Any], folder: Path) -> Path:
    """Write everything to `folder`/DATE-GPU.json; return the file."""
    devices = [row.note.split(",")[0] for rows in found.values() for row in rows if row.what == "device"]
    name = "-".join((devices or ["no GPU"])[0].lower().split())
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{date.today()}-{name}.json"
    file.write_text(json.dumps(as_data(found, {**machine, "device": devices[0] if devices else None}), indent=1) + "\n")
    return file


def _machine() -> dict[str, Any]:
    git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {"python": sys.version.split()[0], "cores": os.cpu_count(), "git": git.stdout.strip() or None}


if __name__ == "__main__":
    sys.exit(main())
