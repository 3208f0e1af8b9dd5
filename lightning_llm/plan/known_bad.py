"""Settings of a machine that are known to spoil a run, as rules over the plan and the environment. Imports no torch.

Each rule yields what to say; its docstring's first line is what the documentation lists, its `Source` line says where
it is known from. Versions that cannot do what a recipe asks for are refused elsewhere (`precision/native`): Transformer
Engine 2.0 and 2.1, whose overlapped tensor parallelism gave wrong weight gradients
(https://github.com/NVIDIA/TransformerEngine/issues/1616), among all before 2.20, and FP8 by blocks before CUDA 12.9.
"""

from collections.abc import Callable, Iterator, Mapping

from lightning_llm.plan.memory.activations import on_gpu
from lightning_llm.plan.memory.units import shard_ranks
from lightning_llm.plan.resolve import Plan

Rule = Callable[[Plan, Mapping[str, str]], Iterator[str]]
SHORTENED = ("BF16", "F16", "TF32", "ANY")


def _one_queue(plan: Plan, environment: Mapping[str, str]) -> Iterator[str]:
    """`CUDA_DEVICE_MAX_CONNECTIONS=1` with sharded parameters: gathers wait behind the GEMMs they should hide behind.

    Source: Megatron-FSDP's user guide (docs.nvidia.com/megatron-core, "CUDA_DEVICE_MAX_CONNECTIONS").
    """
    sharded = shard_ranks(plan.config.parallel, plan.degrees) > 1
    if on_gpu(plan) and sharded and environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 is for Megatron's tensor parallelism and keeps FSDP2's gathers behind the "
            "GEMMs: unset it"
        )


def _tf32(plan: Plan, environment: Mapping[str, str]) -> Iterator[str]:
    """TF32 forced from outside: products that are fp32 by the recipe take 10 bits of mantissa.

    Source: PyTorch's CUDA environment variables; cuBLAS's documentation of `NVIDIA_TF32_OVERRIDE`.
    """
    for name in ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
        if on_gpu(plan) and environment.get(name) == "1":
            yield f"{name}=1 makes TF32 of fp32 products, whatever the recipe says: unset it"


def _short_cpu_products(plan: Plan, environment: Mapping[str, str]) -> Iterator[str]:
    """oneDNN's implicit down-conversion on a CPU: fp32 products, and the sums of emulated casts, in fewer bits.

    Source: oneDNN's developer guide, "Primitive Attributes: floating-point math mode".
    """
    for name in ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"):
        mode = environment.get(name, "").upper()
        if not on_gpu(plan) and mode in SHORTENED:
            yield f"{name}={environment[name]} lets oneDNN multiply fp32 numbers in fewer bits: unset it"


RULES: tuple[Rule, ...] = (_one_queue, _tf32, _short_cpu_products)


def known_bad(plan: Plan, environment: Mapping[str, str]) -> list[str]:
    """Return a line on each setting in `environment` that is known to spoil what is planned."""
    return [f"note   here {text}" for rule in RULES for text in rule(plan, environment)]
