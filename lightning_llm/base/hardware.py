"""Names and peak speeds of devices, the denominator of model FLOPs utilization.

Peaks are dense (figures "with sparsity" in datasheets are halved), with fp32 accumulation if a vendor lists two. For a
device or format that is not in the table the peak is `None`, never that of a similar device.
"""

import os
import platform
import re
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_A100 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_H100 = "https://resources.nvidia.com/en-us-hopper-architecture/nvidia-tensor-core-gpu-datasheet"
_H100_PCIE = "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper"
_H200 = "https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446"
_GH200 = "https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip"
_BLACKWELL = "https://resources.nvidia.com/en-us-blackwell-architecture"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf"
_L40S = "https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413"
_A10 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf"
_GA102 = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_T4 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf"
_MI250X = "https://www.amd.com/content/dam/amd/en/documents/instinct-business-docs/product-briefs/instinct-mi200-datasheet.pdf"
_V100 = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"

PEAK_TFLOPS: dict[str, tuple[dict[str, float], str]] = {
    # pattern of the full name reported by CUDA: ({format: dense TFLOP/s}, source)
    r"NVIDIA A100[- ]SXM4-\d+GB|NVIDIA A100-PCIE-40GB|NVIDIA A100 80GB PCIe": (
        {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312},
        _A100,
    ),
    r"NVIDIA H100 80GB HBM3": ({"fp32": 67, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5, "fp8": 1979}, _H100),
    r"NVIDIA H100 NVL": ({"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1670.5}, _H100),
    r"NVIDIA H100 PCIe": ({"fp32": 51.2, "tf32": 378, "bf16": 756, "fp16": 756, "fp8": 1513}, _H100_PCIE),
    r"NVIDIA H200": ({"fp32": 67, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5, "fp8": 1979}, _H200),
    r"NVIDIA H200 NVL": ({"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1670.5}, _H200),
    r"NVIDIA GH200 \d+GB": ({"fp32": 67, "tf32": 494.5, "bf16": 990, "fp16": 990, "fp8": 1979}, _GH200),
    r"NVIDIA B200": (
        {"fp32": 75, "tf32": 1100, "bf16": 2250, "fp16": 2250, "fp8": 4500, "fp4": 9000},
        _BLACKWELL,
    ),
    r"NVIDIA GB200": (
        {"fp32": 80, "tf32": 1250, "bf16": 2500, "fp16": 2500, "fp8": 5000, "fp4": 10000},
        _BLACKWELL,
    ),
    r"NVIDIA L4": ({"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121, "fp8": 242.5}, _ADA),
    r"NVIDIA L40": ({"fp32": 90.5, "tf32": 90.5, "bf16": 181, "fp16": 181, "fp8": 362}, _ADA),
    r"NVIDIA L40S": ({"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362, "fp8": 733}, _L40S),
    r"NVIDIA GeForce RTX 4090": ({"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3}, _ADA),
    r"NVIDIA A10": ({"fp32": 31.2, "tf32": 62.5, "bf16": 125, "fp16": 125}, _A10),
    r"NVIDIA GeForce RTX 3090": ({"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71}, _GA102),
    r"AMD Instinct MI250X": (
        {"fp32": 47.9, "bf16": 191.5, "fp16": 191.5},
        _MI250X,
    ),  # one of its two dies; each is a device
    r"Tesla T4": ({"fp32": 8.1, "fp16": 65}, _T4),
    r"Tesla V100-SXM2-\d+GB(-LS)?": ({"fp32": 15.7, "fp16": 125}, _V100),
}
GIB = 2**30
MEMORY_GIB: dict[str, int] = {
    "a100": 80,
    "l4": 24,
    "l40": 48,
    "l40s": 48,
    "rtx4090": 24,
    "h100": 80,
    "h200": 141,
    "gh200": 96,
    "b200": 180,
    "gb200": 186,
    "rtx5090": 32,
    "mi250x": 64,
}
"""Memory of the device planned for by `hardware=NAME`, from the datasheets above (RTX 5090: nvidia.com/geforce), which
write GB for GiB. The A100 is the larger one, the H100 the SXM, the GH200 the one with HBM3; the MI250X is one die of
two, which is one device in ROCm."""
PLANNED_DEVICES = {
    "a100": "NVIDIA A100-SXM4-80GB",
    "l4": "NVIDIA L4",
    "l40": "NVIDIA L40",
    "l40s": "NVIDIA L40S",
    "rtx4090": "NVIDIA GeForce RTX 4090",
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "gh200": "NVIDIA GH200 96GB",
    "b200": "NVIDIA B200",
    "gb200": "NVIDIA GB200",
    "mi250x": "AMD Instinct MI250X",
}
"""Device name for `hardware=NAME` in `PEAK_TFLOPS`, which has no RTX 5090."""
COMPUTE_UNITS = {
    "a100": 108,  # https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf
    "h100": 132,  # SXM5; https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper
    "h200": 132,
    "gh200": 132,
    "b200": 148,  # both dies, as counted by CUDA; https://chipsandcheese.com/p/nvidias-b200-keeping-the-cuda-juggernaut
    "gb200": 148,
    "mi250x": 110,  # one die; https://rocm.docs.amd.com/en/latest/reference/gpu-arch-specs.html
}
"""Streaming multiprocessors or AMD compute units of a device: the size of a wave of GEMM tiles."""


def planned_peak_flops(hardware: str, number_format: str) -> float | None:
    """Return the dense peak of the device `hardware=NAME` in FLOP/s for a number format ("bf16"); None if unknown."""
    name = PLANNED_DEVICES.get(hardware)
    return None if name is None else peak_flops_per_second(name, number_format)


def planned_hardware(device_name: str) -> str | None:
    """Return the name for `hardware=NAME` ("h100") of a device that CUDA calls `device_name`; None if it has none."""
    for pattern in PEAK_TFLOPS:
        if re.fullmatch(pattern, device_name):
            return next((key for key, name in PLANNED_DEVICES.items() if re.fullmatch(pattern, name)), None)
    return None


DRIVER_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/proc/driver/nvidia/version")
"""Any of them is there where an NVIDIA driver is (dxg: Windows' subsystem for Linux)."""


def has_nvidia_driver() -> bool:
    """Return whether this machine has an NVIDIA driver, without importing torch."""
    return any(Path(file).exists() for file in DRIVER_FILES)


def memory_bytes_here(device_type: str) -> int | None:
    """Return the memory of this machine's first CUDA device, or of the machine ("cpu"); None without a device."""
    if device_type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_flops_per_second(device_name: str, number_format: str) -> float | None:
    """Return the dense peak in FLOP/s of a device that CUDA calls `device_name`, for a number format.

    Formats: fp32, tf32, bf16, fp16, fp8, fp4. None if the table has no figure: other devices, slices of a GPU (MIG),
    and formats that the device does not support.
    """
    for pattern, (peaks, _) in PEAK_TFLOPS.items():
        if re.fullmatch(pattern, device_name):
            peak = peaks.get(number_format)
            return None if peak is None else peak * 1e12
    return None


def gemm_format(compute_dtype: str, device: "torch.device") -> str:
    """Return the number format in which `device` multiplies matrices of `compute_dtype`: tf32 for fp32 if allowed."""
    import torch

    if compute_dtype == "fp32" and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return compute_dtype


def device_name(device: "torch.device") -> str:
    """Return the model name of `device`: of the CUDA device or of the processor."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor_name() if device.type == "cpu" else str(device)


def describe_device(device: "torch.device", ranks: int = 1) -> str:
    """Return the devices of a run as text: name, memory or threads, and the number of ranks."""
    import torch

    if device.type == "cuda":
        extent = f"{torch.cuda.get_device_properties(device).total_memory / 2**30:.0f} GiB"
    else:
        extent = f"{torch.get_num_threads()} threads"
    return f"{f'{ranks} x ' if ranks > 1 else ''}{device_name(device)}, {extent}"


def host_peak_bytes() -> int:
    """Return the peak resident set size of this process, in bytes.

    Uses Linux's VmHWM if available, because the value of getrusage is inherited from the parent process.
    """
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()
