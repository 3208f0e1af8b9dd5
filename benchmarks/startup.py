"""Seconds a person waits: help, a config error, and the first step of the quickstart with a warm cache."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from benchmarks.rotation import Row


def seconds(*words: str, code: int = 0, until: str | None = None) -> float:
    """Return the wall seconds of a command that exits with `code`, or until it prints a line that holds `until`.

    Raises RuntimeError where it ends in another way: what was timed then is something else.
    """
    start = time.perf_counter()
    command = [sys.executable, "-m", "lightning_llm", *words]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            last = line
            if until and until in line:
                elapsed = time.perf_counter() - start
                process.terminate()
                return elapsed
        process.wait()
    if until or process.returncode != code:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {last}")
    return time.perf_counter() - start


def measure() -> Iterator[Row]:
    """Yield the fastest of three, each a process of its own."""
    yield "lightning-llm --help, seconds", min(seconds("--help") for _ in range(3)), "< 0.5"
    yield "a config error, seconds", min(seconds("train", "trainer.max_stps=3", code=2) for _ in range(3)), "< 3"
    root = tempfile.mkdtemp(prefix="lightning-llm-bench-")
    words = ["train", "recipe=quickstart", f"run.root={root}", "callbacks.progress.line_seconds=0.0"]
    seconds(*words, "run.name=warm", until="step 1/")
    first = min(seconds(*words, f"run.name=r{i}", until="step 1/") for i in range(3))
    yield "train to the quickstart's first step, warm cache, seconds", first, "< 15"
