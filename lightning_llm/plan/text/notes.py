"""Notes on a plan: settings that are allowed but may surprise, and known issues of the machine. Imports no torch.

A known issue is a rule over the plan and the environment that yields messages. The documentation lists the first line
of its docstring; the `Source` line names the evidence. Versions that cannot run a recipe are rejected in
`precision/native` instead: Transformer Engine before 2.20 (2.0 and 2.1 gave wrong weight gradients with overlapped
tensor parallelism, https://github.com/NVIDIA/TransformerEngine/issues/1616), and FP8 by blocks before CUDA 12.9.
"""

import os
from collections.abc import Callable, Iterator, Mapping

from lightning_llm.config.redact import with_credentials
from lightning_llm.plan.checkpoints import disk_notes
from lightning_llm.plan.memory.activations import on_gpu
from lightning_llm.plan.memory.units import shard_ranks
from lightning_llm.plan.nodes import reduction_note
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.step_law import law_notes
from lightning_llm.precision.native.decide import HARDWARE

Rule = Callable[[Plan, Mapping[str, str]], Iterator[str]]
SHORTENED = ("BF16", "F16", "TF32", "ANY")


def _one_queue(plan: Plan, environment: Mapping[str, str]) -> Iterator[str]:
    """`CUDA_DEVICE_MAX_CONNECTIONS=1` with sharded parameters: gathers wait for the GEMMs they should overlap with.

    Source: Megatron-FSDP's user guide (docs.nvidia.com/megatron-core, "CUDA_DEVICE_MAX_CONNECTIONS").
    """
    sharded = shard_ranks(plan.config.parallel, plan.degrees) > 1
    if on_gpu(plan) and sharded and environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 is for Megatron's tensor parallelism and keeps FSDP2's gathers behind the "
            "GEMMs: unset it"
        )


def _tf32(plan: Plan, environment: Mapping[str, str]) -> Iterator[str]:
    """TF32 forced by the environment: products that the recipe has in fp32 use 10 bits of mantissa.

    Source: PyTorch's CUDA environment variables; cuBLAS's documentation of `NVIDIA_TF32_OVERRIDE`.
    """
    for name in ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
        if on_gpu(plan) and environment.get(name) == "1":
            yield f"{name}=1 turns fp32 products into TF32, against the recipe: unset it"


def _short_cpu_products(plan: Plan, environment: Mapping[str, str]) -> Iterator[str]:
    """oneDNN's implicit down-conversion on a CPU: fp32 products, and sums of emulated casts, use fewer bits.

    Source: oneDNN's developer guide, "Primitive Attributes: floating-point math mode".
    """
    for name in ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"):
        mode = environment.get(name, "").upper()
        if not on_gpu(plan) and mode in SHORTENED:
            yield f"{name}={environment[name]} lets oneDNN multiply fp32 numbers in fewer bits: unset it"


RULES: tuple[Rule, ...] = (_one_queue, _tf32, _short_cpu_products)


def known_issues(plan: Plan, environment: Mapping[str, str]) -> list[str]:
    """Return a note on each setting in `environment` that is known to harm the planned run."""
    return [f"note   here {text}" for rule in RULES for text in rule(plan, environment)]


def notes(plan: Plan, *, to_train: bool) -> list[str]:
    """Return notes on settings that are allowed but may surprise, one line each. `to_train`: the run starts here."""
    config = plan.config
    schedule, steps = config.schedule, config.trainer.max_steps
    found = []
    if (uri := config.logger.tracking_uri) and with_credentials(uri) != uri:
        found.append(
            "note   the password in logger.tracking_uri is not saved: to resume, give that key again, or "
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    if schedule.warmup_steps >= steps:
        found.append(
            f"note   schedule.warmup_steps={schedule.warmup_steps} is no shorter than trainer.max_steps={steps}: the "
            "learning rate is still rising when the run ends"
        )
    if (reduction := reduction_note(config, plan.degrees)) is not None:
        found.append(reduction)
    found += law_notes(config.step_law)
    if (judged := _hardware_note(plan, to_train)) is not None:
        found.append(judged)
    return [*found, *known_issues(plan, os.environ), *(disk_notes(config) if to_train else ())]


def _hardware_note(plan: Plan, to_train: bool) -> str | None:
    """Return a note if native casts were decided for another device than the one the run is planned for."""
    config, here = plan.config, plan.capability.device
    if not config.precision.quantises:
        return None
    if to_train:  # on this machine's device
        if config.hardware is None or here == HARDWARE[config.hardware].device:
            return None
        return f"note   hardware={config.hardware} is for `plan`: casts run as this machine's device ({here}) allows"
    if config.planned_hardware is None and plan.degrees.world > config.trainer.devices:
        return (
            f"note   native or emulated is decided for this machine ({here}); hardware=h100 (or a100, b200, ...) "
            "decides for the device that the run is planned for"
        )
    return None
