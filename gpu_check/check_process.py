"""One check in a separate process: the request, the measurement of its items, and its end by the parent process."""

import contextlib
import ctypes
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_check.checks import Call, Check
from gpu_check.journal import Clock, Item, Journal, Row, cut_off, guarded, missing
from gpu_check.machine import Machine, lacking

ROOT = Path(__file__).resolve().parents[1]
WHOLE = "the check"
"""Name used when the items of a check are unknown because it was not started."""
SPOILT = re.compile(r"CUDA error|cudaError|CUBLAS_STATUS|device-side assert")
"""Errors after which the device cannot be used any more in the same process."""
SPOILT_CODE = 3
PR_SET_PDEATHSIG = 1
OWN_SHARE = 0.93
"""Share of its time that a check uses for planning, so that it ends by itself and reports skipped items."""


def run_in_process(
    name: str, check: Check, journal: Journal, environment: dict[str, str], seconds: float, again: bool = False
) -> None:
    """Measure one check in a process that may crash or time out; its rows are in the journal afterwards.

    If the process ends before it has finished, because an item broke the device or the process, another process
    continues after that item.
    """
    clock, lines = Clock(seconds), journal.lines
    while True:
        plans, tried = journal.plans(name), journal.begun(name, lines)
        request = {
            "name": name, "check": check._asdict(), "file": str(journal.file), "machine": asdict(journal.machine),
            "commit": journal.commit, "seconds": OWN_SHARE * clock.left, "again": again, "tried": sorted(tried),
        }  # fmt: skip
        ended = _run_once(request, environment, clock.left, journal.file.with_suffix(".log"))
        if ended is None:
            return
        if journal.plans(name) == plans:
            journal.leave_out(name, WHOLE, _named(ended, WHOLE))
            return
        for item, begun in journal.unfinished(name).items():
            if begun:
                journal.add(name, item, _named(ended, item))
                journal.end(name, item, 0)
        if ended.status == "cut off" or journal.begun(name, lines) == tried:
            for item in journal.unfinished(name):
                journal.leave_out(name, item, cut_off(item, f"not begun: {ended.note}"))
            return


def _run_once(request: dict[str, Any], environment: dict[str, str], seconds: float, log: Path) -> Row | None:
    """Run a process to its end or its timeout; return None if it finished, else a row that describes the end.

    Its stderr (tracebacks above all) is appended to `log`.

    It leads a process group that is killed with it, because remaining processes would occupy the GPU.
    """
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch,
        log.open("a+", encoding="utf-8", errors="replace") as said,  # not a pipe, which a grandchild would keep open
    ):
        before = said.seek(0, os.SEEK_END)
        command = [sys.executable, "-m", "gpu_check.check_process", json.dumps(request | {"scratch": scratch})]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return cut_off("", f"stopped after {seconds:.0f} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if not process.returncode:
            return None
        said.seek(before)
        last = (said.read().strip().splitlines() or ["without a word"])[-1]
        return Row("", None, "", "error", f"exit code {process.returncode}: {last[:300]}")


def _named(row: Row, what: str) -> Row:
    return Row(what, row.value, row.unit, row.status, row.note)


def measure(
    name: str, items: list[Item], journal: Journal, clock: Clock, again: bool = False, tried: Collection[str] = ()
) -> bool:
    """Measure the items without rows, or all with `again`; items that did not finish before come last.

    Each row is written as soon as it is measured. Items without enough time left are reported as cut off. `tried`:
    items that this call has already started. Returns False if this process cannot use the device any more.
    """
    before = journal.attempts(name)
    tries = {item.name: [each for each in before.get(item.name, []) if each.begun] for item in items}
    open_items = [item for item in items if again or not any(each.stands for each in tries[item.name])]
    open_items = [item for item in open_items if item.name not in tried]
    journal.plan(name, [item.name for item in items], [item.name for item in open_items])
    for item in sorted(open_items, key=lambda item: 0 if again else len(tries[item.name])):
        if not clock.allows(item.seconds):
            why = f"{clock.left:.0f} s were left, it takes about {item.seconds:g} s"
            journal.leave_out(name, item.name, cut_off(item.name, why))
            continue
        journal.begin(name, item.name)
        began = clock.now()
        spoilt = False
        for row in guarded(item.name, item.work):
            journal.add(name, item.name, row)
            spoilt = spoilt or (row.status == "error" and SPOILT.search(row.note) is not None)
        journal.end(name, item.name, clock.now() - began)
        if spoilt:
            return False
    return True


def end_with_caller() -> None:
    """Make Linux end this process group when its parent is gone, because a killed parent cannot."""
    signal.signal(signal.SIGTERM, lambda number, frame: os.killpg(0, signal.SIGKILL))
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def main(argument: str) -> int:
    """Measure the check requested by the JSON `argument`; return 0, or SPOILT_CODE if the device became unusable."""
    end_with_caller()
    asked: dict[str, Any] = json.loads(argument)
    check, name = Check(**asked["check"]), asked["name"]
    journal = Journal(Path(asked["file"]), Machine(**asked["machine"]), asked["commit"])
    clock = Clock(asked["seconds"])
    if gone := lacking(check.needs):
        text = f"{', '.join(gone)} not installed: add their wheels to the others (docs/howto/gpu_check.md)"
        journal.leave_out(name, WHOLE, missing(WHOLE, text))
        return 0
    call = Call(journal, clock, Path(asked["scratch"]))
    items = importlib.import_module(check.module).items(call)
    through = measure(name, items, journal, clock, asked["again"], asked["tried"])
    return 0 if through else SPOILT_CODE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
