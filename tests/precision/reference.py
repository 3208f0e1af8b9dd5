"""The specification of every cast and of the linear layer, in numpy and float64, written apart from the package.

Elements are looked up in a table of the format's numbers, scales come from float64 logarithms or np.float32 divisions,
transposes are explicit: every operand is handled with its contraction axis last.
"""

import numpy as np

from lightning_llm.config.schema.precision import CastConfig, PrecisionConfig

F32 = np.float32
FIELDS = {
    "e4m3": (4, 3, 7, 448.0),
    "e5m2": (5, 2, 15, 57344.0),
    "e2m1": (2, 1, 1, 6.0),
    "e2m3": (2, 3, 1, 7.5),
    "e3m2": (3, 2, 3, 28.0),
    "e1m2": (1, 2, 1, 1.75),
    "e5m6": (5, 6, 15, 65024.0),
    "grid_m1_e-3_3_max8.0": (3, 1, 4, 8.0),
}
"""Exponent bits, mantissa bits, bias and largest number of each float, from its source."""
INTEGERS = {"int8": 127, "int4": 7, "ternary": 1}
LARGEST = {name: fields[3] for name, fields in FIELDS.items()} | INTEGERS
MANTISSA_BITS = {name: fields[1] for name, fields in FIELDS.items()} | {"int8": 6, "int4": 2, "ternary": 0}
EMAX = {name: int(np.log2(largest)) for name, largest in LARGEST.items()}


def grid(name):
    """All magnitudes of a format in order; the index is the code, so an even index is an even mantissa."""
    if name in INTEGERS:
        return np.arange(INTEGERS[name] + 1.0)
    exponent_bits, mantissa_bits, bias, _ = FIELDS[name]
    numbers = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            power = 2.0 ** (max(exponent, 1) - bias)
            numbers.append(power * (fraction if exponent == 0 else 1 + fraction))
    return np.array([number for number in numbers if number <= LARGEST[name]])


def round_elements(v, name, rounding, noise=None):
    """Round float64 `v` to the format's table, saturating."""
    table = grid(name)
    magnitude = np.minimum(np.abs(v), table[-1])
    low = np.searchsorted(table, magnitude, side="right") - 1
    high = np.minimum(low + 1, len(table) - 1)
    gap = np.where(high > low, table[high] - table[low], 1.0)
    fraction = (magnitude - table[low]) / gap
    if rounding == "even":
        up = (fraction > 0.5) | ((fraction == 0.5) & (low % 2 == 1))
    elif rounding == "half_away":
        # In fp32, as microxcaling adds a half: a sum just below a whole number may round up to it.
        up = (F32(magnitude / gap) + F32(0.5)) >= F32(table[high] / gap)
    elif rounding == "half_to_zero":
        up = fraction > 0.5
    elif rounding == "stochastic":
        # In fp32, as the cast adds them: a sum just below a whole number may round up to it.
        up = (F32(magnitude / gap) + F32(noise)) >= F32(table[high] / gap)
    else:
        up = noise < fraction
    return np.copysign(np.where(up, table[high], table[low]), v)


def blocks_of(x, block):
    """Per-block (amax, x) of [rows, contraction], amax broadcast to every element."""
    if block == "tensor":
        return np.full_like(x, np.abs(x).max())
    height, width = (1, x.shape[1]) if block == "row" else (int(each) for each in block.split("x"))
    out = np.empty_like(x)
    for row in range(0, x.shape[0], height):
        for column in range(0, x.shape[1], width):
            part = np.s_[row : row + height, column : column + width]
            out[part] = np.abs(x[part]).max()
    return out


def per_block(x, block, function):
    """`function` of every 1 x width block, broadcast to its elements."""
    width = int(block.split("x")[1])
    out = np.empty_like(x)
    for row in range(x.shape[0]):
        for column in range(0, x.shape[1], width):
            out[row, column : column + width] = function(x[row, column : column + width])
    return out


