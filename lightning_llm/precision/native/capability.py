"""Capabilities of a machine for native low-precision GEMMs. Imports no torch unless there is an NVIDIA driver."""

import functools
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DRIVER_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/proc/driver/nvidia/version")
"""Any of them is there where an NVIDIA driver is (dxg: Windows' subsystem for Linux)."""
LIBRARY = (2, 20)
"""The Transformer Engine release that this code is written for; later minor releases are accepted."""


@dataclass(frozen=True)
class Capability:
    """One device with its libraries. `device` is "cpu", or "sm_90" for CUDA compute capability 9.0.

    `problem`: why there is no CUDA device. `library_problem`: why Transformer Engine cannot be used. `no_compiler`: why
    nothing can be compiled for it.
    """

    device: str
    compute_capability: tuple[int, int] | None = None
    cuda: tuple[int, int] | None = None
    library: str | None = None
    problem: str | None = None
    library_problem: str | None = None
    no_compiler: str | None = None

    @classmethod
    def none(cls, problem: str) -> "Capability":
        """Return a machine without a CUDA device."""
        library, library_problem = installed_library()
        return cls("cpu", library=library, problem=problem, library_problem=library_problem)

    @classmethod
    def of_gpu(cls, major: int, minor: int, cuda: tuple[int, int] = (13, 0), library: str = "2.20.2") -> "Capability":
        """Return a GPU with all libraries, as assumed by the table of recipes and devices."""
        return cls(f"sm_{major}{minor}", (major, minor), cuda, library)


DEVICES = {
    each.device: each
    for each in (
        Capability("cpu", problem="no CUDA device"),
        *(Capability.of_gpu(major, minor) for major, minor in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))),
    )
}
"""The matrix's devices: CPU, A100 (8.0), L4 and L40 (8.9), H100 and H200 (9.0), B200 (10.0), RTX 5090 (12.0)."""
HARDWARE = {
    "cpu": DEVICES["cpu"],
    **dict.fromkeys(("a100",), DEVICES["sm_80"]),
    **dict.fromkeys(("l4", "l40", "l40s", "rtx4090"), DEVICES["sm_89"]),
    **dict.fromkeys(("h100", "h200", "gh200"), DEVICES["sm_90"]),
    **dict.fromkeys(("b200", "gb200"), DEVICES["sm_100"]),
    **dict.fromkeys(("rtx5090",), DEVICES["sm_120"]),
    # ROCm's torch calls gfx90a compute capability 9.0; Transformer Engine for CUDA does not run there.
    "mi250x": Capability("gfx90a", (9, 0), problem="gfx90a has no FP8 unit, and no CUDA"),
}
"""Devices of `hardware=NAME`, with CUDA and Transformer Engine installed (compute capabilities:
https://developer.nvidia.com/cuda-gpus)."""


def version_tuple(text: str) -> tuple[int, int]:
    """Return (2, 20) for "2.20.2" or "2.20.0.dev0+abc"; (0, 0) where it does not begin with two numbers."""
    parts = text.split(".")
    numbers = [part for part in parts[:2] if part.isdigit()]
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 else (0, 0)


def installed_library() -> tuple[str | None, str | None]:
    """Return (version, problem) of Transformer Engine from the package's metadata, without importing it."""
    wanted = f"at least {LIBRARY[0]}.{LIBRARY[1]} and below {LIBRARY[0] + 1}"
    try:
        found = version("transformer-engine")
    except PackageNotFoundError:
        return None, f"Transformer Engine ({wanted}) is not installed: pip install 'transformer-engine[pytorch]'"
    if LIBRARY <= version_tuple(found) < (LIBRARY[0] + 1, 0):
        return found, None
    return found, f"Transformer Engine {found} is installed, and {wanted} is needed"


def device_here(accelerator: str) -> Capability:
    """Return the GPU that `trainer.accelerator` (auto, cpu, cuda) finds on this machine, ignoring its libraries."""
    if accelerator == "cpu":
        return Capability.none("trainer.accelerator=cpu")
    if not any(Path(file).exists() for file in DRIVER_FILES):
        return Capability.none("no CUDA device: there is no NVIDIA driver")
    import torch

    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return Capability.none(f"no CUDA device: torch {torch.__version__}, {built}, finds none")
    major, minor = torch.cuda.get_device_capability()
    from lightning_llm.precision.cast.inductor import no_compiler

    cuda = version_tuple(torch.version.cuda or "")
    return Capability(f"sm_{major}{minor}", (major, minor), cuda, no_compiler=no_compiler("cuda"))


@functools.cache
def capability_here(accelerator: str) -> Capability:
    """Return `device_here` with its libraries, which are imported if there is a GPU; cached per process."""
    device = device_here(accelerator)
    if device.compute_capability is None:
        return device
    library, problem = installed_library()
    if problem is None:
        from lightning_llm.precision.native.transformer_engine import import_problem

        problem = import_problem()
    return replace(device, library=library, library_problem=problem)
