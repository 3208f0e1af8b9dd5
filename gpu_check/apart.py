"""A check in a process of its own: what it is asked, its items in turn, and how it is ended by the one that asked."""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_check.call import Call
from gpu_check.checks import Check
from gpu_check.journal import Journal
from gpu_check.machine import Machine
from gpu_check.rows import Clock, Item, Row, cut_off, guarded, missing
from gpu_check.wheels import lacking

ROOT = Path(__file__).resolve().parents[1]
WHOLE = "the check"
"""Stands for the items of a check that are not known: it was not begun."""
PR_SET_PDEATHSIG = 1
OWN_SHARE = 0.93
"""Of its time, what a check plans with: it then ends by itself, and says of each item whether there was time for it."""


def run_apart(
    name: str, check: Check, journal: Journal, environment: dict[str, str], seconds: float, again: bool = False
) -> None:
    """Have a process measure one check, which a crash or the clock may end; its rows are in the journal then.

    It leads a process group that is ended with it: whatever a check started would keep the GPU from the next one.
    """
    request: dict[str, Any] = {
        "name": name, "check": check._asdict(), "file": str(journal.file), "machine": asdict(journal.machine),
        "commit": journal.commit, "seconds": OWN_SHARE * seconds, "again": again,
    }  # fmt: skip
    plans = journal.plans(name)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch,
        tempfile.TemporaryFile("w+", errors="replace") as said,  # no pipe: a grandchild would hold it open
    ):
        command = [sys.executable, "-m", "gpu_check.apart", json.dumps(request | {"scratch": scratch})]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(seconds)
            if not process.returncode:
                return
            said.seek(0)
            last = (said.read().strip().splitlines() or ["without a word"])[-1]
            row = Row("", None, "", "error", f"exit code {process.returncode}: {last[:300]}")
        except subprocess.TimeoutExpired:
            row = cut_off("", f"stopped after {seconds:.0f} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    _close(name, journal, row, planned=journal.plans(name) > plans)


def _close(name: str, journal: Journal, row: Row, planned: bool) -> None:
    """Say of every item that the process left open how it ended: `row` of the one that was under way."""
    if not planned:
        journal.leave_out(name, WHOLE, _named(row, WHOLE))
        return
    for item, begun in journal.unfinished(name).items():
        if begun:
            journal.add(name, item, _named(row, item))
            journal.end(name, item, 0)
        else:
            journal.leave_out(name, item, cut_off(item, f"not begun: {row.note}"))


def _named(row: Row, what: str) -> Row:
    return Row(what, row.value, row.unit, row.status, row.note)


def measure(name: str, items: list[Item], journal: Journal, clock: Clock, again: bool = False) -> None:
    """Measure the items that have no rows yet, all with `again`; what did not come to its end before goes last.

    Each row is written as it is found. What there is no time for is said to be cut off.
    """
    before = journal.attempts(name)
    tries = {item.name: [each for each in before.get(item.name, []) if each.begun] for item in items}
    open_items = [item for item in items if again or not any(each.stands for each in tries[item.name])]
    journal.plan(name, [item.name for item in items], [item.name for item in open_items])
    for item in sorted(open_items, key=lambda item: 0 if again else len(tries[item.name])):
        if not clock.allows(item.seconds):
            why = f"{clock.left:.0f} s were left, it takes about {item.seconds:g} s"
            journal.leave_out(name, item.name, cut_off(item.name, why))
            continue
        journal.begin(name, item.name)
        began = clock.now()
        for row in guarded(item.name, item.work):
            journal.add(name, item.name, row)
        journal.end(name, item.name, clock.now() - began)


def end_with_caller() -> None:
    """Have Linux end this process group when the process that started it is gone: a killed one cannot."""
    signal.signal(signal.SIGTERM, lambda number, frame: os.killpg(0, signal.SIGKILL))
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def main(argument: str) -> int:
    """Measure the check that is asked for."""
    end_with_caller()
    asked: dict[str, Any] = json.loads(argument)
    check, name = Check(**asked["check"]), asked["name"]
    journal = Journal(Path(asked["file"]), Machine(**asked["machine"]), asked["commit"])
    clock = Clock(asked["seconds"])
    if gone := lacking(check.needs):
        text = f"{', '.join(gone)} not installed: put the wheels beside the others (docs/native.md)"
        journal.leave_out(name, WHOLE, missing(WHOLE, text))
        return 0
    call = Call(journal, clock, Path(asked["scratch"]))
    items = importlib.import_module(check.module).items(call)
    measure(name, items, journal, clock, asked["again"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
