"""A stand-in for `transformer_engine_torch`: the emulation's casts in the kernels' layouts, and plain GEMMs.

A cast fills the library's storage classes, in the directions of its quantizer and on the simulated device. A GEMM sees
only the codes and scales of a storage in the direction of its layout: a cast that is missing, or was dropped too early,
is an error. `LOG` has every call.
"""

from enum import IntEnum
from types import ModuleType
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from lightning_llm.config.schema.number_formats import NUMBER_FORMATS
from lightning_llm.config.schema.precision import CastConfig, DelayedConfig, HadamardConfig
from lightning_llm.precision.cast import quantize as emulation
from lightning_llm.precision.cast.nvfp4_scales import NVFP4_RANGE
from lightning_llm.precision.cast.quantize import BlockScales, Operand, rotate, rotation
from lightning_llm.precision.cast.random_bits import Origin, keyed_noise
from lightning_llm.precision.cast.rounding import decode
from lightning_llm.precision.cast.scales import divide, e8m0_value, tensor_amax
from lightning_llm.precision.linear.operands import multiply
from lightning_llm.precision.linear.plan import KEY_COUNT, SLOT_NAMES

DType = IntEnum("DType", {"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6,
                          "kFloat8E4M3": 7, "kFloat8E5M2": 8, "kFloat4E2M1": 10})  # fmt: skip
NAMES = {DType.kFloat8E4M3: "e4m3", DType.kFloat8E5M2: "e5m2", DType.kFloat4E2M1: "e2m1"}
DTYPES = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}
LOG: list["Cast | Gemm"] = []


class Cast(NamedTuple):
    """One call of `quantize`: what its quantiser means along rows and along columns, None where it is not asked for."""

    rows: CastConfig | None
    columns: CastConfig | None
    updates: bool = False


class Gemm(NamedTuple):
    layout: str
    split_accumulator: bool
    bias: bool
    out: torch.Tensor | None = None


def casts_of(quantizer) -> tuple[CastConfig, CastConfig]:
    """Return the casts that one of the library's quantisers means, along rows and along columns."""
    kind, number = type(quantizer).__name__, NAMES[DType(int(quantizer.dtype))]
    assert not getattr(quantizer, "amax_epsilon", 0.0)
    if kind == "NVFP4Quantizer":
        return _four_bits(quantizer)
    if kind == "Float8Quantizer":
        keys = {"scale": "delayed", "delayed": DelayedConfig()}
    elif kind == "MXFP8Quantizer":
        keys = {"block": "32x32" if quantizer.with_2d_quantization else "1x32", "scale": "e8m0_ceil"}
    else:
        keys = {"scale": "power_of_two" if quantizer.force_pow_2_scales else "fp32"}
        if kind == "Float8BlockQuantizer":
            keys["block"] = {1: "1x128", 2: "128x128"}[quantizer.block_scaling_dim]
        else:
            assert kind == "Float8CurrentScalingQuantizer"
    cast = CastConfig.model_validate({"format": number, **keys})
    return cast, cast


def _four_bits(quantizer) -> tuple[CastConfig, CastConfig]:
    assert not quantizer.row_scaled_nvfp4
    assert not quantizer.nvfp4_use_4over6
    assert quantizer.with_rht == quantizer.with_post_rht_amax
    noise = {"rounding": "stochastic", "noise_bits": 8} if quantizer.stochastic_rounding else {}
    block = "16x16" if quantizer.with_2d_quantization else "1x16"
    cast = CastConfig(format="e2m1", block=block, scale="two_level_e4m3", **noise)
    if not quantizer.with_rht:
        return cast, cast
    signs = quantizer.rht_matrix[:, 0].float().sign()  # of diag(signs) H / 4: H begins with a column of ones
    assert torch.equal(quantizer.rht_matrix.float(), rotation(16, signs, signs.device))
    vector = tuple(int(sign) for sign in signs)
    turn = HadamardConfig(size=16, signs="fixed", vector=vector, round_to="bf16")
    return cast, cast.model_copy(update={"hadamard": turn})


def _turned(x, cast):
    """Return `x` as kernels rotate it, before a cast along its columns."""
    if cast.hadamard is None:
        return x
    return rotate(x, rotation(16, torch.tensor(cast.hadamard.vector), x.device), 0, torch.bfloat16)


class Generator:
    """The source of random bits: those of the emulation, for the layer and the part that seeded it last."""

    keys, origin = torch.arange(KEY_COUNT), Origin()


