"""The cost of verifying a checkpoint of 60 million parameters, against reading it: both from the page cache.

Parameters and AdamW's two moments in fp32, 720 MB in one file, as one rank writes them. Seconds of CPU time: a busy
machine changes those less than the wall clock's.
"""

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.rotation import Row
from lightning_llm.base.integrity import content_problem
from lightning_llm.train.checkpoint.tensor_storage import (
    TensorReader,
    TensorWriter,
    metadata_from_json,
    metadata_to_json,
)

PARAMETERS = 60_000_000
TENSORS = 60
ROUNDS = 5


def least_seconds(action: Callable[[], object]) -> float:
    """Return the least CPU seconds that `action` took."""
    taken = []
    for _ in range(ROUNDS):
        began = time.process_time()
        action()
        taken.append(time.process_time() - began)
    return min(taken)


def measure() -> Iterator[Row]:
    """Yield rows (what, value, target)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shape = PARAMETERS // TENSORS
    state = {f"{kind}.{n}": torch.randn(shape) for kind in ("model", "exp_avg", "exp_avg_sq") for n in range(TENSORS)}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        writer = TensorWriter(folder)
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on purpose: one process
        metadata = dcp.save(dict(state), storage_writer=writer, no_dist=True)
        files = writer.files
        described = metadata_from_json(metadata_to_json(metadata), files)

        def load() -> None:
            dcp.load(dict(state), storage_reader=TensorReader(folder, described), no_dist=True)

        def verify() -> None:
            problems = [content_problem(folder / name, written) for name, written in files.items()]
            if any(problems):
                raise RuntimeError(f"what was just written does not verify: {problems}")

        reading, verifying = least_seconds(load), least_seconds(verify)
    torch.set_num_threads(threads)
    size = sum(each.size_bytes for each in files.values())
    yield f"checkpoint of 60M parameters ({size / 1e6:.0f} MB): CPU seconds to load it", reading, ""
    yield "checkpoint of 60M parameters: CPU seconds to verify it", verifying, ""
    yield "checkpoint of 60M parameters: verifying over loading", verifying / reading, "below 1"
