"""Recorded GEMMs of quantised linear layers, and recorded state machines, case by case."""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_llm.config.schema.precision import CastConfig, DelayedConfig, LossScalingConfig
from lightning_llm.precision.cast import delayed, inductor
from lightning_llm.precision.cast.formats import FORMATS
from lightning_llm.precision.cast.hadamard import rotate, rotation
from lightning_llm.precision.conformance.case import Case, Check
from lightning_llm.precision.conformance.casts import MXFP4_SR, TE_SIGNS
from lightning_llm.precision.linear.gemm import multiply
from lightning_llm.precision.loss_scale import LossScale

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
        made.append(case.run.quantise(each, MXFP4_SR, noise=case.tensor(noise)).dequantised)
    return made[0] @ made[1].T


def nvfp4_gemm(case: Case) -> Iterator[Check]:
    """Check one NVFP4 forward GEMM; weights in 16x16 blocks."""
    a = inductor.operand(case.tensor("X"), _NV, 1, case.run.backend)
    b = inductor.operand(case.tensor("W"), _NV_SQUARE, 1, case.run.backend)
    product = multiply(a, b.flipped, torch.float32, case.run.backend)
    yield case.close("Y", product, 1e-5 * float(case.tensor("Y").abs().max()))


def six_slot_inputs(case: Case) -> Iterator[Check]:
    """Check that the tensors other cases share, X [M, K], W [N, K] and dY [M, N], belong together."""
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
        dequantised = case.run.quantise(tensor, cast, axis).dequantised
        last = (dequantised if axis == 1 else dequantised.T).contiguous() + 0.0
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
    largest = torch.full((amaxes.shape[1],), FORMATS[case.spec["format"]].max)
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