def _noise(x, cast, slot):
    """Return the random bits of dY, the only tensor that is rounded stochastically."""
    return keyed_noise(x, cast, Generator.keys[SLOT_NAMES.index(slot)], Generator.origin)


def _padded(scales, rows, columns):
    return pad(scales, (0, -scales.shape[1] % columns, 0, -scales.shape[0] % rows))


def laid_out(x, cast, axis, noise=None, amax=None):
    """Return one direction of block-scaled `x` [R, C]: (data, scales) in the library's layouts (`get_scale_shape`)."""
    made = emulation.quantize(_turned(x, cast), cast, axis, noise=noise, amax=amax)
    codes, scales = made.codes, made.stored_scale
    if cast.scale == "two_level_e4m3":
        codes, scales = (codes, scales) if axis == 1 else (codes.T, scales.T)
        scales = scales.repeat_interleave(16, 0) if cast.block == "16x16" else scales
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        return packed.contiguous(), _padded(scales.float(), 128, 4).to(torch.float8_e4m3fn).view(torch.uint8)
    if cast.scale == "e8m0_ceil":
        scales = scales.repeat_interleave(32, 1 - axis) if cast.block == "32x32" else scales
        return codes, _padded(scales, *((128, 4) if axis == 1 else (4, 128))).to(torch.uint8)
    scales = scales.T if (axis == 1) == (cast.block == "1x128") else scales
    return (codes if axis == 1 else codes.T.contiguous()), _padded(scales, 1, 4).contiguous()


def quantize(tensor, quantizer, output=None, noop=None):
    """Cast `tensor`, in the directions that `quantizer` is set to, to a new tensor or into `output`'s buffers."""
    assert noop is None
    casts = casts_of(quantizer)
    rows, columns = quantizer.rowwise_usage, quantizer.columnwise_usage
    LOG.append(Cast(casts[0] if rows else None, casts[1] if columns else None, output is not None))
    x = tensor.detach().reshape(-1, tensor.shape[-1])
    assert x.shape[0] % 8 == 0  # `assert_dim_for_fp8_exec`
    group = _group(quantizer)
    parts = rows, columns, group
    whole = casts[0].block == "tensor"
    buffers = _whole(x, casts[0], quantizer, *parts) if whole else _blocks(x, casts, *parts)
    made = _storage(tensor, quantizer, buffers)
    if output is None:
        return made
    for name, value in vars(made).items():
        if isinstance(value, torch.Tensor):
            own = getattr(output, name)
            setattr(output, name, value if own is None else own.copy_(value))
    return output


def _group(quantizer):
    """Return the group over which amaxes are reduced, which kernels ask of the quantizer (`csrc/quantizer.cpp`)."""
    assert type(quantizer).__module__.startswith("transformer_engine.")  # kernels compare the type, not its bases
    if not getattr(quantizer, "with_amax_reduction", False):
        return None
    return quantizer._canonicalized_amax_reduction_group()


def _amax(x, group):
    amax = tensor_amax(x)
    if group is not None:
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
    return amax


def _whole(x, cast, quantizer, rows, columns, group):
    """Return the buffers of a tensor with one scale; from Blackwell on GEMMs read its rows either way."""
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    delayed = cast.scale == "delayed"
    made = emulation.quantize(x, cast, amax=_amax(x, group), delayed=quantizer.scale if delayed else None)
    if delayed:
        quantizer.amax.copy_(torch.fmax(quantizer.amax, tensor_amax(x)))  # merged, as an atomic maximum is
    inverse = made.stored_scale if cast.scale == "power_of_two" else divide(1.0, made.stored_scale)
    either = is_non_tn_fp8_gemm_supported()
    return {
        "data": made.codes if rows or either else None,
        "data_transpose": made.codes.T.contiguous() if columns and not either else None,
        "fp8_scale_inv": inverse.reshape(1),
    }


def _blocks(x, casts, rows, columns, group):
    buffers = {}
    for side, asked, cast, axis, slot in (
        ("rowwise", rows, casts[0], 1, "dgrad.dy"),
        ("columnwise", columns, casts[1], 0, "wgrad.dy"),
    ):
        amax = None
        if asked and cast.scale == "two_level_e4m3":
            amax = _amax(_turned(x, cast) if axis == 0 else x, group)
        data, scales = laid_out(x, cast, axis, _noise(x, cast, slot), amax) if asked else (None, None)
        buffers |= {f"{side}_data": data, f"{side}_scale_inv": scales}
        if cast.scale == "two_level_e4m3":
            buffers[f"amax_{side}"] = amax.reshape(1) if asked else None
    return buffers


