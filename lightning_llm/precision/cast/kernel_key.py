"""What a compiled cast is kept by: the machine and its software, the call's arguments, and the state of torch.

Whatever is left out of a key could give a wrong kernel; whatever is in it for nothing, another compilation. Sizes are
variables of a kernel, so of them only 0 and 1 are in the key, which Dynamo compiles in; a kernel's own guards say what
else its arguments have to be.
"""

import functools
import platform
import sys
from collections.abc import Hashable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_llm.base import keyed_hash


@functools.cache
def processor() -> list[str]:
    """Return what a compiler that builds for this very processor sees of it."""
    kept, file = [torch.backends.cpu.get_cpu_capability(), platform.machine()], Path("/proc/cpuinfo")
    if file.is_file():
        names = ("vendor_id", "cpu family", "model\t", "stepping", "flags", "Features", "CPU part")
        kept += sorted({line for line in file.read_text().splitlines() if line.startswith(names)})
    return kept


@functools.cache
def software(device_type: str) -> dict[str, Any]:
    """Return what shapes a kernel for a kind of device beside the processor and the call: JSON data."""
    from torch._inductor import config, cpp_builder

    compiler = cpp_builder.get_cpp_compiler()
    found: dict[str, Any] = {
        "sources": _sources(),
        "torch": [torch.__version__, torch.version.git_version, torch.__config__.show()],
        "python": [sys.version, platform.platform()],
        "compiler": [compiler, cpp_builder.get_compiler_version_info(compiler)],
        "inductor": config.get_hash().hex(),  # Dynamo's differs from process to process, and shapes no numbers
    }
    if device_type == "cuda":
        from torch.utils._triton import get_triton_version

        gpu = torch.cuda.get_device_properties(0)
        native: Any = torch._C
        versions = [torch.version.cuda, torch.version.hip, native._cuda_getDriverVersion(), get_triton_version()]
        found["gpu"] = [str(each) for each in (gpu.name, gpu.major, gpu.minor, gpu.multi_processor_count, *versions)]
    return found


def _sources() -> str:
    """Return a digest of all that Dynamo may trace into: `precision`, and the hash that it draws random bits by."""
    digest = blake2b(digest_size=16)
    package = Path(__file__).parents[1]
    for file in [*sorted(package.rglob("*.py")), Path(keyed_hash.__file__)]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def signature(args: tuple[Any, ...]) -> tuple[Hashable, ...]:
    """Return what kind of call this is, as far as other kernels are made for other kinds; its `repr` is stable."""
    return (*map(_described, args), *_surroundings())


def _described(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        sizes = tuple([min(size, 2) for size in value.shape])
        ordered = value.is_contiguous(), value.storage_offset() == 0, value.requires_grad, value.is_inference()
        return (value.device.type, value.dtype, sizes, ordered, type(value).__name__)
    if isinstance(value, tuple):
        return (type(value).__name__, *map(_described, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return min(value, 2) if value >= 0 else "negative"
    return repr(value)


def _surroundings() -> tuple[Hashable, ...]:
    """Return the state of torch that kernels are made for, whose guards are not kept with them."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )
