"""Environment variables of CUDA, NCCL and torch's allocator that a run sets where its user has not. Imports no torch.

Not set, and why: `TORCH_NCCL_AVOID_RECORD_STREAMS` is what torch does anyway, and it warns of the variable
(https://github.com/pytorch/torchtitan/pull/1088). NCCL takes NVLink SHARP by itself where there is one
(`NCCL_NVLS_ENABLE=0` switches it off: https://github.com/NVIDIA/JAX-Toolbox/pull/1708). `CUDA_DEVICE_MAX_CONNECTIONS=1`
is for Megatron's overlap of tensor-parallel communication, which is not used here, and keeps FSDP's gathers behind the
GEMMs
(https://docs.nvidia.com/megatron-core/developer-guide/latest/discussions/megatron-fsdp-user-guide/megatron-fsdp-user-guide.html).
"""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from lightning_llm.plan.resolve import Plan
from lightning_llm.precision.native.capability import DRIVER_FILES

ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Segments that grow: less memory is lost between blocks of other sizes. As torchtitan's run_train.sh; torch reads
it as CUDA is first used (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf).
CUDA takes this name from torch 2.11 on (https://github.com/pytorch/pytorch/issues/183387)."""
NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
"""NCCL's last collectives, kept in memory (https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html),
and a watchdog that lets them be written: with 1, which torch's agent gives its ranks in place of torch's own default 3,
it aborts the communicator and the file is lost (https://github.com/pytorch/pytorch/issues/121055)."""
GLOO = {"TORCH_FR_BUFFER_SIZE": "128"}
"""The same of gloo's collectives, for ranks on CPUs. A rank's sign of life reads them all, which takes 0.1 ms each."""
SHARDED_TENSOR_PARALLEL = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""A hardware queue for each stream where FSDP2's collectives and tensor parallelism's run beside the GEMMs
(https://github.com/pytorch/torchtitan/issues/1147; CUDA's own default is 8)."""
OTHER_NAMES = {
    "PYTORCH_ALLOC_CONF": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    "TORCH_FR_BUFFER_SIZE": ("TORCH_NCCL_TRACE_BUFFER_SIZE",),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("NCCL_ASYNC_ERROR_HANDLING",),
}
"""Earlier names that torch still reads: whoever has set one has made a choice."""
SHOWN = re.compile(r"(PYTORCH_(CUDA_|HIP_)?ALLOC_CONF|CUDA_DEVICE_MAX_CONNECTIONS|(TORCH_)?NCCL_\w+|TORCH_FR_\w+)")
RECORDER = re.compile(r"TORCH_FR_\w+")
"""Those of them that ranks on CPUs take notice of."""
OURS = "LIGHTNING_LLM_ENVIRONMENT"
"""Names the variables that were set here, for ranks that inherit them."""
AGENT = "TORCHELASTIC_RUN_ID"


def wanted(plan: Plan) -> dict[str, str]:
    """Return the variables that a plan's ranks are to have."""
    degrees = plan.degrees
    if plan.capability.compute_capability is None:
        return GLOO if degrees.world > 1 else {}
    sharded = SHARDED_TENSOR_PARALLEL if degrees.tp > 1 and degrees.dp_shard > 1 else {}
    return {**ALLOCATOR, **(NCCL if degrees.world > 1 else {}), **sharded}


def set_allocator() -> None:
    """Set what torch reads when it first uses CUDA, which checking a plan for this machine may do."""
    if any(Path(file).exists() for file in DRIVER_FILES):
        set_missing(ALLOCATOR)


def set_missing(variables: Mapping[str, str]) -> None:
    """Set those of `variables` that this process does not have, for itself and the ranks that it starts."""
    for name, value in variables.items():
        if _is_given(name) or (name in ALLOCATOR and _cuda_is_used()):
            continue
        os.environ[name] = value
        os.environ[OURS] = ",".join(dict.fromkeys([*_ours(), name]))


def environment_line(device_type: str) -> str | None:
    """Return the variables that a run on such a device has, each with who set it; None where there is none to tell."""
    ours, shown = _ours(), SHOWN if device_type == "cuda" else RECORDER
    found = [
        f"{name}={value} ({'lightning-llm' if name in ours else 'yours'})"
        for name, value in sorted(os.environ.items())
        if shown.fullmatch(name)
    ]
    return f"env    {', '.join(found)}" if found else None


def _is_given(name: str) -> bool:
    if name == "TORCH_NCCL_ASYNC_ERROR_HANDLING" and AGENT in os.environ and os.environ.get(name) == "1":
        return False  # the agent's own value, which nobody has asked for
    return any(each in os.environ for each in (name, *OTHER_NAMES.get(name, ())))


def _ours() -> list[str]:
    """Return the variables that were set here and are as they were set."""
    known = {**ALLOCATOR, **NCCL, **SHARDED_TENSOR_PARALLEL}
    names = filter(None, os.environ.get(OURS, "").split(","))
    return [name for name in names if os.environ.get(name) in (known.get(name), GLOO.get(name))]


def _cuda_is_used() -> bool:
    """Return whether torch has read its allocator's settings already: a notebook's cells before the run may have."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())
