"""Seconds that a user waits: for help, a config error, and the quickstart's first step, with cached casts and
without."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from benchmarks.rotation import Row

EMULATED = ("fp8_current", "fp8_delayed", "mxfp8", "fp8_subchannel", "mxfp4_sr", "nvfp4", "quartet", "fp16_mxfp8")
"""Measured recipes: one for each kind of cast."""
QUICKSTART = ("train", "recipe=quickstart", "callbacks.progress.line_seconds=0.0")
KERNELS = "LIGHTNING_LLM_KERNELS"


def seconds(*words: str, code: int = 0, until: str | None = None, kernels: str | None = None) -> float:
    """Return the wall seconds of a command that exits with `code`, or until it prints a line that contains `until`.

    `kernels`: folder of its compiled casts, None for the user's.
    Raises RuntimeError if it ends in another way, because the time would be meaningless.
    """
    start = time.perf_counter()
    command = [sys.executable, "-m", "lightning_llm", *words]
    last = ""
    environment = os.environ | ({KERNELS: kernels} if kernels else {})
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
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
    """Yield the fastest of three runs, each in a new process."""
    yield "lightning-llm --help, seconds", min(seconds("--help") for _ in range(3)), "< 0.5"
    yield "a config error, seconds", min(seconds("train", "trainer.max_stps=3", code=2) for _ in range(3)), "< 3"
    root = tempfile.mkdtemp(prefix="lightning-llm-bench-")
    words = [*QUICKSTART, f"run.root={root}"]
    seconds(*words, "run.name=warm", until="step 1/")
    first = min(seconds(*words, f"run.name=r{i}", until="step 1/") for i in range(3))
    yield "train to the quickstart's first step, warm cache, seconds", first, "< 6"


def measure_casts() -> Iterator[Row]:
    """Yield each recipe's seconds to the first step, without compiled casts in the cache, and in the next run."""
    root = tempfile.mkdtemp(prefix="lightning-llm-bench-")
    for recipe in EMULATED:
        kernels = tempfile.mkdtemp(prefix="lightning-llm-bench-kernels-")
        words = [*QUICKSTART, f"run.root={root}", f"precision={recipe}"]
        waited = [seconds(*words, f"run.name={recipe}-{i}", until="step 1/", kernels=kernels) for i in range(2)]
        yield f"{recipe}, nothing kept, seconds to the first step", waited[0], "<= 40"
        yield f"{recipe}, the next run, seconds to the first step", waited[1], "<= 10"
