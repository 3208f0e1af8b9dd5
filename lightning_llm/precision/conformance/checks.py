"""Checks of recorded cases against the emulation: casts, scales, blocks, GEMMs of linear layers, state machines."""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_llm.config.schema.number_formats import NUMBER_FORMATS
from lightning_llm.config.schema.precision import CastConfig, DelayedConfig, LossScalingConfig, Rounding, Scale
from lightning_llm.precision.cast import inductor, nvfp4_scales, scales
from lightning_llm.precision.cast.quantize import rotate, rotation
from lightning_llm.precision.cast.rounding import FLOAT_MAX, round_to_format
from lightning_llm.precision.conformance.case import Case, Check
from lightning_llm.precision.linear import delayed
from lightning_llm.precision.linear.operands import multiply
from lightning_llm.precision.loss_scale import LossScale
from lightning_llm.precision.native.express import TE_SIGNS

BFLOAT_MAX = torch.finfo(torch.bfloat16).max


def plain_scale(case: Case) -> Scale:
    """Return the name of the scale kind of a case: "power_of_two" if its entry `pow2` is true, else "fp32"."""
    return "power_of_two" if case.spec["pow2"] else "fp32"


def element_cast(case: Case) -> Iterator[Check]:
    """Check the saturating and the overflowing cast of single elements."""
    x, fmt = case.tensor("x"), NUMBER_FORMATS[case.spec["format"]]
    for array, saturate in (("expected_sat", True), ("expected_nonsat", False)):
        if array in case:
            yield case.exact(array, case.run(round_to_format, x, fmt=fmt, rounding="even", saturate=saturate))


def scale_cast(case: Case) -> Iterator[Check]:
    """Check numbers rounded up to E8M0 exponents, and the values and reciprocals of E8M0 exponents."""
    yield case.exact("expected_biased", case.run(scales.float_to_e8m0, case.tensor("x")))
    every = torch.arange(256, dtype=torch.int32)
    yield case.exact("table_rcp", case.run(scales.e8m0_reciprocal, every))
    yield case.exact("table_val", case.run(scales.e8m0_value, every))


def scale_from_amax(case: Case) -> Iterator[Check]:
    """Check fp32 and power-of-two scales of single amaxes."""
    limit = {"f32": FLOAT_MAX, "bf16": BFLOAT_MAX}[case.spec["value_for_inf"]]
    constants = {
        "largest": NUMBER_FORMATS[case.spec["format"]].max,
        "power_of_two": case.spec["pow2"],
        "value_for_inf": limit,
    }
    yield case.exact("expected_scale", case.run(scales.scale_from_amax, case.tensor("amax"), **constants))


def current(case: Case) -> Iterator[Check]:
    """Check per-tensor FP8 with the tensor's own amax."""
    name = case.spec["format"]
    made = case.run.quantize(case.tensor("x"), CastConfig(format=name, scale=plain_scale(case)))
    power = case.spec["pow2"]
    yield case.codes("codes", made.codes, name)
    yield case.exact("scale", scales.divide(1.0, made.stored_scale) if power else made.stored_scale)
    yield case.exact("scale_inv", made.stored_scale if power else scales.divide(1.0, made.stored_scale))


def delayed_cast(case: Case) -> Iterator[Check]:
    """Check per-tensor FP8 with a given scale, and the amax it records."""
    name, x = case.spec["format"], case.tensor("x")
    cast = CastConfig(format=name, scale="delayed", delayed=DelayedConfig())
    yield case.codes("codes", case.run.quantize(x, cast, delayed=case.tensor("scale")).codes, name)
    yield case.exact("amax", case.run(_amax, x))


def _amax(x: Tensor) -> Tensor:
    return scales.magnitudes(x).amax()


def blocks(case: Case) -> Iterator[Check]:
    """Check 1x128 and 128x128 FP8 blocks, of the tensor and of its transpose."""
    name, block = case.spec["format"], case.spec["block"]
    cast = CastConfig(format=name, block=block, scale=plain_scale(case))
    x = case.tensor("x")
    for axis, suffix in ((1, ""), (0, "_t")):
        made = case.run.quantize(x, cast, axis)
        codes, inverse = made.codes, made.stored_scale
        yield case.codes(f"codes{suffix}", codes if axis == 1 else codes.T, name)
        yield case.exact(f"scale_inv{suffix}", inverse if axis == 1 else inverse.T)


