"""`python -m gpu_check [G1 ...]`: each check in a process of its own and in its time, one JSON and a table of all."""

import argparse
import contextlib
import importlib
import json
import os
import signal
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
from lightning_llm.precision.native.capability import DRIVER_FILES

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
    "G2": Check("native against emulated: codes, scales, products", "agreement", 95, MODEL),
    "G3": Check("GPU tests, and a step of every recipe", "steps", 80, MODEL),
    "G4": Check("speed, against compiled bf16 and a hand-written loop", "speed", 155, MODEL),
    "G5": Check("loss curves of every native recipe against bf16", "curves", 120, RUN),
}
TOTAL_SECONDS = 530
"""Of nine minutes, for the wheels and all checks together; ending a check takes a moment too."""


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
    wheels = wheel_folder(arguments.wheels, ROOT)
    if gpu and wheels is not None:
        site, said = install(wheels)
        machine["wheels"] = said
        paths = [str(site or ""), str(ROOT), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    names = list(dict.fromkeys(arguments.checks)) or list(CHECKS)
    seconds = budgets(names, time.monotonic() - began)
    folder, bad = arguments.out or RESULTS, False
    unwritten: dict[str, Taken] = {}
    for name in names:
        started = time.monotonic()
        rows = (
            run_apart(name, environment, seconds[name]) if gpu else [missing(name, "this machine has no NVIDIA driver")]
        )
        print(table(name, CHECKS[name].title, rows), flush=True)
        bad = bad or any(row.status in ("off", "error") for row in rows)
        unwritten[name] = Taken(rows, round(time.monotonic() - started, 1))
        machine["device"] = machine["device"] or device_of(rows)
        # After each check, so that none is lost with the next; the file is named by the device, which a check tells.
        if (gpu and machine["device"]) or ((gpu or arguments.out) and name == names[-1]):
            print(f"  written to {write(unwritten, machine, folder)}", flush=True)
            unwritten = {}
    return int(bad)


def budgets(names: list[str], spent: float) -> dict[str, float]:
    """Return the seconds each check may take: its own, or its share of what `spent` seconds of installing left."""
    wanted = sum(CHECKS[name].seconds for name in names)
    share = min(1.0, (TOTAL_SECONDS - spent) / wanted)
    return {name: share * CHECKS[name].seconds for name in names}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check", description="Checks that need a GPU; under nine minutes in all.")
    parser.add_argument("checks", nargs="*", metavar="G", help=f"some of {', '.join(CHECKS)}; all without any")
    parser.add_argument("--wheels", help="folder of wheels that this machine lacks (default: GPU_CHECK_WHEELS, carry/)")
    parser.add_argument("--out", type=Path, help="folder for the JSON (default: benchmarks/results, with a GPU)")
    parser.add_argument("--seconds", type=float, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # of a check's own process: where its rows go
    return parser


def run_apart(name: str, environment: dict[str, str], seconds: float | None = None) -> list[Row]:
    """Run one check in a process of its own, which a crash or the clock may end; return the rows it had by then.

    It leads a process group that is ended with it: whatever a check started would keep the GPU from the next one.
    """
    seconds = CHECKS[name].seconds if seconds is None else seconds
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.jsonl")
        # The process plans for less, so that it ends by itself.
        command = [sys.executable, "-m", "gpu_check", name, "--rows", str(rows), "--seconds", str(0.9 * seconds)]
        with Path(folder, "stderr").open("w+", errors="replace") as said:  # no pipe: a grandchild would hold it open
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
                start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                return [*read(rows), Row("the rest", None, "", "not available", f"stopped after {seconds:g} s")]
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.returncode:
                said.seek(0)
                last = (said.read().strip().splitlines() or ["without a word"])[-1]
                return [
                    *read(rows),
                    Row("the rest", None, "", "error", f"exit code {process.returncode}: {last[:300]}"),
                ]
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


class Taken(NamedTuple):
    """A check as it was made."""

    rows: list[Row]
    seconds: float


def device_of(rows: list[Row]) -> str | None:
    """Return the GPU's name, which a check tells in its first row; None where it did not get that far."""
    return next((row.note.split(",")[0] for row in rows if row.what == "device"), None)


def write(taken: dict[str, Taken], machine: dict[str, Any], folder: Path) -> Path:
    """Write checks to `folder`/DATE-GPU.json, in the place of those of the same names; return the file."""
    name = "-".join((machine["device"] or "no GPU").lower().split())
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{date.today()}-{name}.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"checks": {}}
    made = {
        check: {"git": _commit(), "seconds": seconds, "rows": [as_data(row) for row in rows]}
        for check, (rows, seconds) in taken.items()
    }
    checks = dict(sorted({**before["checks"], **made}.items()))
    half = file.with_suffix(".part")  # what was measured before is there until all of it is written again
    half.write_text(json.dumps({"machine": machine, "checks": checks}, indent=1, allow_nan=False) + "\n", "utf-8")
    half.replace(file)
    return file


def _machine() -> dict[str, Any]:
    return {"device": None, "python": sys.version.split()[0], "cores": os.cpu_count()}


def _commit() -> str | None:
    git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return git.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
