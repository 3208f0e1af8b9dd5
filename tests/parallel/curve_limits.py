"""Limits for the differences between a run over ranks and a run on one rank, and the measured differences."""

from dataclasses import dataclass, fields
from typing import Any

import torch

from tests.parallel.traced_run import Trace


@dataclass(frozen=True)
class Limits:
    """Largest relative differences: of losses and norms over at most 6 steps, of gradients in two steps, of parameters.

    `first`: of gradients in the first step where its losses are equal to `SAME_START`, so that no cast of the forward
    pass fell the other way: what differs then is the backward pass.
    """

    loss: float
    norm: float
    first: float
    gradient: float
    parameter: float

    def widened(self, times: float, measured: list[dict[str, float]]) -> "Limits":
        """Return these limits, or `times` the greatest of `measured` by kind, whichever is larger.

        Of a measured run with another first loss, the first gradients are among `gradient`, and not in `first`.
        """
        greatest = {field.name: max(each[field.name] for each in measured) for field in fields(self)}
        return Limits(**{name: max(getattr(self, name), times * value) for name, value in greatest.items()})


# Measured (loss, norm, gradient, parameter): fp32 1.4e-7, 7e-7, 4e-6, 5e-6; bf16 5e-5, 1e-3, 2e-2, 4e-2. Recipes
# compute in fp32 here, so that what differs are casts that fell the other way: 8 bits 3e-5, 4e-4, 2.5e-2, 2e-2. In 4
# bits one element of 16,384 that does so (its input was 6e-8 off) moves a token's loss, then the draws of stochastic
# rounding behind it: 5e-4, 4e-3, 0.24, 0.09 in the worst case, 5e-5, 3e-4, 1e-3, 5e-3 in most. Where none did so in
# the first forward pass, the first gradients are 5e-4 off at most, mostly 1e-7, and 0.13 with one operand out of its
# place. That operands are right is shown in test_shard_operands.py.
SAME_START = 5e-7
FP32 = Limits(2e-6, 1e-5, 1e-5, 1e-5, 1e-5)
LIMITS = {"fp32": FP32, "bf16": Limits(2e-4, 5e-3, 5e-2, 5e-2, 1e-1)}
CAST = Limits(1e-4, 1e-3, 2e-3, 5e-2, 2e-2)
FOUR_BITS = Limits(1e-3, 1e-2, 2e-3, 0.5, 0.2)
LIMITS |= dict.fromkeys(("nvfp4", "mxfp4_sr", "quartet"), FOUR_BITS)
# Recipes as they are shipped compute in 16 bits, and no first losses are equal but in fp16. Measured over tp, cp and
# pp_tp (loss, norm, gradient, parameter): fp16 6.6e-6, 4.1e-5, 2.3e-3 (6.7e-4 after equal losses), 2.6e-3; 8 bits
# 1.7e-4, 9.6e-4, 5.7e-2, 3.7e-2; NVFP4 2.1e-4, 1e-3, 0.12, 4e-2.
SHIPPED = dict.fromkeys(("mxfp8", "fp8_current", "fp8_subchannel"), Limits(3.5e-4, 2e-3, 0.12, 0.12, 8e-2))
SHIPPED |= {"fp16": Limits(1.5e-5, 1e-4, 1.5e-3, 5e-3, 5e-3), "nvfp4": Limits(4.5e-4, 2e-3, 0.25, 0.25, 8e-2)}


def limits_of(precision: str) -> Limits:
    """Return the limits of a recipe that computes in fp32 apart from its casts."""
    return LIMITS.get(precision, CAST)


def off(ours: Trace, alone: Trace) -> dict[str, float]:
    """Return the largest relative differences: of losses, gradient norms, gradients, and parameters by tensor.

    Gradients with a norm below 1e-6 of the whole gradient's are noise around zero (keys' biases), and so are Adam's
    updates from them; both are skipped. Biases are compared together: they start at zero, so a single element with a
    gradient near zero, moved the other way by Adam, would be a relative difference of 0.18 in a bias of 128 elements.
    """
    found: dict[str, list[float]] = {field.name: [0.0] for field in fields(Limits)}
    for one, other in zip(ours["curve"], alone["curve"], strict=True):
        assert one[:2] == other[:2]
        assert [value is None for value in one] == [value is None for value in other]
        for column, kind in ((2, "loss"), (3, "norm"), (5, "loss"), (6, "loss")):
            if other[column] not in (None, one[column]):  # "inf" of a skipped step equals another
                value, expected = float(one[column]), float(other[column])
                found[kind].append(abs(value - expected) / abs(expected))
    noise = set()
    start, expected = ours["curve"][0][2], alone["curve"][0][2]
    same_start = abs(start - expected) <= SAME_START * expected
    kinds = ("first" if same_start else "gradient", "gradient")[: len(alone["gradients"])]
    for kind, one, other in zip(kinds, ours["gradients"], alone["gradients"], strict=True):
        whole = torch.stack([gradient.norm() for gradient in other.values()]).norm()
        for name, gradient in other.items():
            if gradient.norm() < 1e-6 * whole and not torch.equal(one[name], gradient):
                noise.add(name)
            else:
                found[kind].append(_relative(one[name], gradient))
    kept = [name for name in alone["parameters"] if name not in noise]
    biases = [name for name in kept if name.endswith("bias")]
    for names in ([name] for name in kept if name not in biases):
        found["parameter"].append(_relative(*(_flat(trace, names) for trace in (ours, alone))))
    if biases:
        found["parameter"].append(_relative(*(_flat(trace, biases) for trace in (ours, alone))))
    assert len(noise) < len(alone["parameters"]) / 4
    return {kind: torch.tensor(values).max().item() for kind, values in found.items()}  # Python's max passes over NaN


def _relative(one: Any, other: Any) -> float:
    if torch.equal(one, other):  # zeros, too, where all of a gradient vanishes in a cast
        return 0.0
    return ((one - other).norm() / other.norm()).item()


def _flat(trace: Trace, names: list[str]) -> torch.Tensor:
    return torch.cat([trace["parameters"][name].flatten() for name in names])


def exceeded(found: dict[str, float], limits: Limits) -> list[str]:
    """Return the figures above their limits, including NaN."""
    return [f"{kind} {value:.2g}" for kind, value in found.items() if not value <= getattr(limits, kind)]