def mxfp8(case: Case) -> Iterator[Check]:
    """Check MXFP8 by Transformer Engine's rule, of the tensor and of its transpose."""
    name, x = case.spec["format"], case.tensor("x")
    cast = CastConfig(format=name, block="1x32", scale="e8m0_ceil")
    for axis, suffix in ((1, ""), (0, "_t")):
        if f"codes{suffix}" in case:
            made = case.run.quantize(x, cast, axis)
            codes, exponents = made.codes, made.stored_scale
            yield case.codes(f"codes{suffix}", codes if axis == 1 else codes.T, name)
            yield case.exact(f"e8m0{suffix}", exponents if axis == 1 else exponents.T)


def mx_ocp(case: Case) -> Iterator[Check]:
    """Check OCP MX blocks by microxcaling's rules."""
    rounding: Rounding = "even" if case.spec["rounding"] == "RNE" else "half_away"
    cast = CastConfig(format=case.spec["format"], block="1x32", scale="e8m0_floor", rounding=rounding)
    yield case.exact("expected", case.run.quantize(case.tensor("x"), cast).dequantized)


def nvfp4(case: Case) -> Iterator[Check]:
    """Check NVFP4: 1x16 or 16x16 blocks, of the tensor and of its (in some cases rotated) transpose."""
    if "expected" in case:
        yield case.exact("expected", case.run(nvfp4_scales.nvfp4_tensor_scale, case.tensor("amax")))
        return
    cast = CastConfig(format="e2m1", block=case.spec["block"], scale="two_level_e4m3")
    x = case.tensor("x")
    for axis, suffix in ((1, ""), (0, "_t")):
        turned = x
        if axis == 0 and "rht_xT" in case:
            turned = rotate(x, rotation(16, torch.tensor(TE_SIGNS), x.device), 0, torch.bfloat16)
            step = case.tensor("rht_xT").double().abs() * 2.0**-7
            yield case.close("rht_xT", turned.T, step)
            turned = case.tensor("rht_xT").T.contiguous()
        yield from _two_level(case, turned, cast, axis, suffix)
    if "sf_old" in case:
        # Transformer Engine <= 2.14 multiplied in another order; recorded to tell the two apart.
        block_amax = x.float().abs().reshape(x.shape[0], -1, 16).amax(2)
        old = (block_amax / 6.0) * nvfp4_scales.nvfp4_tensor_scale(x.float().abs().amax())
        rounded = round_to_format(old, NUMBER_FORMATS["e4m3"], "even")
        yield case.codes("sf_old", rounded.to(torch.float8_e4m3fn).view(torch.uint8), "e4m3")


def _two_level(case: Case, x: Tensor, cast: CastConfig, axis: int, suffix: str) -> Iterator[Check]:
    made = case.run.quantize(x, cast, axis)
    stored = made.stored_scale
    if cast.block == "16x16":  # recorded with every row's scale, as the kernels store it
        stored = stored.repeat_interleave(16, dim=1 - axis)
    sf = stored.to(torch.float8_e4m3fn).view(torch.uint8)
    yield case.codes(f"codes{suffix}", made.codes if axis == 1 else made.codes.T, "e2m1")
    yield case.codes(f"sf{suffix}", sf if axis == 1 else sf.T, "e4m3")
    if f"amax{suffix}" in case:
        yield case.exact(f"amax{suffix}", case.run(_amax, x))


def four_over_six(case: Case) -> Iterator[Check]:
    """Check NVFP4 with candidates of block scales, or an fp32 scale per row, of the tensor and of its transpose."""
    keys = {key: case.spec[key] for key in ("block", "amax", "scale_max")}
    by = case.spec["by"] and {"by": case.spec["by"]}
    cast = CastConfig.model_validate(keys | {"format": "e2m1", "scale": "two_level_e4m3", "candidates": by})
    for axis, suffix in ((1, ""), (0, "_t")):
        if f"codes{suffix}" in case:
            yield from _two_level(case, case.tensor("x"), cast, axis, suffix)


