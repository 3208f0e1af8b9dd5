"""Reading back what a run wrote."""

import json
from pathlib import Path


def read_metrics(folder: Path) -> list[dict]:
    """Return the records of `folder`/metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
