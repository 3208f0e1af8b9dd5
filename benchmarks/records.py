"""The cost of the hash chain over `metrics.jsonl`: CPU time of one record, and of verifying a whole run."""

import json
import time
from collections.abc import Iterator

from benchmarks.rotation import Row
from lightning_llm.base.integrity import ChainHead, RecordChain

RECORDS = 100_000
RECORD = {
    "step": 1000, "tokens": 16_384_000, "loss": 3.4257125854492188, "grad_norm": 0.8231486082077026, "lr": 0.004,
    "skipped": False, "step_seconds": 1.2561234567, "data_seconds": 0.0023123456, "tokens_per_second": 13043.123456,
    "tflops_per_second": 0.1234567, "mfu": 0.4123456, "system/cpu_percent": 100.0, "system/rss_bytes": 573485056,
    "time": 1795702089.926,
}  # fmt: skip
"""A record with the entries of the quickstart's callbacks."""


def measure() -> Iterator[Row]:
    """Yield microseconds of CPU time per record, as training and as readers spend them."""
    line = json.dumps(RECORD).encode() + b"\n"
    chain = RecordChain()
    start = time.process_time()
    for step in range(RECORDS):
        chain.add(step, line)
    written = time.process_time() - start
    start = time.process_time()
    ChainHead.over(line for _ in range(RECORDS))
    read = time.process_time() - start
    yield f"a record of {len(line)} bytes written, microseconds", 1e6 * written / RECORDS, "< 50"
    yield "  one verified, microseconds", 1e6 * read / RECORDS, ""