def recorded_cast(case: Case) -> Iterator[Check]:
    """Check the dequantized numbers of the cast in the case's entry, rotated by `sr_signs` if recorded.

    `u`: noise per element, or per block of 16, whose first element's noise rounds its scale. The reference divides
    where the casts multiply by a reciprocal, so numbers agree to rounding; a wrong code or scale is off by over 3 %.
    """
    cast = CastConfig.model_validate(case.spec["cast"])
    x, noise = case.tensor("x"), case.tensor("u") if "u" in case else None
    if "sr_signs" in case and cast.hadamard is not None:
        x = rotate(x, rotation(cast.hadamard.size, case.tensor("sr_signs"), x.device), 1, torch.float32)
    if noise is not None and noise.shape != x.shape:
        noise = noise.repeat_interleave(16, 1)
    made = case.run.quantize(x, cast, noise=noise).dequantized
    yield case.close("expected", made, case.tensor("expected").double().abs() * 1e-6)


def nvfp4_stochastic(case: Case) -> Iterator[Check]:
    """Check E2M1's eight-bit stochastic rounding of single elements."""
    noise = case.tensor("rbits8").float() / 256
    yield case.exact("expected", case.run(_stochastic_e2m1, case.tensor("x"), noise))


def _stochastic_e2m1(x: Tensor, noise: Tensor) -> Tensor:
    return round_to_format(x, NUMBER_FORMATS["e2m1"], "stochastic", noise)


MXFP4_SR = CastConfig(format="e2m1", block="1x32", scale="e8m0_floor", rounding="stochastic", prescale=0.75)


def mxfp4_stochastic(case: Case) -> Iterator[Check]:
    """Check MXFP4 with stochastic rounding: exactly with recorded noise, else mean and spread of 4,096 random draws."""
    x = case.tensor("x")
    if "expected" in case:
        yield case.exact("expected", case.run.quantize(x, MXFP4_SR, noise=case.tensor("u")).dequantized)
        return
    draws = 4096
    noise = torch.rand(draws * x.shape[0], x.shape[1], generator=torch.Generator().manual_seed(0))
    sample = case.run.quantize(x.repeat(draws, 1), MXFP4_SR, noise=noise).dequantized.double()
    sample = sample.reshape(draws, *x.shape)
    step, std = case.tensor("step").double(), case.tensor("std").double()
    value = x.double()
    slack = 5 * std / draws**0.5 + 8 * step / draws + 2e-7 * value.abs()
    yield Check("mean", None if bool(((sample.mean(0) - value).abs() <= slack).all()) else "the mean is biased")
    # A two-point distribution's standard deviation, estimated from draws: five standard errors, and rare outcomes.
    error = (sample.std(0) - std).abs()
    bound = 5 * step / (2 * draws) ** 0.5 + 3 * step / draws**0.5
    yield Check("std", None if bool((error <= bound).all()) else f"off by up to {float((error / step).max())} steps")
    lattice = (sample - value).abs().amax(0) <= step * (1 + 1e-6)
    yield Check("step", None if bool(lattice.all()) else "a draw differs by more than a step")


