"""Attribution of a recipe's gradient error to slots and layers, measured by leaving others out.

The error of a pass is |g' - g|^2 / |g|^2 over every parameter of the model, g the gradient of an fp32 pass over the
same weights and batches. The gap of a recipe is its error less that of the same pass without any cast (bf16, or the
recipe's own compute dtype): that part stays whatever is done about the casts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from lightning_llm.precision.recipe.ablation import all_but_slot, only_slot
from lightning_llm.probe.model import Pass, ProbedModel

TARGET = 0.8
MEASURABLE = 0.2
"""A gap below this share of the floor is within what roundings of bf16 alone move."""


def gradient_error(made: Pass, reference: Pass) -> float:
    """Return |g' - g|^2 / |g|^2 over all parameters."""
    difference = sum(_square(made.gradients[name] - each) for name, each in reference.gradients.items())
    return difference / sum(_square(each) for each in reference.gradients.values())


def _square(tensor: Tensor) -> float:
    flat = tensor.flatten().double()
    return torch.dot(flat, flat).item()


@dataclass(frozen=True)
class SlotShare:
    """One slot alone, and all but it. Shares of the gap; those of six slots need not sum to 1."""

    error_only: float
    error_without: float
    share_only: float | None
    share_without: float | None
    loss_gap_only: float


def slot_shares(model: ProbedModel, reference: Pass, high: Pass, whole: float, floor: float) -> dict[str, SlotShare]:
    """Return every quantised slot's share of the gap, `whole` - `floor`; two passes each, under one key.

    An error is a sum over millions of elements, so that another key moves it by little.
    """
    found = {}
    gap = whole - floor
    for slot in model.quantised_slots:
        alone = model.quantised(0, only_slot(model.recipe, slot))
        only = gradient_error(alone, reference)
        without = gradient_error(model.quantised(0, all_but_slot(model.recipe, slot)), reference)
        measurable = gap > MEASURABLE * floor
        found[slot] = SlotShare(
            only,
            without,
            (only - floor) / gap if measurable else None,
            1 - (without - floor) / gap if measurable else None,
            alone.loss - high.loss,
        )
    return found


@dataclass(frozen=True)
class Kept:
    """The layers to keep high, most harmful first; `won_back`: the share of the gap, measured with other keys."""

    layers: list[str]
    won_back: float | None
    contributions: dict[str, float]
    error_after: float | None


def layers_to_keep(
    model: ProbedModel,
    reference: Pass,
    whole: float,
    floor: float,
    keys: int,
    progress: Callable[[str], None] = lambda text: None,
) -> Kept:
    """Return the fewest layers, taken by falling contribution, whose staying high wins back `TARGET` of the gap.

    A layer's contribution is the gap with that layer alone quantised. The number is found by bisection over errors
    measured with those layers high, and the result is measured once more with keys that chose nothing.
    """
    names, gap = list(model.layers), whole - floor
    contributions = {}
    for index, name in enumerate(names):
        progress(f"layer {index + 1} of {len(names)}")
        others = frozenset(each for each in names if each != name)
        contributions[name] = gradient_error(model.quantised(0, kept=others), reference) - floor
    ordered = sorted(names, key=lambda name: -contributions[name])
    contributions = {name: contributions[name] for name in ordered}
    if not gap > MEASURABLE * floor:  # nor where the recipe's gradient is not finite
        return Kept([], None, contributions, None)

    def won_back(count: int, trial: Sequence[int]) -> float:
        kept = frozenset(ordered[:count])
        return 1 - (fmean(gradient_error(model.quantised(k, kept=kept), reference) for k in trial) - floor) / gap

    low, high = 0, len(ordered)  # with none kept nothing is won back, with all kept everything
    while high - low > 1:
        middle = (low + high) // 2
        progress(f"keeping {middle} of {len(names)} layers high")
        if won_back(middle, [0]) >= TARGET:
            high = middle
        else:
            low = middle
    fresh = range(1000, 1000 + (keys if model.random else 1))
    while (measured := won_back(high, fresh)) < TARGET and high < len(ordered):
        high += 1
    return Kept(ordered[:high], measured, contributions, floor + (1 - measured) * gap)
