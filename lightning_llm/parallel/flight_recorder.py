"""The last collectives of this rank, as torch's flight recorder has them: which, on what, of which group, since when.

On a CPU (gloo) it is asked at any time. Of NCCL it is not: to look at a collective on a device asks for its events, and
NCCL's own watchdog, which knows when that is safe, writes them when one times out (`cuda_environment.NCCL`). Messages
of a pipeline are not among gloo's.
"""

import json
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

from lightning_llm.parallel.torch_private import private

FIELDS = ("record_id", "profiling_name", "collective_seq_id", "input_sizes", "input_dtypes", "output_sizes")


def collectives() -> list[dict[str, Any]]:
    """Return those that are kept, the oldest first; `ended`: whether this rank's part is done, `age_seconds`: begun."""
    if not dist.is_initialized() or dist.get_backend() != "gloo":
        return []
    entries = json.loads(private(_distributed_c10d, "_dump_fr_trace_json")(True, False)).get("entries", [])
    now = time.time()
    return [_described(each, now) for each in sorted(entries, key=lambda each: each["record_id"])]


def _described(entry: Mapping[str, Any], now: float) -> dict[str, Any]:
    number, name = entry["process_group"]
    return {
        **{key: entry[key] for key in FIELDS},
        "group": number if name in ("", "undefined") else name,
        "ended": entry["retired"],
        "age_seconds": round(now - entry["time_created_ns"] / 1e9, 3),
    }
