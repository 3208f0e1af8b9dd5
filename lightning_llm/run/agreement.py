"""Agree phase of a run: facts for summary.json, differences between machines and sessions, the run's folder.

The fingerprint covers everything besides config, code and data that influences a run's numbers: libraries, processor,
torch's flags, environment variables.
"""

import json
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_llm.base.errors import AgreedError, Problem
from lightning_llm.base.hardware import describe_device
from lightning_llm.base.integrity import digest_of_file
from lightning_llm.config.config_hash import NOT_IDENTITY, below, flatten
from lightning_llm.config.from_file import load_config
from lightning_llm.config.redact import redact_uri
from lightning_llm.config.schema import Config
from lightning_llm.config.weight_folders import TOKENIZER
from lightning_llm.config.workspace import same_folder
from lightning_llm.config.yaml_file import write_config
from lightning_llm.data.corpus import Corpus
from lightning_llm.data.mixing.addressing import SKIPPED_SAMPLES, Mixture, MixturePhase
from lightning_llm.linalg.gemm import operand
from lightning_llm.model.flops import count_parameters
from lightning_llm.optim.kinds import learning_rate_factor
from lightning_llm.parallel.process_group import gather_objects
from lightning_llm.plan.resolve import Plan, coverage_of
from lightning_llm.precision.native.decide import Decision
from lightning_llm.run.inputs import Inputs
from lightning_llm.run.launch.environment import is_first_rank, print_once
from lightning_llm.run.launch.lock import lock_made_folder
from lightning_llm.run.opening import Rank
from lightning_llm.run.resume.branch import branch_facts
from lightning_llm.run.resume.rollback import Rollback, rollback_facts, skipped_samples, write_rollbacks
from lightning_llm.run.resume.start import Start
from lightning_llm.tracking.files import SOURCE_HASHES, TOKENIZER_DIGEST, summary_of
from lightning_llm.tracking.provenance import (
    FINGERPRINT,
    code_hash,
    has_fingerprint,
    origin_changes,
    origin_of,
    versions,
)
from lightning_llm.tracking.rank_liveness import clear_beats

CHANGES_NUMBERS = ("versions.", f"{FINGERPRINT}.", "device", "threads", "compiled", "backend", "code_hash")
"""Prefixes of the recorded keys that may change a run's numbers, which are compared."""
SHOWN = 8
"""Maximum number of differences listed in a line."""


def agree(rank: Rank, start: Start, inputs: Inputs) -> tuple[dict[str, Any], Callable[[], None] | None]:
    """Agree with all ranks on facts and folder; return the facts for summary.json and `prepare_folder`'s result.
    Collective.

    Raises:
        ConfigError: on every rank, if machines differ and resume_strict is set, or the folder cannot be written.
    """
    config = rank.plan.config
    facts = run_facts(config, inputs.corpus, rank.plan.decision) | start.run.facts() | inputs.facts
    facts |= branch_facts(config, start) | {FINGERPRINT: fingerprint(rank.device)}
    facts |= rollback_facts(start.rollbacks, skipped_samples(config, start.rollbacks))
    here = origin_here(rank.plan, rank.device) | facts
    for line in agree_on_fingerprint(config, start, here):
        print_once(line)
    if is_first_rank() and (earlier := resume_history(config, start, here)):
        facts["earlier"] = earlier
    return facts, prepare_folder(config, inputs.corpus, start)


def agree_on_fingerprint(config: Config, start: Start, here: Mapping[str, Any]) -> list[str]:
    """Return a line for each difference in software or hardware since the previous session and between ranks.
    Collective.

    `here`: this rank's facts for summary.json (versions, code, device, fingerprint), which are compared.

    Raises:
        AgreedError: on every rank, if a resumed run has `resume_strict` set and something differs.
    """
    own = _numbers(here)
    ranks = gather_objects(own)
    changed = _since(start, ranks[0])
    others = {rank: origin_changes(ranks[0], each) for rank, each in enumerate(ranks) if each != ranks[0]}
    strict = config.resume_strict and start.checkpoint is not None and start.parent is None
    if strict and (problems := [*_unknown(start), *_refusals(start, changed), *_rank_refusals(others)]):
        raise AgreedError(problems)
    lines = []
    if changed:
        lines.append(f"note   changed since the previous session: {_listed(changed)} (resume_strict=true forbids this)")
    for differing in {_listed(each): None for each in others.values()}:
        same = ", ".join(str(rank) for rank, each in others.items() if _listed(each) == differing)
        lines.append(f"note   ranks differ: {differing} on rank(s) {same}")
    return lines


