"""A stand-in for Transformer Engine 2.20 on a CPU: its interface as documented, its arithmetic that of the emulation.

It is stricter than the library where the library is silent (unknown arguments of recipes), and keeps the habits that
matter: a kernel goes on with the quantisers of the first recipe of a class, weights must have the activations' dtype,
sizes are refused, amaxes are merged in place, a module has extra state.
"""

import math
import sys
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from lightning_llm.config.schema.precision import CastConfig, DelayedConfig, HadamardConfig
from lightning_llm.precision.linear import LinearPlan, quantised_linear
from lightning_llm.precision.native import codes as native_codes

DType = Enum("DType", ["kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1"])
Format = Enum("Format", ["E4M3", "E5M2", "HYBRID", "E2M1"])
NVFP4_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@dataclass(frozen=True)
class MMParams:
    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    power_2_scale: bool = False
    amax_epsilon: float = 0.0


@dataclass
class DelayedScaling:
    fp8_format: Format = Format.HYBRID


@dataclass
class Float8CurrentScaling:
    use_power_2_scales: bool = True  # as if an environment variable said so
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(False)
    fp8_gemm_dgrad: MMParams = MMParams(True)
    fp8_gemm_wgrad: MMParams = MMParams(True)
    backward_override: str | None = "dequantized"  # as if an environment variable said so
    fp8_quant_fwd_inp: QParams = field(default=QParams(True), init=False)
    fp8_quant_fwd_weight: QParams = field(default=QParams(True), init=False)
    fp8_quant_bwd_grad: QParams = field(default=QParams(True), init=False)


@dataclass
class Float8BlockScaling:
    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(True)
    fp8_gemm_dgrad: MMParams = MMParams(True)
    fp8_gemm_wgrad: MMParams = MMParams(True)
    backward_override: str | None = "dequantized"
    fp8_quant_fwd_inp: QParams = field(default=QParams(False, 1.0), init=False)
    fp8_quant_fwd_weight: QParams = field(default=QParams(False, 1.0), init=False)
    fp8_quant_bwd_grad: QParams = field(default=QParams(False, 1.0), init=False)


@dataclass
class MXFP8BlockScaling:
    fp8_format: Format = Format.E4M3
    backward_override: str | None = "dequantized"
    enable_2d_quantization: bool = True


@dataclass
class NVFP4BlockScaling:
    disable_rht: bool = True
    disable_stochastic_rounding: bool = True
    disable_2d_quantization: bool = True
    row_scaled_activation: bool = True
    nvfp4_4over6: str = "all"
    backward_override: str | None = "dequantized"


@dataclass
class CustomRecipe:
    qfactory: Any
    fp8_format: Format = Format.HYBRID
    backward_override: str | None = "dequantized"


class Float8Quantizer:
    def __init__(self, scale, amax, fp8_dtype, *, rowwise=True, columnwise=True):
        assert scale.numel() == 1
        assert amax.shape == (1,)
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype

    def set_usage(self, *, rowwise, columnwise):
        assert rowwise
        assert columnwise

    def __call__(self, tensor):
        name = {DType.kFloat8E4M3: "e4m3", DType.kFloat8E5M2: "e5m2"}[self.dtype]
        cast = CastConfig(format=name, scale="delayed", delayed=DelayedConfig())
        return laid_out(tensor, cast, 1, self.scale)


class Quantizer(Float8Quantizer):
    """Of a tensor whose scale comes from itself, by its casts along rows and along columns."""

    def __init__(self, by_rows, by_columns):
        self.casts = by_rows, by_columns

    def __call__(self, tensor):
        rows, columns = (vars(laid_out(tensor, cast, axis)) for cast, axis in zip(self.casts, (1, 0), strict=True))
        return SimpleNamespace(**columns, **{key: value for key, value in rows.items() if key not in columns})


