"""Facts of a run for summary.json: data, casts, machine, and settings that changed since previous sessions.

The fingerprint covers everything besides config, code and data that influences a run's numbers: libraries, processor,
torch's flags, environment variables.
"""

import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_llm.base.hardware import describe_device
from lightning_llm.base.integrity import digest_of_file
from lightning_llm.config.config_hash import NOT_IDENTITY, below, flatten
from lightning_llm.config.from_file import load_config
from lightning_llm.config.redact import redact_uri
from lightning_llm.config.schema import Config
from lightning_llm.data.corpus import Corpus
from lightning_llm.data.mixing.addressing import SKIPPED_SAMPLES, Mixture, MixturePhase
from lightning_llm.linalg.gemm import operand
from lightning_llm.model.flops import count_parameters
from lightning_llm.optim.schedule import learning_rate_factor
from lightning_llm.plan.resolve import Plan, coverage_of
from lightning_llm.precision.native.decide import Decision
from lightning_llm.run.resume.start import Start
from lightning_llm.tracking.files import SOURCE_HASHES, TOKENIZER_DIGEST, summary_of
from lightning_llm.tracking.provenance import (
    code_hash,
    origin_changes,
    origin_of,
    versions,
)


def run_facts(config: Config, corpus: Corpus, decision: Decision) -> dict[str, Any]:
    """Return the facts that a comparison of runs needs besides the config: size, data, threads, backend, coverage."""
    covered = coverage_of(config)
    return {
        "parameters": count_parameters(config.model).total,
        "data_hash": corpus.fingerprint,
        "validation_hash": corpus.validation_fingerprint,
        SOURCE_HASHES: corpus.source_fingerprints,
        TOKENIZER_DIGEST: digest_of_file(corpus.tokenizer.path),
        "validation_unigram_nats": corpus.validation_unigram_nats,
        **({"chosen_documents": corpus.chosen} if corpus.chosen else {}),
        "data_sources": {name: account.facts() for name, account in corpus.accounts.items()},
        "threads": torch.get_num_threads(),
        "backend": decision.runs if config.precision.quantizes else None,  # where casts run
        "precision": decision.facts(),
        "quantized": covered.as_data() if covered else None,
    }


def origin_here(plan: Plan, device: torch.device) -> dict[str, Any]:
    """Return the facts about code and machine for the summary."""
    return {
        "versions": versions(),
        "code_hash": code_hash(),
        "device": describe_device(device),
        "compiled": plan.compiled,
    }


def resume_history(config: Config, start: Start, summary: dict[str, Any]) -> dict[str, list[Any]]:
    """Return {key: values in previous sessions that differ from this one}; {} for a new run.

    Also {} for a branch: its differences from the parent run are in `summary["branch"]["changed"]`.

    Keys are those of the config that may change on resume, and those of the origin of numbers in `summary` (versions,
    device, code, threads, backend). `trainer.max_steps` is included only if the learning rate or the casts of a kept
    step depend on it. Call this before the folder's config.yaml is replaced.
    """
    if start.checkpoint is None or start.parent is not None or start.step == 0:
        return {}
    origin = start.checkpoint.run_folder
    before = summary_of(origin)
    old = load_config(origin / "config.yaml", [])
    was, now = flatten(old.model_dump(mode="json")), flatten(config.model_dump(mode="json"))
    keys = {key for key in was.keys() | now.keys() if not below(key, NOT_IDENTITY)}
    changed = {key for key in keys if was.get(key) != now.get(key)}
    if _same_course(old, config, start.step):
        changed.discard("trainer.max_steps")
    found: dict[str, list[Any]] = {key: list(values) for key, values in before.get("earlier", {}).items()}
    for key in sorted(changed):
        found.setdefault(key, []).append(was.get(key))
    for key, (earlier, _) in origin_changes(origin_of(before), origin_of(summary)).items():
        if key != SKIPPED_SAMPLES:  # differs only in later steps, see `rollback.other_samples`
            found.setdefault(key, []).append(earlier)
    return {key: _distinct(values) for key, values in found.items()}


def _same_course(old: Config, new: Config, steps: int) -> bool:
    """Return whether learning rates, casts and data of the first `steps` steps are the same in both configs."""

    def course(config: Config, step: int) -> tuple[float, list[bool]]:
        last = config.trainer.max_steps
        phases = [phase.start * last <= step < phase.end * last for phase in config.precision.phases]
        schedule = config.schedule.relative_to(config.optim.learning_rate)
        return learning_rate_factor(schedule, step, last), phases

    def phases_of_data(config: Config) -> list[MixturePhase]:
        width, last = config.data.global_batch_size, config.trainer.max_steps
        mixture: Mixture = config.data.chosen_mixture.build(config.data.trained_weights, width, last)
        return list(mixture.phases(steps * width))

    if phases_of_data(old) != phases_of_data(new):
        return False
    return all(course(old, step) == course(new, step) for step in range(steps))


def _distinct(values: list[Any]) -> list[Any]:
    return list({json.dumps(value, sort_keys=True): value for value in values}.values())


DRIVER = Path("/proc/driver/nvidia/version")
VARIABLES = re.compile(
    r"(?!\w*(VERBOSE|LOG|DEBUG|_DBG|THREADS|AFFINITY|BLOCKTIME|SETTINGS|CACHE|DUPLICATE_LIB|INIT_AT_FORK))("
    r"ATEN_CPU_CAPABILITY|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|TORCH_BLAS_PREFER_CUBLASLT|"
    r"CUDA_DEVICE_MAX_CONNECTIONS|NCCL_(ALGO|PROTO|NVLS_ENABLE|COLLNET_ENABLE|\w+_NCHANNELS)|"
    r"(ONEDNN|DNNL|MKL|KMP|CUBLAS|CUBLASLT|CUDNN|NVTE|ROCBLAS|HIPBLASLT|PYTORCH_TUNABLEOP|TORCHINDUCTOR)_\w+)"
)
"""Environment variables that select kernels or change their rounding or summation, without those for logs, threads and
paths."""
SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16}


def fingerprint(device: torch.device) -> dict[str, str]:
    """Return the fingerprint of this process as flat keys; keys that do not apply (CUDA on a CPU) are left out."""
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
    """Return the versions of MKL and oneDNN from torch's build settings."""
    patterns = {"mkl": r"Math Kernel Library Version (\S+)", "onednn": r"(?:MKL-DNN|oneDNN) v(\S+)"}
    found = {name: re.search(pattern, built) for name, pattern in patterns.items()}
    return {name: match.group(1) for name, match in found.items() if match}


def _cudnn_version() -> str:
    """Return cuDNN's version; if torch rejects the cuDNN library that another package loaded first, its reason."""
    try:
        return str(torch.backends.cudnn.version() or "")
    except RuntimeError as error:
        return f"unusable: {str(error).strip()[:120]}"


def _of_cuda() -> dict[str, str]:
    from torch.utils._triton import get_triton_version

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
    return {
        "cuda": torch.version.cuda or "",
        "rocm": torch.version.hip or "",
        "cudnn": _cudnn_version(),
        "nccl": nccl,
        "triton": ".".join(map(str, get_triton_version() or ())),
        "driver": driver_version(DRIVER.read_text() if DRIVER.is_file() else ""),
        "flags.cuda.matmul.fp32_precision": torch.backends.cuda.matmul.fp32_precision,
        "flags.cudnn.benchmark": str(torch.backends.cudnn.benchmark),
    }


def driver_version(text: str) -> str:
    """Return the driver version, such as "570.124.06", in the text of /proc/driver/nvidia/version, or ""."""
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found.group(1) if found else ""