def _numbers(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in origin_of(summary).items() if below(key, CHANGES_NUMBERS)}


def _since(start: Start, now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return {key: (value in the previous session, value now)} of recorded keys; {} for a new run and a branch."""
    if start.checkpoint is None or start.step == 0 or start.parent is not None:
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
    text = f"cannot be checked: {folder} has no fingerprint (written by an earlier release). Set it to false."
    return [Problem("resume_strict", text, "true")]


def _refusals(start: Start, changed: Mapping[str, tuple[Any, Any]]) -> list[Problem]:
    where = start.checkpoint.run_folder if start.checkpoint else ""
    text = "is {}, but was {} in {}. Restore it, or set resume_strict=false to only report the change."
    return [Problem(key, text.format(_word(now), _word(before), where)) for key, (before, now) in changed.items()]


def _rank_refusals(others: Mapping[int, Mapping[str, tuple[Any, Any]]]) -> list[Problem]:
    text = "is {} on rank {}, but {} on rank 0. Use identical machines, or set resume_strict=false."
    return [
        Problem(key, text.format(_word(its), rank, _word(first)))
        for rank, differing in others.items()
        for key, (first, its) in differing.items()
    ]


def prepare_folder(config: Config, corpus: Corpus, start: Start) -> Callable[[], None] | None:
    """Create the run's folder with config.yaml and tokenizer.json. Collective.

    If the run resumes in its own folder, nothing is written yet: return a function that writes these files, to be
    called on rank 0 once `start` has loaded on every rank.

    Raises:
        ConfigError: on every rank, if rank 0 cannot write the folder, or a rank does not see it.
    """
    folder = Path(config.run.dir)
    goes_on = start.checkpoint is not None and same_folder(start.checkpoint.run_folder, folder)
    if start.checkpoint is not None and start.parent is None and not goes_on:
        # If killed before its first checkpoint, the run starts there again. For a branch, branch_from records it.
        config = config.model_copy(update={"resume": str(start.checkpoint.folder)})
    rollbacks = () if goes_on else start.rollbacks
    write = partial(_write_first, config, corpus, rollbacks)
    problem = None
    if is_first_rank() and not goes_on:
        problem = _made(folder, write) or lock_made_folder(folder)
    if is_first_rank():
        clear_beats(folder)
    if dist.is_initialized():
        dist.barrier()
        seen = gather_objects(((folder / "config.yaml").is_file(), problem))
        problem = seen[0][1]
        if problem is None and not all(sees for sees, _ in seen):
            blind = ", ".join(str(rank) for rank, (sees, _) in enumerate(seen) if not sees)
            text = f"{folder} is not visible on rank(s) {blind}. Set run.root to storage shared by all nodes."
            problem = Problem("run.dir", text)
    if problem:
        raise AgreedError(problem)
    return write if goes_on else None


def _made(folder: Path, write: Callable[[], None]) -> Problem | None:
    """Create `folder` and call `write`; on failure, remove all new files and return the problem."""
    before = set(folder.iterdir()) if folder.is_dir() else None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write()
    except OSError as error:
        with suppress(OSError):
            for left in set(folder.iterdir()) - (before or set()):
                left.unlink()
            if before is None:
                folder.rmdir()
        text = f"{folder} cannot be written ({error.strerror or error}). Fix this, or choose another run.root."
        return Problem("run.dir", text)
    return None


def _write_first(config: Config, corpus: Corpus, rollbacks: Sequence[Rollback]) -> None:
    folder = Path(config.run.dir)
    if rollbacks:
        write_rollbacks(folder, rollbacks)
    write_config(config, folder / "config.yaml")
    written = corpus.tokenizer.save(folder / f"{TOKENIZER}.partial")
    written.rename(folder / TOKENIZER)
    corpus.tokenizer.declare_end(folder)


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
    """Return the facts about code and machine that influence numbers: versions, code hash, device, compiled blocks."""
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
    """Return the fingerprint of this process: {dotted key: value}, such as {"cpu": "AVX2", "flags.cudnn.benchmark":
    ...}.

    Keys that do not apply (CUDA on a CPU) are left out.
    """
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
