import pytest
import torch
from lightning.fabric.utilities import throughput

from lightning_llm.base.hardware import PEAK_TFLOPS, describe_device, device_name, gemm_format, peak_flops_per_second


@pytest.mark.parametrize(
    "name",
    ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA L4", "Tesla T4"],
)
@pytest.mark.parametrize(
    ("kind", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_peaks_agree_with_lightnings_table_where_that_is_dense(
    name: str, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its figures for H200 and H100 NVL are with sparsity, GeForce's without tensor cores, and an L40 gets an L4's.
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr("lightning.fabric.accelerators.cuda._is_ampere_or_later", lambda: False)
    theirs = throughput.get_available_flops(torch.device("cuda"), dtype)
    ours = peak_flops_per_second(name, kind)
    assert ours == (None if theirs is None else pytest.approx(theirs, rel=2e-3))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("AMD EPYC", "bf16"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("NVIDIA H100 Imaginary", "bf16"),
        ("NVIDIA A100-SXM4-80GB", "fp8"),
        ("NVIDIA H200", "fp4"),
        ("", "fp32"),
    ],
)
def test_unknown_devices_have_no_peak(name: str, kind: str) -> None:
    assert peak_flops_per_second(name, kind) is None


@pytest.mark.parametrize("pattern", PEAK_TFLOPS)
def test_each_halving_of_bits_doubles_tensor_core_peaks(pattern: str) -> None:
    peaks, source = PEAK_TFLOPS[pattern]
    assert source.startswith("https://")
    for wide, narrow in (("tf32", "bf16"), ("bf16", "fp8"), ("fp8", "fp4")):
        if wide in peaks and narrow in peaks:
            assert peaks[narrow] / peaks[wide] == pytest.approx(2, rel=0.03)


def test_h200_computes_like_h100() -> None:
    for kind in ("fp32", "tf32", "bf16", "fp8"):
        assert peak_flops_per_second("NVIDIA H200", kind) == peak_flops_per_second("NVIDIA H100 80GB HBM3", kind)


def test_this_device_has_a_name() -> None:
    cpu = torch.device("cpu")
    assert device_name(cpu)
    assert describe_device(cpu, 2) == f"2 x {device_name(cpu)}, {torch.get_num_threads()} threads"
    assert peak_flops_per_second(device_name(cpu), "fp32") is None


def test_fp32_gemms_count_as_tf32_only_where_torch_may_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gemm_format("fp32", torch.device("cpu")) == "fp32"
    assert gemm_format("bf16", torch.device("cuda")) == "bf16"
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert gemm_format("fp32", torch.device("cuda")) == "tf32"
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert gemm_format("fp32", torch.device("cuda")) == "fp32"
