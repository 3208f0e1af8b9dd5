"""The checks, most important first in case a call is cut off, each with its share of the time."""

from typing import NamedTuple

TOTAL_SECONDS = 645.0
"""Seconds for the wheels and all checks, slightly less than eleven minutes, because ending a check takes time, too."""


class Check(NamedTuple):
    """`title`; `module`: its `items(call)` are measured; `share` of the time, in seconds of a whole call; `needs`:
    required modules."""

    title: str
    module: str
    share: float
    needs: tuple[str, ...]


MODEL = ("torch", "pydantic", "yaml")
RUN = (*MODEL, "lightning", "hydra", "omegaconf", "platformdirs", "safetensors", "psutil", "rich", "matplotlib")
CHECKS = {
    "agreement": Check(
        "native against emulated: codes, products, parts on two ranks", "gpu_check.agreement", 160, MODEL
    ),
    "speed": Check("a 1B model: train, a hand-written loop, native FP8", "gpu_check.speed", 160, MODEL),
    "emulation": Check("each emulated recipe's time over bf16's", "gpu_check.emulation", 120, MODEL),
    "memory": Check("peak memory of runs relative to plan", "gpu_check.memory", 75, RUN),
    "curves": Check("loss curves of every native recipe against bf16's", "gpu_check.curves", 105, RUN),
    "steps": Check("tests marked gpu, and steps of every recipe", "gpu_check.steps", 25, MODEL),
}


def seconds_for(name: str, names: list[str], left: float) -> float:
    """Return the seconds of those `left` that check `name` may take: its share among itself and the following checks.

    Time that a check does not use is left to the others. `names`: the checks of this call, in order.
    """
    remaining = names[names.index(name) :]
    return left * CHECKS[name].share / sum(CHECKS[each].share for each in remaining)