def cast(x, how: CastConfig, noise=None, delayed=None):
    """Dequantised float64 [rows, contraction], and QuEST's mask."""
    x = np.asarray(x, dtype=np.float64)
    amax = blocks_of(x, how.block)
    safe = np.where(amax == 0, 1.0, amax)
    largest = LARGEST[how.format] * how.headroom
    if how.scale == "eden":
        return eden(x, how, noise), None
    if how.scale == "unit":
        return round_elements(x, how.format, how.rounding, noise), None
    if how.scale == "quest":
        power = per_block(x, how.block, quest_power)
        return round_elements(x / power, how.format, how.rounding) * power, np.abs(x / power) < 6
    if how.scale == "two_level_e4m3":
        whole = np.abs(x).max(1, keepdims=True).astype(F32) if how.amax == "row" else F32(np.abs(x).max())
        with np.errstate(over="ignore", divide="ignore"):
            encode = np.minimum(F32(how.scale_max * largest) / whole, np.finfo(F32).max)
        encode = np.where(whole == 0, F32(1), encode)
        found = [
            two_level(x, amax, whole, encode, how, factor, noise)
            for factor in (how.candidates.factors if how.candidates else (None,))
        ]
        made, error = found[0]
        for other, its in found[1:]:
            made, error = np.where(its < error, other, made), np.where(its < error, its, error)
        return made, None
    if how.scale.startswith("e8m0"):
        if how.scale == "e8m0_floor":
            power = 2.0 ** (np.floor(np.log2(safe)) - EMAX[how.format])
        elif how.scale == "e8m0_even":  # the mantissa of amax is rounded half up to the format's first
            step = 2.0 ** (np.floor(np.log2(safe)) - MANTISSA_BITS[how.format])
            power = 2.0 ** (np.floor(np.log2(np.floor(safe / step + 0.5) * step)) - EMAX[how.format])
        else:
            power = 2.0 ** np.ceil(np.log2(safe / largest))
        power = np.maximum(power, 2.0**-127)  # E8M0's least number
        scaled = (x * how.prescale).astype(F32).astype(np.float64) / power
        return round_elements(scaled, how.format, how.rounding, noise) * power / how.prescale, None
    if how.scale == "delayed":
        scale = np.full_like(x, delayed).astype(F32)
    else:
        with np.errstate(over="ignore"):
            scale = F32(largest) / safe.astype(F32)
        most = np.finfo(F32).max if how.block == "tensor" else (2 - 2.0**-7) * 2.0**127  # of the operand's bf16
        scale = np.minimum(scale, F32(most))
        if how.scale == "power_of_two":
            scale = (2.0 ** np.floor(np.log2(scale.astype(np.float64)))).astype(F32)
    values = round_elements((x.astype(F32) * scale).astype(np.float64), how.format, how.rounding, noise)
    return values / scale.astype(np.float64), None