def laid_out(x, cast, axis, delayed=None):
    """Lay out what the emulation makes as Transformer Engine lays it out (its 2.20 `get_scale_shape`)."""
    made = native_codes.emulated(x, cast, axis, delayed, 0.5 if cast.stochastic else None)
    codes, scales = made
    if cast.block == "tensor":
        return SimpleNamespace(_data=codes, _transpose=codes.T.contiguous(), _scale_inv=scales.reshape(1))
    side = "rowwise" if axis == 1 else "columnwise"
    if cast.scale == "two_level_e4m3":
        codes, scales = (codes, scales) if axis == 1 else (codes.T, scales.T)
        scales = scales.repeat_interleave(16, 0) if cast.block == "16x16" else scales
        codes = codes[:, ::2] | codes[:, 1::2] << 4
        padded = torch.zeros(-(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 4) * 4)
        padded[: scales.shape[0], : scales.shape[1]] = scales
        scales = padded.to(torch.float8_e4m3fn).view(torch.uint8)
        return SimpleNamespace(**{f"_{side}_data": codes, f"_{side}_scale_inv": scales})
    if cast.block in ("1x32", "32x32"):
        padded = torch.zeros(-(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 128) * 128)
        padded[: scales.shape[0], : scales.shape[1]] = scales
        return SimpleNamespace(**{f"_{side}_data": codes, f"_{side}_scale_inv": padded.to(torch.uint8)})
    if cast.block == "1x128" and axis == 1:
        scales = scales.T
    if cast.block == "128x128" and axis == 0:
        scales = scales.T
    scales = torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4))
    return SimpleNamespace(**{f"_{side}_data": codes if axis == 1 else codes.T, f"_{side}_scale_inv": scales})


class Autocast:
    active: list[Any] = []

    def __init__(self, enabled=True, calibrating=False, recipe=None, amax_reduction_group=None):
        self.recipe = recipe if enabled else None

    def __enter__(self):
        Autocast.active.append(self.recipe)

    def __exit__(self, *_):
        Autocast.active.pop()


def _fp8(number: Format, block: str, pow2: bool, gradient: bool = False) -> CastConfig:
    name = "e5m2" if gradient and number is Format.HYBRID else "e4m3"
    return CastConfig(format=name, block=block, scale="power_of_two" if pow2 else "fp32")


def read(recipe: Any) -> dict[str, CastConfig]:
    """Return the six casts that a recipe of Transformer Engine means."""
    if isinstance(recipe, NVFP4BlockScaling):
        assert not recipe.row_scaled_activation
        assert recipe.nvfp4_4over6 == "none"
        turn = HadamardConfig(size=16, signs="fixed", vector=NVFP4_SIGNS, round_to="bf16")
        turn = None if recipe.disable_rht else turn
        noise = {} if recipe.disable_stochastic_rounding else {"rounding": "stochastic", "noise_bits": 8}
        row = {"format": "e2m1", "block": "1x16", "scale": "two_level_e4m3"}
        x, dy = CastConfig(**row), CastConfig(**row, **noise)
        w = CastConfig(**{**row, "block": "1x16" if recipe.disable_2d_quantization else "16x16"})
        turned_x, turned_dy = CastConfig(**row, hadamard=turn), CastConfig(**row, **noise, hadamard=turn)
    else:
        number = recipe.fp8_format
        if isinstance(recipe, MXFP8BlockScaling):
            x = CastConfig(format="e4m3", block="1x32", scale="e8m0_ceil")
            w = x.model_copy(update={"block": "32x32"}) if recipe.enable_2d_quantization else x
            dy = x.model_copy(update={"format": "e5m2" if number is Format.HYBRID else "e4m3"})
        else:
            scales = [recipe.fp8_quant_fwd_inp, recipe.fp8_quant_fwd_weight, recipe.fp8_quant_bwd_grad]
            assert not any(each.amax_epsilon for each in scales)
            block = isinstance(recipe, Float8BlockScaling)
            shapes = ("1x128", "128x128", "1x128") if block else ("tensor",) * 3
            assert not block or (recipe.x_block_scaling_dim, recipe.w_block_scaling_dim) == (1, 2)
            pow2 = [each.power_2_scale for each in scales]
            x, w = _fp8(number, shapes[0], pow2[0]), _fp8(number, shapes[1], pow2[1])
            dy = _fp8(number, shapes[2], pow2[2], gradient=True)
        turned_x, turned_dy = x, dy
    if recipe.backward_override == "high_precision":
        return {"fprop.x": x, "fprop.w": w, **dict.fromkeys(SLOTS[2:], CastConfig())}
    assert recipe.backward_override is None
    return {"fprop.x": x, "fprop.w": w, "dgrad.dy": dy, "dgrad.w": w, "wgrad.dy": turned_dy, "wgrad.x": turned_x}


