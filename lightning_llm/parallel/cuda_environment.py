"""Environment variables of CUDA, NCCL and torch's allocator that a run sets if the user has not. Imports no torch.

Deliberately not set: `TORCH_NCCL_AVOID_RECORD_STREAMS` is torch's default, and torch warns about the variable
(https://github.com/pytorch/torchtitan/pull/1088). NCCL uses NVLink SHARP by itself where available
(`NCCL_NVLS_ENABLE=0` disables it: https://github.com/NVIDIA/JAX-Toolbox/pull/1708). `CUDA_DEVICE_MAX_CONNECTIONS=1`
is for Megatron's overlap of tensor-parallel communication, which is not used here, and delays FSDP's gathers until
after the GEMMs
(https://docs.nvidia.com/megatron-core/developer-guide/latest/discussions/megatron-fsdp-user-guide/megatron-fsdp-user-guide.html).
"""

import os
import re
import sys
from collections.abc import Mapping

from lightning_llm.base.hardware import has_nvidia_driver
from lightning_llm.plan.resolve import Plan

ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Expandable segments reduce memory fragmentation, as in torchtitan's run_train.sh. torch reads the variable when CUDA
is first used (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf).
This name works for CUDA from torch 2.11 on (https://github.com/pytorch/pytorch/issues/183387)."""
NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
"""Flight recorder of NCCL's last collectives (https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html)
and a watchdog mode that lets it be written. With mode 1, which torch's agent sets instead of torch's default 3, the
watchdog aborts the communicator and the file is lost (https://github.com/pytorch/pytorch/issues/121055)."""
GLOO = {"TORCH_FR_BUFFER_SIZE": "128"}
"""Flight recorder of gloo's collectives, for ranks on CPUs. A rank's heartbeat reads all entries, 0.1 ms each."""
SHARDED_TENSOR_PARALLEL = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""One hardware queue per stream, because collectives of FSDP2 and tensor parallelism overlap with the GEMMs
(https://github.com/pytorch/torchtitan/issues/1147; CUDA's own default is 8)."""
OTHER_NAMES = {
    "PYTORCH_ALLOC_CONF": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    "TORCH_FR_BUFFER_SIZE": ("TORCH_NCCL_TRACE_BUFFER_SIZE",),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("NCCL_ASYNC_ERROR_HANDLING",),
}
"""{variable: its earlier names, which torch still reads}. If the user has set an earlier name, the variable is not set.
"""
SHOWN = re.compile(r"(PYTORCH_(CUDA_|HIP_)?ALLOC_CONF|CUDA_DEVICE_MAX_CONNECTIONS|(TORCH_)?NCCL_\w+|TORCH_FR_\w+)")
RECORDER = re.compile(r"TORCH_FR_\w+")
"""Pattern of the variables that also affect ranks on CPUs."""
OURS = "LIGHTNING_LLM_ENVIRONMENT"
"""Environment variable that lists the variables set here, for ranks that inherit them."""
AGENT = "TORCHELASTIC_RUN_ID"


def wanted(plan: Plan) -> dict[str, str]:
    """Return the variables to set for the ranks of a plan."""
    degrees = plan.degrees
    if plan.capability.compute_capability is None:
        return GLOO if degrees.world > 1 else {}
    sharded = SHARDED_TENSOR_PARALLEL if degrees.tp > 1 and degrees.dp_shard > 1 else {}
    return {**ALLOCATOR, **(NCCL if degrees.world > 1 else {}), **sharded}


def set_allocator() -> None:
    """Set the variables that torch reads when it first uses CUDA, which may happen while a plan is checked."""
    if has_nvidia_driver():
        set_missing(ALLOCATOR)


def set_missing(variables: Mapping[str, str]) -> None:
    """Set each of `variables` that is not set yet in the environment of this process, which its ranks inherit."""
    for name, value in variables.items():
        if _is_given(name) or (name in ALLOCATOR and _cuda_is_used()):
            continue
        os.environ[name] = value
        os.environ[OURS] = ",".join(dict.fromkeys([*_ours(), name]))


def environment_line(device_type: str) -> str | None:
    """Return a line with the environment variables that affect a run on a device of `device_type`; None if none is set.

    After each value it has "(yours)" or "(lightning-llm)", for the one who set the variable.
    """
    ours, shown = _ours(), SHOWN if device_type == "cuda" else RECORDER
    found = [
        f"{name}={value} ({'lightning-llm' if name in ours else 'yours'})"
        for name, value in sorted(os.environ.items())
        if shown.fullmatch(name)
    ]
    return f"env    {', '.join(found)}" if found else None


def _is_given(name: str) -> bool:
    if name == "TORCH_NCCL_ASYNC_ERROR_HANDLING" and AGENT in os.environ and os.environ.get(name) == "1":
        return False  # torch's agent set the value, not the user
    return any(each in os.environ for each in (name, *OTHER_NAMES.get(name, ())))


def _ours() -> list[str]:
    """Return the variables that were set here and have not changed since."""
    known = {**ALLOCATOR, **NCCL, **SHARDED_TENSOR_PARALLEL}
    names = filter(None, os.environ.get(OURS, "").split(","))
    return [name for name in names if os.environ.get(name) in (known.get(name), GLOO.get(name))]


def _cuda_is_used() -> bool:
    """Return whether torch has already read its allocator settings, e.g. because of earlier cells of a notebook."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())