def _storage(tensor, quantizer, buffers):
    """Return the library's object for `buffers`, which must have the declared shapes and dtypes."""
    from transformer_engine.pytorch import tensor as library

    name, more = {
        "Float8Quantizer": ("Float8Tensor", {"fp8_dtype": quantizer.dtype}),
        "Float8CurrentScalingQuantizer": ("Float8Tensor", {"fp8_dtype": quantizer.dtype}),
        "Float8BlockQuantizer": ("Float8BlockwiseQTensor", {"fp8_dtype": quantizer.dtype}),
        "MXFP8Quantizer": ("MXFP8Tensor", {"fp8_dtype": quantizer.dtype, "with_gemm_swizzled_scales": False}),
        "NVFP4Quantizer": ("NVFP4Tensor", {"fp4_dtype": quantizer.dtype, "with_gemm_swizzled_scales": False}),
    }[type(quantizer).__name__]
    if name == "Float8BlockwiseQTensor":
        more["is_2D_scaled"] = quantizer.block_scaling_dim == 2
    if not quantizer.internal:
        more |= {"shape": tensor.shape, "dtype": tensor.dtype, "device": tensor.device}
    kind = getattr(library, name + ("Storage" if quantizer.internal else "").replace("TensorStorage", "Storage"))
    made = kind(**buffers, **more, quantizer=quantizer, fake_dtype=tensor.dtype)
    if type(quantizer).__name__ != "Float8Quantizer":  # which declares nothing
        for field, (shape, dtype) in quantizer.inner_tensor_specs(tuple(tensor.shape)).items():
            assert (tuple(getattr(made, field).shape), getattr(made, field).dtype) == (tuple(shape), dtype), field
    return made


def operand(tensor, rows: bool):
    """Return the part of `tensor` [R, C] that a GEMM reads: codes and scales of its rows or columns."""
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    kind = type(tensor).__name__
    if kind == "Float8TensorStorage" or kind == "Float8Tensor":
        turned = not rows and not is_non_tn_fp8_gemm_supported()
        assert not (turned and tensor._transpose_invalid)
        codes = tensor._transpose.T if turned else tensor._data
        return Operand(
            decode(codes, NUMBER_FORMATS[NAMES[DType(int(tensor._fp8_dtype))]]).bfloat16(),
            tensor._scale_inv.reshape(()),
        )
    if isinstance(tensor, torch.Tensor) and kind not in ("Float8BlockwiseQTensor", "MXFP8Tensor", "NVFP4Tensor"):
        return Operand(tensor)
    side, axis = ("rowwise", 1) if rows else ("columnwise", 0)
    data, scales = getattr(tensor, f"_{side}_data"), getattr(tensor, f"_{side}_scale_inv")
    assert data is not None, f"a GEMM reads {side} data that was not made, or not kept"
    if kind.startswith("NVFP4"):
        return _four_bit_operand(data, scales, getattr(tensor, f"_amax_{side}"), axis)
    values = decode(data, NUMBER_FORMATS[NAMES[DType(int(tensor._fp8_dtype))]])
    if kind.startswith("MXFP8"):
        scales = e8m0_value(scales.int()).repeat_interleave(32, axis)
        return Operand((values * scales[: values.shape[0], : values.shape[1]]).bfloat16())
    return _block_operand(values if axis == 1 else values.T, scales, tensor, axis)


def _four_bit_operand(data, scales, amax, axis):
    values = decode(torch.stack([data & 15, data >> 4], -1).reshape(data.shape[0], -1), NUMBER_FORMATS["e2m1"])
    scales = scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
    values = (values * scales[: values.shape[0], : values.shape[1]]).bfloat16()
    return Operand(values if axis == 1 else values.T, amax.reshape(()) * (1.0 / NVFP4_RANGE))


