"""Seconds a person waits: help, a config error, and the first step of the quickstart with a warm cache."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator


def seconds(*words: str, until: str | None = None) -> float:
    """Return the wall seconds of a command, or until it prints a line that holds `until`."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "lightning_llm", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            if until and until in line:
                process.terminate()
                return time.perf_counter() - start
        process.wait()
    return time.perf_counter() - start


def measure() -> Iterator[tuple[str, float, str]]:
    """Yield the fastest of three, each a process of its own."""
    yield "lightning-llm --help, seconds", min(seconds("--help") for _ in range(3)), "< 0.5"
    yield "a config error, seconds", min(seconds("train", "trainer.max_stps=3") for _ in range(3)), "< 3"
    root = tempfile.mkdtemp(prefix="lightning-llm-bench-")
    words = ["train", "recipe=quickstart", f"run.root={root}", "callbacks.progress.line_seconds=0.0"]
    seconds(*words, "run.name=warm", until="step 1/")
    first = min(seconds(*words, f"run.name=r{i}", until="step 1/") for i in range(3))
    yield "train to the quickstart's first step, warm cache, seconds", first, "< 15"