class Linear(nn.Module):
    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device="cuda", name=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=params_dtype))
        assert not bias
        self.name, self.first, self.calls = name, None, 0

    def get_extra_state(self):
        return torch.zeros(1)

    def set_extra_state(self, state):
        raise AssertionError("no checkpoint holds extra state")

    def forward(self, inp, is_first_microbatch=None):
        recipe = Autocast.active[-1]
        if type(self.first) is not type(recipe):
            self.first = recipe
        if isinstance(self.first, CustomRecipe):
            assert self.first is recipe
        for name in ("fprop", "dgrad", "wgrad"):
            assert getattr(self.first, f"fp8_gemm_{name}", MMParams(True)).use_split_accumulator
        for tensor in (inp, self.weight):
            if math.prod(tensor.shape[:-1]) % 8 or tensor.shape[-1] % 16:
                raise ValueError(f"FP8 execution refuses {tuple(tensor.shape)}")
        if self.weight.dtype != inp.dtype:
            raise TypeError("Data types for parameters must match when outside of autocasted region.")
        self.calls += 1
        if isinstance(self.first, CustomRecipe):
            return self._delayed(inp)
        return quantised_linear(inp, self.weight, None, LinearPlan(read(self.first), "eager"), self.keys())

    @property
    def quantizers(self):
        casts = read(self.first)
        x, w, dy = (
            Quantizer(casts[f"{by_rows}"], casts[f"{by_columns}"])
            for by_rows, by_columns in (("fprop.x", "wgrad.x"), ("fprop.w", "dgrad.w"), ("dgrad.dy", "wgrad.dy"))
        )
        return {"scaling_fwd": [x, w, None], "scaling_bwd": [dy, None]}

    def keys(self):
        """Return what stands for the GPU's own random bits."""
        return torch.arange(9) + torch.initial_seed() % 1000

    def _delayed(self, inp):
        roles = {"x": "input", "w": "weight", "dy": "grad_output"}
        quantizers = {role: self.first.qfactory(SimpleNamespace(tensor_type=each)) for role, each in roles.items()}
        for unused in (None, SimpleNamespace(tensor_type="output")):
            assert self.first.qfactory(unused) is not None
        names = {DType.kFloat8E4M3: "e4m3", DType.kFloat8E5M2: "e5m2"}
        cast = {
            role: CastConfig(format=names[each.dtype], scale="delayed", delayed=DelayedConfig())
            for role, each in quantizers.items()
        }
        plan = LinearPlan({slot: cast[slot.split(".")[1]] for slot in SLOTS}, "eager")

        def merge(role, tensor):
            amax = quantizers[role].amax
            amax.copy_(torch.fmax(amax, tensor.detach().float().abs().amax()))

        scales = torch.stack([quantizers[role].scale for role in ("x", "w", "dy")]).clone()
        return quantised_linear(inp, self.weight, None, plan, None, scales, merge)


SLOTS = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")


def modules() -> dict[str, ModuleType]:
    """Return what `sys.modules` has with it installed."""
    made = {
        name: ModuleType(name)
        for name in (
            "transformer_engine", "transformer_engine.pytorch", "transformer_engine.common",
            "transformer_engine.common.recipe", "transformer_engine.pytorch.tensor",
            "transformer_engine.pytorch.tensor.float8_tensor", "transformer_engine_torch",
        )
    }  # fmt: skip
    for name, module in made.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
    made["transformer_engine_torch"].DType = DType
    made["transformer_engine.pytorch"].Linear = Linear
    made["transformer_engine.pytorch"].autocast = Autocast
    made["transformer_engine.pytorch.tensor.float8_tensor"].Float8Quantizer = Float8Quantizer
    here = sys.modules[__name__]
    for name in (
        "Format", "MMParams", "QParams", "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling",
        "MXFP8BlockScaling", "NVFP4BlockScaling", "CustomRecipe",
    ):  # fmt: skip
        setattr(made["transformer_engine.common.recipe"], name, getattr(here, name))
    return made