def _block_operand(values, scales, tensor, axis):
    rows, columns = values.shape
    if tensor._is_2D_scaled:
        scales = (scales if axis == 1 else scales.T).repeat_interleave(128, 1 - axis)
    else:
        scales = scales.T if axis == 1 else scales
    shape = (rows, -(-columns // 128)) if axis == 1 else (-(-rows // 128), columns)
    scales = scales[: shape[0], : shape[1]]
    if not tensor._quantizer.force_pow_2_scales:
        return Operand(values.bfloat16(), None, None, BlockScales(scales, 128, axis))
    return Operand((values * scales.repeat_interleave(128, axis)[:rows, :columns]).bfloat16())


def generic_gemm(
    a, transposed_a, b, transposed_b, out, output_quantizer, dtype, bias, bias_dtype, gelu, gelu_in, grad, workspace,
    workspace_size, accumulate, use_split_accumulator, *, comm_overlap=None, comm_type=None, extra_output=None,
    bulk_overlap=False, alpha=1.0, beta=0.0,
):  # fmt: skip
    """Return (b a^T, or b a, or b^T a, ...): operands in cuBLAS's order of columns, and the bias's gradient."""
    assert (output_quantizer, gelu, accumulate, comm_overlap, alpha) == (None, False, False, None, 1.0)
    LOG.append(Gemm("NT"[transposed_a] + "NT"[transposed_b], use_split_accumulator, bias is not None, out))
    left, right = operand(b, rows=not transposed_b), operand(a, rows=transposed_a)
    left = left.flipped if transposed_b else left
    right = right.flipped if transposed_a else right
    added, bias_grad = (None, None) if grad else (bias, None)
    if grad and bias is not None:
        bias_grad = b.float().sum(0).to(b.dtype)
    made = multiply(left, right, DTYPES[DType(int(dtype))], "eager", added)
    if out is not None:
        assert out.dtype == made.dtype
        made = out.copy_(made)
    return made, bias_grad, None, None


def split_quantize(tensor, split_sections, quantizer_list, disable_bulk_allocation=False):
    """Cast each part of `tensor` by its own quantizer, as the library does except for delayed scales and NVFP4.

    A part without rows has the storage of zeros, which no GEMM reads (`te_general_grouped_gemm`).
    """
    assert not disable_bulk_allocation
    assert not {"Float8Quantizer", "NVFP4Quantizer"} & {type(each).__name__ for each in quantizer_list}
    parts = [part if len(part) else tensor.new_zeros(128, tensor.shape[1]) for part in tensor.split(split_sections)]
    return [quantize(*each) for each in zip(parts, quantizer_list, strict=True)]


def te_general_grouped_gemm(
    a, transposed_a, b, transposed_b, out, dtype, m_splits, bias, bias_dtype, single_output, gelu_in, grad, workspace,
    workspace_size, accumulate, use_split_accumulator, sm_count,
):  # fmt: skip
    """Run one GEMM per group into `out`: one tensor of all groups' rows, or one for each. Without rows, zeros."""
    outs = out[0].split(m_splits) if single_output else out
    for left, right, into, rows in zip(a, b, outs, m_splits, strict=True):
        if not rows:
            into.zero_()
            continue
        generic_gemm(
            left, transposed_a, right, transposed_b, into, None, dtype, None, None, False, None, grad, None, 0,
            accumulate, use_split_accumulator,
        )  # fmt: skip
    return bias


def bgrad_quantize(grad, quantizer):
    """Return the bias's gradient and the cast gradient, as the fused kernel does."""
    return grad.sum(0, dtype=torch.float32).to(grad.dtype), quantize(grad, quantizer)


def fp8_transpose(data, dtype, out=None):
    return data.T.contiguous()


class _Names(type):
    """A type of the compiled module that the import mentions: an enumeration with ascending members."""

    def __getattr__(cls, name):
        if name == "__members__":
            return {each: value for each, value in vars(cls).items() if each.startswith("NVTE_")}
        if name.startswith("__"):
            raise AttributeError(name)
        value = len(vars(cls))
        setattr(cls, name, value)
        return value


def module() -> ModuleType:
    """Return `transformer_engine_torch`: the definitions above, and dummy types for all other names."""
    made = ModuleType("transformer_engine_torch")
    own = DType, quantize, split_quantize, generic_gemm, te_general_grouped_gemm, bgrad_quantize, fp8_transpose
    for each in own:
        setattr(made, each.__name__, each)
    gemms, kinds = (1, 2, 3), ("INPUT", "WEIGHT", "OUTPUT")
    forward = [f"GEMM{number}_{kind}" for number in gemms for kind in kinds]
    backward = [f"GRAD_{kind}{number}" for number in gemms for kind in ("OUTPUT", "INPUT")]
    made.get_cublasLt_version, made.get_num_cublas_streams = lambda: 130000, lambda: 1
    made.FP8FwdTensors, made.FP8BwdTensors = (
        IntEnum(name, names, start=0) for name, names in (("FP8FwdTensors", forward), ("FP8BwdTensors", backward))
    )

    def named(name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(made, name, _Names(name, (), {}))
        return getattr(made, name)

    made.__getattr__ = named
    return made