def two_level(x, amax, whole, encode, how, factor, noise):
    """NVFP4's numbers under one block scale, times `factor` for a candidate, and the error of every element's block."""
    largest = F32(LARGEST[how.format] * how.headroom)
    base = (amax.astype(F32) / largest) * encode * F32(factor or 1)
    base = base if factor else amax.astype(F32) * (encode * (F32(1) / largest)).astype(F32)
    sf = round_elements(np.minimum(base, F32(448)).astype(np.float64), "e4m3", "even").astype(F32)
    with np.errstate(divide="ignore"):  # a block scale of 0 takes the largest fp32 for a multiplier
        multiplier = np.minimum(F32(1) / (sf * (F32(1) / encode)), np.finfo(F32).max)
    values = round_elements((x.astype(F32) * multiplier).astype(np.float64), how.format, how.rounding, noise)
    bound = how.scale_max * float(largest)
    made = values * sf * whole.astype(np.float64) / how.scale_max / (LARGEST[how.format] * how.headroom)
    if factor is None:
        return made, None
    error = np.abs(values.astype(F32) * sf * whole / F32(bound) - x.astype(F32))
    error = error * error if how.candidates.by == "mse" else error
    if how.block == "16x16":
        rows = error.reshape(-1, 16, error.shape[1] // 16, 16)
        total = by_halves(np.add.accumulate(rows, axis=3)[..., -1].swapaxes(0, 1))
        return made, np.kron(total, np.ones((16, 16)))
    total = np.maximum.reduce if how.candidates.by == "max" else lambda group: np.add.accumulate(group)[-1]
    return made, per_block(error, how.block, total)


def eden(x, how, noise):
    """Quartet II's `eden_1x16s_fp4_kernel` after its rotation: a correction of each rotation group's block scales."""
    largest, group = F32(LARGEST[how.format] * how.headroom), how.hadamard.size
    whole = F32(how.scale_max * LARGEST[how.format] * how.headroom)
    columns = x.shape[1]
    x, noise = (np.pad(each, ((0, 0), (0, -columns % group))) for each in (x, noise))
    amax = F32(np.abs(x).max())
    with np.errstate(over="ignore"):
        encode = F32(1) if amax == 0 else min(F32(whole / amax), np.finfo(F32).max)
    blocks = x.astype(F32).reshape(len(x), -1, 16)
    wanted = np.abs(blocks).max(2) * F32(encode * F32(1 / float(largest)))
    scale = round_elements(wanted.astype(np.float64), "e4m3", "even").astype(F32)
    scale = np.where(scale == 0, F32(1), scale)[..., None]
    with np.errstate(over="ignore"):
        elements = blocks * np.minimum(F32(1) / (scale * (F32(1) / encode)), np.finfo(F32).max)
    codes = round_elements(elements.astype(np.float64), how.format, how.rounding).astype(F32)

    def of_groups(each):  # sums of blocks, then of the blocks of a group, by halves
        sums = by_halves(np.moveaxis(each, 2, 0)).reshape(len(x), -1, group // 16)
        return np.repeat(by_halves(np.moveaxis(sums, 2, 0)), group // 16, axis=1)

    squares, products = of_groups(elements * elements), of_groups(elements * codes)
    ratio = squares.astype(np.float64) / np.where(products > 0, products, 1)
    correction = np.where(products > 0, ratio, 1.0).astype(F32)[..., None]
    first = noise.reshape(blocks.shape)[..., :1]
    scale = round_elements((scale * correction).astype(np.float64), "e4m3", "stochastic_compare", first)
    return ((codes * scale).reshape(x.shape) * float(amax) / float(whole))[:, :columns]


def quest_power(group):
    """The moments are fp32 sums by halving: the variance of a near-constant block is rounding alone, below 0 too."""
    mean, square = (by_halves(each) / F32(len(group)) for each in (group.astype(F32), group.astype(F32) ** 2))
    std = F32(np.sqrt(np.float64(max(square - mean * mean, F32(0)))))
    return 2.0 ** np.floor(np.log2(np.float64(F32(2.92247856 / 6) * std + F32(1e-8))))


def by_halves(group):
    while len(group) > 1:
        group = group[: len(group) // 2] + group[len(group) // 2 :]
    return group[0]


def sylvester(size):
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h


def rotated(x, how: CastConfig, signs, bf16):
    """x S over groups of the last axis, S = diag(signs) H / sqrt(g)."""
    if how.hadamard is None:
        return x
    size = how.hadamard.size
    s = np.diag(np.ones(size) if signs is None else signs) @ sylvester(size) / np.sqrt(size)
    out = (x.reshape(-1, size) @ s).reshape(x.shape)
    return bf16(out) if how.hadamard.round_to == "bf16" else out


def linear(x, w, dy, recipe: PrecisionConfig, noise, signs, delayed, bf16):
    """Return (Y, dX, dW) in float64 from the six slots. `noise[slot]` has the operand's layout, contraction axis last.

    `signs[gemm]` or None; `delayed[role]` the multipliers; `bf16` rounds an array to bf16.
    """

    def operand(tensor, slot):
        gemm, role = slot.split(".")
        how = getattr(getattr(recipe, gemm), role)
        if not how.quantizes:
            return tensor, None
        return cast(rotated(tensor, how, signs[gemm], bf16), how, noise.get(slot), delayed.get(role))

    def through(gradient, mask, how):
        if how.clip_gradient:
            gradient = gradient * mask
        if how.hadamard is None:
            return gradient
        size, turned = how.hadamard.size, signs["fprop"]
        s = np.diag(np.ones(size) if turned is None else turned) @ sylvester(size) / np.sqrt(size)
        return (gradient.reshape(-1, size) @ s.T).reshape(gradient.shape)

    xq, x_mask = operand(x, "fprop.x")
    wq, w_mask = operand(w, "fprop.w")
    again_w = recipe.dgrad.w.source == "quantised"
    again_x = recipe.wgrad.x.source == "quantised"
    dx = operand(dy, "dgrad.dy")[0] @ operand((bf16(wq) if again_w else w).T, "dgrad.w")[0].T
    dw = operand(dy.T, "wgrad.dy")[0] @ operand((bf16(xq) if again_x else x).T, "wgrad.x")[0].T
    dx = through(dx, x_mask, recipe.fprop.x) if again_w else dx
    dw = through(dw, w_mask, recipe.fprop.w) if again_x else dw
    return xq @ wq.T, dx, dw
