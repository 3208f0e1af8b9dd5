"""Cost of MLflow in the quickstart's steps: time that they wait for it, and CPU time of its writer.

It is counted instead of compared with a run without MLflow, because two runs differ by more than the 1 % in question on
two cores (40 alternating steps differed by -3 to +7 %). The writer's CPU seconds count as if training waited for them,
although it uses another core at lower priority. Its start (imports, the new database) happens in the first two steps,
which are warm-up and counted separately.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.rotation import Row


def measure() -> Iterator[Row]:
    """Yield the shares over one whole quickstart, in a separate process."""
    folder = Path(tempfile.mkdtemp(prefix="lightning-llm-bench-"))
    words = ["recipe=quickstart", f"run.root={folder}", f"run.dir={folder / 'run'}"]
    command = [sys.executable, "-m", "lightning_llm", "train", *words, "logger=mlflow", "callbacks.sample=null"]
    environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
    subprocess.run(command, check=True, env=environment)
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(record.get("step_seconds", 0.0) for record in records)
    told = json.loads((folder / "run" / "summary.json").read_text())["mlflow"]
    waits, writes = told["blocked_seconds"] / seconds, told["writer_cpu_seconds"] / seconds
    yield "the quickstart's steps, seconds", seconds, ""
    yield "  share of it that they wait for MLflow", waits, ""
    yield "  CPU time of its writer over it", writes, ""
    yield "  both", waits + writes, "< 0.01"
    yield "  the writer's start, CPU seconds, once", told["writer_start_cpu_seconds"], ""
