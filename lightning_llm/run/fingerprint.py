"""What has a part in a run's numbers beside config, code and data: libraries, processor, torch's flags, variables."""

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_llm.base.errors import AgreedError, Problem
from lightning_llm.config.config_hash import below
from lightning_llm.config.redact import redact_uri
from lightning_llm.config.schema import Config
from lightning_llm.linalg.gemm import operand
from lightning_llm.run.resume.start import Start
from lightning_llm.tracking.files import summary_of
from lightning_llm.tracking.provenance import FINGERPRINT, has_fingerprint, origin_changes, origin_of

DRIVER = Path("/proc/driver/nvidia/version")
VARIABLES = re.compile(
    r"(?!\w*(VERBOSE|LOG|DEBUG|_DBG|THREADS|AFFINITY|BLOCKTIME|SETTINGS|CACHE|DUPLICATE_LIB|INIT_AT_FORK))("
    r"ATEN_CPU_CAPABILITY|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|TORCH_BLAS_PREFER_CUBLASLT|"
    r"CUDA_DEVICE_MAX_CONNECTIONS|NCCL_(ALGO|PROTO|NVLS_ENABLE|COLLNET_ENABLE|\w+_NCHANNELS)|"
    r"(ONEDNN|DNNL|MKL|KMP|CUBLAS|CUBLASLT|CUDNN|NVTE|ROCBLAS|HIPBLASLT|PYTORCH_TUNABLEOP|TORCHINDUCTOR)_\w+)"
)
"""Environment variables that change which kernels run, or how they round and sum; those of logs, threads and places
do not."""
CHANGES_NUMBERS = ("versions.", f"{FINGERPRINT}.", "device", "threads", "compiled", "backend", "code_hash")
SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16}
SHOWN = 8
"""How many differences a line names."""


def fingerprint(device: torch.device) -> dict[str, str]:
    """Return it flat, as this process has it by now: what is not there (CUDA on a CPU) is left out."""
    found = {
        "os": f"{platform.system()} {platform.release()}",
        "libc": " ".join(platform.libc_ver()),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        **{f"cpu.{name}_products": _multiplied_as(dtype) for name, dtype in SHORT.items()},
        "flags.float32_matmul_precision": torch.get_float32_matmul_precision(),
        **_libraries(torch.__config__.show()),
        **(_of_cuda() if device.type == "cuda" else {}),
    }
    variables = {name: value for name, value in os.environ.items() if VARIABLES.fullmatch(name)}
    found |= {f"env.{name}": redact_uri(value) for name, value in sorted(variables.items())}
    return {key: value for key, value in found.items() if value}


def _multiplied_as(dtype: torch.dtype) -> str:
    return str(operand(torch.empty(0, dtype=dtype)).dtype).removeprefix("torch.")


def _libraries(built: str) -> dict[str, str]:
    """Return the versions of MKL and oneDNN from what torch says of how it was built."""
    patterns = {"mkl": r"Math Kernel Library Version (\S+)", "onednn": r"(?:MKL-DNN|oneDNN) v(\S+)"}
    found = {name: re.search(pattern, built) for name, pattern in patterns.items()}
    return {name: match.group(1) for name, match in found.items() if match}


def _of_cuda() -> dict[str, str]:
    from torch.utils._triton import get_triton_version

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
    return {
        "cuda": torch.version.cuda or "",
        "rocm": torch.version.hip or "",
        "cudnn": str(torch.backends.cudnn.version() or ""),
        "nccl": nccl,
        "triton": ".".join(map(str, get_triton_version() or ())),
        "driver": driver_version(DRIVER.read_text() if DRIVER.is_file() else ""),
        "flags.cuda.matmul.fp32_precision": torch.backends.cuda.matmul.fp32_precision,
        "flags.cudnn.benchmark": str(torch.backends.cudnn.benchmark),
    }


def driver_version(text: str) -> str:
    """Return "570.124.06" of what an NVIDIA driver says in /proc/driver/nvidia/version, "" where it says nothing."""
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found.group(1) if found else ""


def agree_on_fingerprint(config: Config, start: Start, here: Mapping[str, Any]) -> list[str]:
    """Return lines on what differs from the steps before `start`, and between ranks. Collective.

    `here` is what the summary will say of this rank: versions, code, device and fingerprint.

    Raises:
        AgreedError: on every rank, where a run goes on with `resume_strict` set and something differs.
    """
    own = _numbers(here)
    ranks = [own]
    if dist.is_initialized():
        ranks *= dist.get_world_size()
        dist.all_gather_object(ranks, own)
    changed = _since(start, ranks[0])
    others = {rank: origin_changes(ranks[0], each) for rank, each in enumerate(ranks) if each != ranks[0]}
    strict = config.resume_strict and start.checkpoint is not None and start.trunk is None
    if strict and (problems := [*_unknown(start), *_refusals(start, changed), *_rank_refusals(others)]):
        raise AgreedError(problems)
    lines = []
    if changed:
        lines.append(f"note   not as in the steps before: {_listed(changed)} (resume_strict=true refuses)")
    for differing in {_listed(each): None for each in others.values()}:
        alike = ", ".join(str(rank) for rank, each in others.items() if _listed(each) == differing)
        lines.append(f"note   not the same on all ranks: {differing} on rank(s) {alike}")
    return lines


def _numbers(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in origin_of(summary).items() if below(key, CHANGES_NUMBERS)}


def _since(start: Start, now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return {key: (in the steps before, now)}, as far as these have recorded it; a branch is a run of its own."""
    if start.checkpoint is None or start.step == 0 or start.trunk is not None:
        return {}
    return origin_changes(_numbers(summary_of(start.checkpoint.run_folder)), now)


def _listed(differing: Mapping[str, tuple[Any, Any]]) -> str:
    words = [f"{key} {_word(before)} -> {_word(now)}" for key, (before, now) in differing.items()]
    return "; ".join([*words[:SHOWN], *([f"{len(words) - SHOWN} more"] if len(words) > SHOWN else [])])


def _word(value: Any) -> str:
    return "none" if value is None else str(value)


def _unknown(start: Start) -> list[Problem]:
    folder = start.checkpoint.run_folder if start.checkpoint else Path()
    if has_fingerprint(origin_of(summary_of(folder))):
        return []
    text = f"is true, and {folder} has no fingerprint: an earlier release trained it. Set it to false to go on."
    return [Problem("resume_strict", text)]


def _refusals(start: Start, changed: Mapping[str, tuple[Any, Any]]) -> list[Problem]:
    where = start.checkpoint.run_folder if start.checkpoint else ""
    text = (
        "is {}, and {} in the steps of {}. Bring it back, or set resume_strict=false: the run then says what changed."
    )
    return [Problem(key, text.format(_word(now), _word(before), where)) for key, (before, now) in changed.items()]


def _rank_refusals(others: Mapping[int, Mapping[str, tuple[Any, Any]]]) -> list[Problem]:
    text = "is {} on rank {}, and {} on rank 0. Make the machines alike, or set resume_strict=false."
    return [
        Problem(key, text.format(_word(its), rank, _word(first)))
        for rank, differing in others.items()
        for key, (first, its) in differing.items()
    ]