def quartet(case: Case) -> Iterator[Check]:
    """Check QuEST (forward) and the stochastic cast (backward), both in the Hadamard domain."""
    x = case.tensor("x")
    identity = case.spec.get("hadamard") == "identity"
    rotated = x if identity else rotate(x, rotation(32, None, x.device), 1, torch.float32)
    excused = 0.0 if identity else 0.002
    forward = CastConfig(format="e2m1", block="1x32", scale="quest", rounding="half_to_zero", clip_gradient=True)
    made = case.run.quantize(rotated, forward)
    expected = case.tensor("quest_out").double().abs()
    yield case.close("quest_out", made.dequantized, expected * 1e-6, excused)
    yield case.exact("quest_mask", made.inside) if identity else case.close("quest_mask", made.inside, 0.0, excused)
    backward = MXFP4_SR.model_copy(update={"rounding": "stochastic_compare"})
    signs = case.tensor("sr_signs").tile(x.shape[1] // 32)
    # The signs are on the output side: they flip rotated elements, and the rounding of magnitudes does not change.
    draw = case.run.quantize(rotated, backward, noise=case.tensor("sr_u")).dequantized * signs
    yield case.close("sr_out", draw, case.tensor("sr_out").double().abs() * 1e-6, excused)


_E4M3, _E5M2 = CastConfig(format="e4m3"), CastConfig(format="e5m2")
_MX = CastConfig(format="e4m3", block="1x32", scale="e8m0_ceil")
_NV = CastConfig(format="e2m1", block="1x16", scale="two_level_e4m3")
_NV_SQUARE = CastConfig(format="e2m1", block="16x16", scale="two_level_e4m3")
# By recipe: casts of x, w, dy; whether wgrad's operands are rotated as NVFP4's.
SIX_SLOTS = {
    "fp8_block_pow2": (
        CastConfig(format="e4m3", block="1x128", scale="power_of_two"),
        CastConfig(format="e4m3", block="128x128", scale="power_of_two"),
        CastConfig(format="e4m3", block="1x128", scale="power_of_two"),
        False,
    ),
    "fp8_block_fp32": (
        CastConfig(format="e4m3", block="1x128"),
        CastConfig(format="e4m3", block="128x128"),
        CastConfig(format="e4m3", block="1x128"),
        False,
    ),
    "fp8_current_hybrid": (_E4M3, _E4M3, _E5M2, False),
    "fp8_current_e4m3": (_E4M3, _E4M3, _E4M3, False),
    "mxfp8": (_MX, _MX, _MX, False),
    "nvfp4_rne": (_NV, _NV_SQUARE, _NV, True),
}


def mxfp4_backward(case: Case) -> Iterator[Check]:
    """Check both backward GEMMs of MXFP4 with stochastic rounding, with and without the rotation, given all noise."""
    dy, x, w = case.tensor("dY"), case.tensor("X"), case.tensor("W")
    rotated = case.spec["recipe"].endswith("_rht")
    dx = _product(case, dy, w.T, "sign_dgrad", "u_dy", "u_wT", rotated)
    dw = _product(case, dy.T, x.T, "sign_wgrad", "u_dyT", "u_xT", rotated)
    for array, product, depth in (("dX", dx, dy.shape[1]), ("dW", dw, dy.shape[0])):
        expected = case.tensor(array)
        tolerance = 2e-6 * depth**0.5 * float(expected.abs().max())
        yield case.close(array, product[: expected.shape[0]], tolerance, 0.001)
    exact = (dy.double() @ w.double())[: case.tensor("dX_exact").shape[0]]
    yield case.close("dX_exact", exact, 1e-6 * float(exact.abs().max()))


def _product(case: Case, a: Tensor, b: Tensor, signs: str, noise_a: str, noise_b: str, rotated: bool) -> Tensor:
    """Return Q(a S) Q(b S)^T for a [m, k] and b [n, k], fp32."""
    made = []
    for tensor, noise in ((a, noise_a), (b, noise_b)):
        each = tensor.float().contiguous()
        if rotated:
            each = rotate(each, rotation(64, case.tensor(signs), each.device), 1, torch.float32)
        made.append(case.run.quantize(each, MXFP4_SR, noise=case.tensor(noise)).dequantized)
    return made[0] @ made[1].T


def nvfp4_gemm(case: Case) -> Iterator[Check]:
    """Check one NVFP4 forward GEMM; weights in 16x16 blocks."""
    a = inductor.operand(case.tensor("X"), _NV, 1, case.run.backend)
    b = inductor.operand(case.tensor("W"), _NV_SQUARE, 1, case.run.backend)
    product = multiply(a, b.flipped, torch.float32, case.run.backend)
    yield case.close("Y", product, 1e-5 * float(case.tensor("Y").abs().max()))


def six_slot_inputs(case: Case) -> Iterator[Check]:
    """Check that the shapes of the shared inputs X [M, K], W [N, K] and dY [M, N] fit together."""
    (m, k), (n, depth), gradient = (tuple(case.tensor(name).shape) for name in ("X", "W", "dY"))
    agree = depth == k and gradient == (m, n)
    yield Check("shapes", None if agree else f"X {(m, k)}, W {(n, depth)} and dY {gradient} do not fit together")


def six_slots(case: Case, inputs: dict[str, Tensor]) -> Iterator[Check]:
    """Check all six operands of a linear layer by hash, and its three GEMMs; `inputs`: X, W and dY."""
    x_cast, w_cast, dy_cast, rotates = SIX_SLOTS[case.spec["recipe"]]
    x, w, dy = inputs["X"], inputs["W"], inputs["dY"]
    turned_x, turned_dy = x, dy
    if rotates:
        s = rotation(16, torch.tensor(TE_SIGNS), x.device)
        turned_x, turned_dy = (rotate(each, s, 0, torch.bfloat16) for each in (x, dy))
    # Each operand as it is stored, its cast, its contraction axis; recorded with that axis last.
    slots = {
        "fprop_X": (x, x_cast, 1),
        "fprop_W": (w, w_cast, 1),
        "dgrad_dY": (dy, dy_cast, 1),
        "dgrad_WT": (w, w_cast, 0),
        "wgrad_dYT": (turned_dy, dy_cast, 0),
        "wgrad_XT": (turned_x, x_cast, 0),
    }
    operands = {}
    for name, (tensor, cast, axis) in slots.items():
        dequantized = case.run.quantize(tensor, cast, axis).dequantized
        last = (dequantized if axis == 1 else dequantized.T).contiguous() + 0.0
        yield case.exact(f"{name}_corner", last[:24, :24])
        digest = hashlib.sha256(last.numpy().tobytes()).hexdigest()
        recorded = case.spec["sha256_dequant_fp32_plus0"][name]
        yield Check(f"{name} sha256", None if digest == recorded else f"{digest[:12]}, recorded {recorded[:12]}")
        operands[name] = inductor.operand(tensor, cast, axis, case.run.backend)
    for name, left, right in (
        ("Y", "fprop_X", "fprop_W"),
        ("dX", "dgrad_dY", "dgrad_WT"),
        ("dW", "wgrad_dYT", "wgrad_XT"),
    ):
        a, b = operands[left], operands[right]
        a = a if slots[left][2] == 1 else a.flipped
        b = b if slots[right][2] == 0 else b.flipped
        product = multiply(a, b, torch.float32, case.run.backend).double()
        yield case.close(f"{name}_corner", product[:24, :24], 1e-5 * float(product.abs().max()))
        norm = float(product.norm())
        yield case.close(f"{name}_fro", product.norm(), 1e-5 * norm)


def delayed_updates(case: Case) -> Iterator[Check]:
    """Check a sequence of delayed-scaling updates, by the fused kernel's rule or the Python path's."""
    amaxes = case.tensor("amax_seq")
    config = DelayedConfig(
        history_length=case.spec["amax_history_len"], algorithm=case.spec["algo"], margin=case.spec["margin"]
    )
    rule = delayed.update_unfused if "_python_" in case.name else delayed.update
    largest = torch.full((amaxes.shape[1],), NUMBER_FORMATS[case.spec["format"]].max)
    history, scale = torch.zeros(config.history_length, amaxes.shape[1]), torch.ones(amaxes.shape[1])
    histories, scales_ = [], []
    for amax in amaxes:
        history = torch.cat([amax[None], history[1:]])
        history, scale = case.run(rule, history, scale, largest, config=config)
        histories.append(history)
        scales_.append(scale)
    yield case.exact("hist", torch.stack(histories))
    yield case.exact("scale", torch.stack(scales_))


def loss_scales(case: Case) -> Iterator[Check]:
    """Check the loss scale after every step of a sequence with overflows."""
    spec = case.spec
    config = LossScalingConfig(
        init_scale=spec["init"],
        growth_interval=spec["interval"],
        hysteresis=spec.get("hysteresis", 1),
        min_scale=spec.get("min_scale"),
    )
    state, seen = LossScale.initial(config), []
    for overflow in case.arrays["found_inf"]:
        state = state.after_step(bool(overflow), config)
        seen.append(state.scale)
    yield case.exact("scale_after", torch.tensor(seen))
