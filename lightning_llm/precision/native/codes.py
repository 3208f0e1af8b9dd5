"""Comparison of Transformer Engine's codes and scales on a device with the emulation's, at the start of a run.

One small tensor has the difficult cases of a cast: many magnitudes, blocks of zeros, and an outlier that makes its
neighbors subnormal. Stochastic codes must be one of the two neighbors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema.precision import CastConfig, PrecisionConfig
from lightning_llm.linalg.grouped import GroupedLinear, Groups
from lightning_llm.precision.cast.quantize import fixed_signs, quantize, rotate, rotation
from lightning_llm.precision.cast.scales import divide, tensor_amax
from lightning_llm.precision.linear.plan import DTYPES, KEY_COUNT, ROLES, LinearPlan, Shard
from lightning_llm.precision.native import transformer_engine
from lightning_llm.precision.native.grouped import NativeGroupedLinear
from lightning_llm.precision.native.transformer_engine import NativeLinear, engine

SIZE = 256  # whole blocks of every recipe, and tiles of 16 x 16
Shards = Mapping[str, Shard]
"""The parts of X, W and dY that a rank has, by role."""
WHOLE: Shards = {}
COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}


class StoredCodes(NamedTuple):
    """A quantized operand as kernels store it: uint8 `codes` [R, C], fp32 `scales` as `Quantized.stored_scale`."""

    codes: Tensor
    scales: Tensor


def _for_both_directions(quantizer: Any, group: Any) -> Any:
    own = quantizer.copy()
    own.internal = own.optimize_for_gemm = False
    own.set_usage(rowwise=True, columnwise=True)
    own.with_amax_reduction, own.amax_reduction_group = group is not None, group
    return own


def quantized_by(quantizer: Any, tensor: Tensor, group: Any = None) -> Any:
    """Return `tensor` quantized by a quantizer of Transformer Engine, for both directions of GEMMs.

    `group`: process group over which amaxes are reduced, if ranks have parts of a tensor with one scale.
    """
    return _for_both_directions(quantizer, group)(tensor)


def quantized_with_bias_gradient(quantizer: Any, tensor: Tensor, group: Any = None) -> tuple[Tensor, Any]:
    """Return (sum over rows [C], quantized gradient) of a gradient [R, C], as a linear with a bias computes both.

    One kernel makes the two; for blocks of 128 the library sums and casts apart (`grad_output_preprocess`).
    """
    own = _for_both_directions(quantizer, group)
    if type(quantizer).__name__ == "Float8BlockQuantizer":
        return tensor.sum(0), own(tensor)
    summed, made = engine().bias_gradient_and_cast(tensor, own)
    return summed, made


def stored(made: Any, cast: CastConfig, axis: int, shape: tuple[int, int]) -> StoredCodes:
    """Return one direction (`axis`) of a tensor quantized by Transformer Engine, in the layout of the emulation.

    Its layouts (2.20): per tensor `_data` [R, C], `_transpose` [C, R] (none from Blackwell on: its GEMMs read both
    ways) and one `_scale_inv`; per block of 128 columnwise data is transposed, scales of vectors are too, and the last
    axis of scales is padded to a multiple of 4; MXFP8 has neither data transposed, and pads scales to 128 by 4; NVFP4
    packs two codes to a byte, the first in the low half, has columnwise data and scales transposed, and pads scales as
    MXFP8. Both repeat the scale of a square block for each of its rows, columns for columnwise MXFP8.
    """
    rows, columns = shape
    if cast.block == "tensor":
        turned = getattr(made, "_transpose", None)
        turned = None if getattr(made, "_transpose_invalid", False) else turned
        codes = made._data if axis == 1 or turned is None else turned.T
        return StoredCodes(codes.view(torch.uint8), made._scale_inv.reshape(()))
    side = "rowwise" if axis == 1 else "columnwise"
    codes, scales = getattr(made, f"_{side}_data").view(torch.uint8), getattr(made, f"_{side}_scale_inv")
    if cast.number_format.code_bits == 4:
        across, along = shape if axis == 1 else (columns, rows)
        codes = torch.stack([codes & 15, codes >> 4], -1).reshape(across, along)
        scales = scales.view(torch.float8_e4m3fn).float()[:across, : along // 16]
        scales = scales[::16] if cast.block == "16x16" else scales
        return StoredCodes(codes, scales) if axis == 1 else StoredCodes(codes.T, scales.T)
    if cast.block in ("1x128", "128x128"):
        codes = codes if axis == 1 else codes.T
        if cast.block == "1x128":
            return StoredCodes(codes, scales[:, :rows].T if axis == 1 else scales[:, :columns])
        blocks = (-(-rows // 128), -(-columns // 128))
        return StoredCodes(codes, scales[:, : blocks[1]] if axis == 1 else scales[:, : blocks[0]].T)
    down, right = (rows, columns // 32) if axis == 1 else (rows // 32, columns)
    scales = scales.view(torch.uint8)[:down, :right].float()
    if cast.block == "32x32":
        scales = scales[::32] if axis == 1 else scales[:, ::32]
    return StoredCodes(codes, scales)


def emulated(
    tensor: Tensor,
    cast: CastConfig,
    axis: int,
    delayed: Tensor | None = None,
    noise: float | None = None,
    reduce_amax: Callable[[Tensor], Tensor] | None = None,
) -> StoredCodes:
    """Return codes and scales of the emulated cast of `tensor`, rotated by fixed signs, in the form that kernels store.

    `noise` in [0, 1) per element, for stochastic casts. `reduce_amax`: function that replaces an amax by the maximum
    over the ranks with the other parts.
    """
    if (transform := cast.hadamard) is not None and transform.vector is not None:
        signs = fixed_signs(transform.vector, tensor.device)
        matrix = rotation(transform.size, signs, tensor.device)
        tensor = tensor if matrix is None else rotate(tensor, matrix, axis, DTYPES[transform.round_to])
    drawn = None if noise is None else torch.full(tensor.shape, noise, device=tensor.device)
    amax = None if reduce_amax is None or not cast.needs_tensor_amax else reduce_amax(tensor_amax(tensor))
    made = quantize(tensor, cast, axis, delayed=delayed, noise=drawn, amax=amax)
    scales = made.stored_scale.float()
    # Our scale of a whole tensor is the factor of elements, unless it is a power of two; theirs is the inverse.
    inverted = cast.block == "tensor" and cast.has_factor
    return StoredCodes(made.codes, divide(1.0, scales) if inverted else scales)


def axis_of(slot: str) -> int:
    """Return the contraction axis (0 or 1) of the stored tensor of `slot`: x [M, K], w [N, K] or dy [M, N]."""
    return 0 if slot.startswith("wgrad") or slot == "dgrad.w" else 1


def sample(device: torch.device, dtype: torch.dtype, largest: int) -> Tensor:
    """Return a test tensor [SIZE, SIZE]: integers up to `largest` times a power of two (or 0) per 16 x 16 tile.

    With `largest` 15 a rotation over 16 of a tile's elements is exact in bf16, for every order of the sum.
    """
    index = torch.arange(SIZE * SIZE, device=device).reshape(SIZE, SIZE)
    numbers = (index * 7919 + index // 251) % (2 * largest + 1) - largest
    tiles = torch.arange(SIZE // 16, device=device)
    exponents = -((tiles[:, None] * 5 + tiles[None, :] * 3) % 14)
    made = numbers * torch.exp2(exponents.float()).repeat_interleave(16, 0).repeat_interleave(16, 1)
    made[32:64] = 0
    made[:16, 64:80] *= 16  # the outlier: the tensor's amax
    return made.to(dtype)


def _layer(casts: dict[str, CastConfig], device: torch.device, bias: bool, shards: Shards) -> NativeLinear:
    linear = nn.Linear(SIZE, SIZE, bias=bias, device=device)
    layer = NativeLinear("self-check", linear, LinearPlan(casts, "eager", shards))
    layer.keys = torch.zeros(KEY_COUNT, dtype=torch.int64)
    return layer


def quantizers_of(layer: NativeLinear) -> dict[str, Any]:
    """Return {role: quantizer} of a native layer, which exist after its first forward pass."""
    if layer._delayed is not None:
        return dict(layer._delayed.by_role)
    return transformer_engine.quantizers_of(layer._kernel[0])


def difference(theirs: StoredCodes, ours: list[StoredCodes]) -> str | None:
    """Return how native codes and scales differ from `ours` (one result, or both neighbors); None if they are equal."""
    for kind, found, *wanted in zip(("codes", "scales"), theirs, *ours, strict=True):
        if found.shape != wanted[0].shape:
            return f"{kind}: native has shape {tuple(found.shape)}, the emulation {tuple(wanted[0].shape)}"
        wrong = torch.stack([found != each for each in wanted]).all(0)
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            text = " or ".join(dict.fromkeys(f"{each[at].item():g}" for each in wanted))
            return (
                f"{int(wrong.sum())} of {wrong.numel()} {kind} differ, the first at {list(at)}: native "
                f"{found[at].item():g}, emulated {text}"
            )
    return None


def bias_gradient_difference(found: Tensor, dy: Tensor) -> str | None:
    """Return how `found` [C] differs from the sum of `dy` [R, C] over rows; None if it differs by rounding only."""
    wanted = dy.double().sum(0)
    # One rounding to the dtype of dY, and fp32 sums in any order.
    allowed = torch.finfo(dy.dtype).eps * wanted.abs() + len(dy) * 2.0**-24 * dy.double().abs().sum(0)
    off = (found.double() - wanted).abs() > allowed
    return f"{int(off.sum())} of {off.numel()} sums of dY, the bias's gradient, are off" if off.any() else None


def cast_differences(
    casts: dict[str, CastConfig], dtype: torch.dtype, device: torch.device, bias: bool = False, shards: Shards = WHOLE
) -> Iterator[str]:
    """Yield "slot and difference" for each of `casts` that differs from the native cast on `device`.

    `bias`: linears have one, so the kernel that casts dY also sums it, and its sums are checked too. `shards`: parts
    that this rank has of X, W and dY. Each rank then casts tensors of another size; collective.
    """
    layer = _layer(casts, device, bias, shards)
    x = sample(device, dtype, 127).requires_grad_()
    layer(x).sum().backward()  # which makes the quantizers
    for role in _casts_of_parts_alone(layer, x):
        yield f"{role}: a rank's part is cast by its own amax, instead of the whole tensor's"
    delayed = torch.tensor([0.3, 1.7, 900.0], device=device)
    if layer._delayed is not None:
        layer._delayed.use(delayed, None)
    quantizers = quantizers_of(layer)
    for slot, cast in casts.items():
        if not cast.quantizes:
            continue
        role, axis = slot.split(".")[1], axis_of(slot)
        shard, group = shards.get(role, Shard()), layer.groups.get(role)
        given = sample(device, dtype, 15 if cast.hadamard else 127) * 2.0 ** (shard.part % 5)
        if role == "dy" and bias:
            summed, made = quantized_with_bias_gradient(quantizers[role], given, group)
            if text := bias_gradient_difference(summed, given):
                yield f"{slot}: {text}"
        else:
            made = quantized_by(quantizers[role], given, group)
        theirs = stored(made, cast, axis, (SIZE, SIZE))
        scale = delayed[ROLES.index(role)] if cast.scale_kind.from_history else None
        reduce = None if group is None else shard.reduce_amax
        draws = (0.0, 255 / 256) if cast.stochastic else (None,)
        if text := difference(theirs, [emulated(given, cast, axis, scale, noise, reduce) for noise in draws]):
            yield f"{slot} ({cast.format} {cast.block} {cast.scale}): {text}"


def _casts_of_parts_alone(layer: NativeLinear, x: Tensor) -> list[str]:
    """Return the roles that should reduce their amax over ranks, and do not in a forward and backward pass of `layer`.

    A kernel that reduces asks its quantizer for the group (`csrc/quantizer.cpp`).
    """
    asked = set()
    if not layer.groups:
        return []
    for role, quantizer in quantizers_of(layer).items():

        def group_of(role: str = role) -> Any:
            asked.add(role)
            return layer.groups[role]

        quantizer._canonicalized_amax_reduction_group = group_of
    layer(x).sum().backward()
    for quantizer in quantizers_of(layer).values():
        del quantizer._canonicalized_amax_reduction_group
    cast = {slot.split(".")[1] for slot, cast in layer.plan.casts.items() if cast.quantizes}
    return [role for role in layer.groups if role in cast - asked]


EXPERT_ROWS = (256, 0, 128, 128)
"""Rows of the experts in the check: whole blocks of every recipe, and an expert without any."""
GROUPED_LIMIT = 2.0**-6
"""Largest relative difference, by norms, of products for all experts at once from those for each: both round to 16 bits
(2^-9), and FP8 sums on Hopper have 14 bits."""


def expert_differences(casts: dict[str, CastConfig], dtype: torch.dtype, device: torch.device) -> Iterator[str]:
    """Yield how linears of several experts in one call differ from the recipe; nothing if experts run one by one.

    Codes and scales of each expert's rows must equal those of `casts`, and the products of both ways nearly agree.
    """
    linear = GroupedLinear(len(EXPERT_ROWS), SIZE, SIZE).to(device)
    layer = NativeGroupedLinear("self-check", linear, [LinearPlan(casts, "eager")] * len(EXPERT_ROWS), 1)
    rows = list(EXPERT_ROWS)
    x = sample(device, dtype, 127).repeat(2, 1)
    with torch.no_grad():
        layer.weight.copy_(sample(device, dtype, 15).repeat(len(rows), 1))
    groups = Groups(torch.tensor(rows, device=device), len(x))
    products = [_products_of_experts(layer, x, groups, one_by_one) for one_by_one in (False, True)]
    if not layer._kernel:
        return
    for name, at_once, alone in zip(("y", "dx", "dw"), *products, strict=True):
        error = float((at_once.double() - alone.double()).norm() / alone.double().norm())
        if not error <= GROUPED_LIMIT:  # not a number, too
            yield f"experts: {name} of all at once is {error:.3g} from that of each, relatively"
    scales = {"scaling_fwd": {"x": 0, "w": 1}, "scaling_bwd": {"dy": 0}}
    for kind, role, at in ((kind, role, at) for kind, roles in scales.items() for role, at in roles.items()):
        every = layer._kernel[0].quantizers[kind]
        own = every[at :: len(every) // len(rows)]
        made = engine().split_and_cast(x, rows, [_for_both_directions(each, None) for each in own], False)
        for slot, cast in casts.items():
            if slot.split(".")[1] != role or not cast.quantizes:
                continue
            for theirs, part in zip(made, x.split(rows), strict=True):
                ours = [emulated(part, cast, axis_of(slot))] if len(part) else []
                found = stored(theirs, cast, axis_of(slot), (len(part), SIZE)) if ours else None
                if found is not None and (text := difference(found, ours)):
                    yield f"{slot} of experts ({cast.format} {cast.block} {cast.scale}): {text}"


def _products_of_experts(layer: NativeGroupedLinear, x: Tensor, groups: Groups, one_by_one: bool) -> list[Tensor]:
    """Return y, dx and dw of a pass whose dY is x."""
    operand, layer.weight.grad = x.clone().requires_grad_(), None
    layer.one_by_one = one_by_one
    y = layer(operand, groups)
    y.backward(x)
    made = [y.detach(), operand.grad, layer.weight.grad]
    return [each for each in made if each is not None]


def check_native_casts(
    recipe: PrecisionConfig,
    device: torch.device,
    bias: bool = False,
    parts: Sequence[Shards] = (WHOLE,),
    experts: bool = False,
) -> str | None:
    """Compare Transformer Engine's casts of a small tensor on `device` with those of `recipe`, bit for bit.

    `bias`: whether linears have one. `parts`: the ways in which ranks cut linears; collective if they cut any.
    `experts`: whether the model has some, so that one call casts the rows of several. Returns None, or a note if this
    release stores quantized tensors in an unknown layout, so that nothing can be compared.

    Raises:
        ConfigError: with the first difference in every slot that has one.
    """
    problems = []
    for key, casts in recipe.cast_sets().items():
        if any(cast.quantizes for cast in casts.values()):
            try:
                dtype = COMPUTE[recipe.compute_dtype]
                found = [each for part in parts for each in cast_differences(casts, dtype, device, bias, part)]
                found += expert_differences(casts, dtype, device) if experts else []
            except AttributeError as error:
                return f"note   native casts were not checked: this Transformer Engine stores them otherwise ({error})"
            problems += [f"{key}.{text}" if key else text for text in found]
    if problems:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        text = f"would run {recipe.name} natively, and on {where} Transformer Engine's casts are not the recipe's"
        ways = "Set emulated, or fix the library."
        raise ConfigError([Problem("precision.backend", f"{text}: {each}. {ways}") for each in dict.fromkeys(problems)])
    return None
