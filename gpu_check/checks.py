"""The checks in the order of what matters most where a call is cut off, each with its share of the time."""

from typing import NamedTuple

TOTAL_SECONDS = 645.0
"""Of eleven minutes, for the wheels and all checks together; ending a check takes a moment too."""


class Check(NamedTuple):
    """What it does; the module whose `items(journal)` are measured; its share of the time, in seconds of a whole call;
    the modules without which it is not available."""

    title: str
    module: str
    share: float
    needs: tuple[str, ...]


MODEL = ("torch", "pydantic", "yaml")
RUN = (*MODEL, "lightning", "hydra", "omegaconf", "platformdirs", "safetensors", "psutil", "rich", "matplotlib")
CHECKS = {
    "agreement": Check("native against emulated: codes, scales, products", "gpu_check.agreement", 160, MODEL),
    "speed": Check("a 1B model: train, a hand-written loop, native FP8", "gpu_check.speed", 160, MODEL),
    "emulation": Check("each emulated recipe's time over bf16's", "gpu_check.emulation", 120, MODEL),
    "memory": Check("peak memory of runs over what plan says", "gpu_check.memory", 75, RUN),
    "curves": Check("loss curves of every native recipe against bf16's", "gpu_check.curves", 105, RUN),
    "steps": Check("tests marked gpu, and steps of every recipe", "gpu_check.steps", 25, MODEL),
}


def seconds_for(name: str, names: list[str], left: float) -> float:
    """Return the seconds that `name` may take of those `left`: its share among itself and the checks behind it.

    What a check leaves over is the others'. `names` are those of this call, in order.
    """
    ahead = names[names.index(name) :]
    return left * CHECKS[name].share / sum(CHECKS[each].share for each in ahead)
