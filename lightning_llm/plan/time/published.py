"""Published over predicted speeds by family of layouts: how much of a plan's roofline real runs reached. No torch.

From `make bench ARGS=plan_time`, over the runs of `benchmarks/published_steps.py`; a test computes them again. Ratios
differ between families, so a search that compares families flatters those with low ones.
"""

from dataclasses import asdict, dataclass
from typing import Any

from lightning_llm.config.schema import Config
from lightning_llm.plan.degrees import Degrees

LONG = 32768
"""Tokens of a sequence from which attention weighs most."""


@dataclass(frozen=True)
class Ratio:
    """Published over predicted speeds of one family's `runs`; no figures where there are none."""

    family: str
    runs: int = 0
    low: float | None = None
    median: float | None = None
    high: float | None = None

    def as_data(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


RATIOS = {
    each.family: each
    for each in (
        Ratio("ZeRO-3 alone", 8, 0.44, 0.46, 0.48),
        Ratio("ZeRO-3 with tensor parallelism", 5, 0.62, 0.73, 0.78),
        Ratio("replicas alone", 1, 0.47, 0.47, 0.47),
        Ratio("replicas with tensor parallelism", 3, 0.52, 0.59, 0.62),
        Ratio("pipeline", 10, 0.51, 0.75, 0.87),
        Ratio("sequences of 32K tokens or more", 4, 0.21, 0.29, 0.37),
        Ratio("sequences of 32K tokens or more, with a pipeline", 4, 0.42, 0.54, 0.64),
        Ratio("ZeRO-1 or ZeRO-2 without a pipeline"),
        Ratio("context parallelism of shorter sequences"),
    )
}


def published_ratio(config: Config, degrees: Degrees) -> Ratio:
    """Return the ratio of the family that a layout belongs to."""
    return RATIOS[_family(config, degrees)]


def _family(config: Config, degrees: Degrees) -> str:
    zero_stage = config.parallel.zero_stage if degrees.fsdp > 1 else 0
    if config.data.sequence_length >= LONG:
        return "sequences of 32K tokens or more" + (", with a pipeline" if degrees.pp > 1 else "")
    if degrees.cp > 1:
        return "context parallelism of shorter sequences"
    if degrees.pp > 1:
        return "pipeline"
    if zero_stage in (1, 2):
        return "ZeRO-1 or ZeRO-2 without a pipeline"
    kind = "ZeRO-3" if zero_stage else "replicas"
    return f"{kind} with tensor parallelism" if degrees.tp > 1 else f"{kind} alone"


def range_text(ratio: dict[str, Any]) -> str:
    """Return `Ratio.as_data` as "0.44-0.48", or "none" where no run was published."""
    return f"{ratio['low']:.2f}-{ratio['high']:.2f}" if ratio["runs"] else "none"


def ratio_text(ratio: dict[str, Any]) -> str:
    """Return `Ratio.as_data` as a sentence."""
    if not ratio["runs"]:
        return f"no published run was compared with its plan ({ratio['family']})"
    runs = f"{ratio['runs']} published run{'s' if ratio['runs'] > 1 else ''}"
    return (
        f"{runs} reached {range_text(ratio)} of the predicted speed, median {ratio['median']:.2f} ({ratio['family']})"
    )
