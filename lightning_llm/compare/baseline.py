"""The baseline's own figures in a setting: the row that the recipes' rows stand under."""

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median
from typing import Any

from lightning_llm.compare.estimate import Terms
from lightning_llm.compare.runs.losses import tail_of
from lightning_llm.compare.runs.pairing import Family
from lightning_llm.tracking.reading import Run


@dataclass(frozen=True)
class Baseline:
    """The baseline of one family."""

    label: str
    family: Family
    terms: Terms

    @cached_property
    def runs(self) -> list[Run]:
        """Every run that a recipe's is paired with, once."""
        pairs = [pair for pairs in self.family.recipes.values() for pair in pairs]
        return list({id(pair.baseline): pair.baseline for pair in pairs}.values())

    @cached_property
    def losses(self) -> dict[int, float]:
        """{seed: mean loss over the tail, nats per token} of the runs that kept theirs."""
        kept = [run for run in self.runs if not run.lost_its_loss]
        tail = tail_of(kept, self.terms.metric, self.terms.tail_share)
        found = {run.seed: tail.level_of(run) for run in kept} if tail else {}
        return {seed: loss for seed, loss in found.items() if math.isfinite(loss)}

    @property
    def loss(self) -> float | None:
        """Mean over the seeds."""
        return fmean(self.losses.values()) if self.losses else None

    @property
    def tokens_per_second(self) -> float | None:
        """Median over the runs."""
        found = [value for run in self.runs if (value := run.figure("tokens_per_second_median"))]
        return median(found) if found else None

    @property
    def peak_memory_bytes(self) -> float | None:
        """The most of any run."""
        return max((run.peak_memory_bytes for run in self.runs if run.peak_memory_bytes), default=None)

    def as_data(self) -> dict[str, Any]:
        """Return what `compare.json` has under "baselines"."""
        return {
            "name": self.label,
            "setting": self.family.setting,
            "seeds": sorted(run.seed for run in self.runs),
            "loss": self.loss,
            "losses": [{"seed": seed, "loss": loss} for seed, loss in sorted(self.losses.items())],
            "tokens_per_second": self.tokens_per_second,
            "peak_memory_bytes": self.peak_memory_bytes,
            "spikes": sum(run.spikes for run in self.runs),
            "skipped_steps": sum(run.skipped_steps for run in self.runs),
        }
