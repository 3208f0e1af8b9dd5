"""The A/A floor: how far apart runs land that should be the same."""

import math
from dataclasses import dataclass
from statistics import variance
from typing import Any

from lightning_llm.compare.runs.differences import ROUNDING, all_differences
from lightning_llm.compare.runs.losses import diverged, has_learned, tail_of
from lightning_llm.compare.runs.pairing import Family
from lightning_llm.config.config_hash import below
from lightning_llm.tracking.reading import Run


@dataclass(frozen=True)
class Floor:
    """The run-to-run noise over groups of runs of one recipe and seed that differ in the order of sums alone.

    `losses`: the tail losses of each group's runs that differ at all; `identical`: runs equal to another to the last
    bit, which show no noise and are only counted; `unlearned`: runs left out because their group has learned nothing;
    `keys`: what the runs differ in.
    """

    losses: list[list[float]]
    identical: int
    keys: list[str]
    unlearned: int = 0

    @property
    def pairs(self) -> int:
        """Independent pairs, the degrees of freedom of `sd`: one less than runs, per group."""
        return sum(len(group) - 1 for group in self.losses)

    @property
    def sd(self) -> float | None:
        """SD of a pair's difference, whose mean is zero: for groups of two the root mean square difference."""
        if not self.pairs:
            return None
        squares = math.fsum((len(group) - 1) * variance(group) for group in self.losses)
        return math.sqrt(2 * squares / self.pairs)

    def as_data(self, family: Family) -> dict[str, Any]:
        """Return what `compare.json` has under "aa"."""
        return {
            "setting": family.setting,
            "floor": self.sd,
            "pairs": self.pairs,
            "losses": self.losses,
            "identical": self.identical,
            "unlearned": self.unlearned,
            "keys": self.keys,
            "runs": [[str(run.folder) for run in group] for group in family.aa_groups],
        }


def measure_floor(family: Family, metric: str, tail_share: float) -> Floor:
    """Return the family's noise floor over the tails of `metric`; runs that diverged or learned nothing are left out.

    How far apart runs land that learn nothing says nothing of how far apart those land that do.
    """
    losses, identical, unlearned, keys = [], 0, 0, set()
    for group in family.aa_groups:
        whole = [run for run in group if not run.lost_its_loss]  # one that ended early has few steps in common
        tail = tail_of(whole, metric, tail_share)
        learned = any(has_learned(run, tail) for run in whole)
        kept = [run for run in whole if tail is not None and not diverged(run, tail, learnable=learned)]
        if not learned:
            unlearned += len(kept)
            continue
        distinct: list[Run] = []
        for run in kept:
            if any(run.validations[metric] == other.validations[metric] for other in distinct):
                identical += 1
            else:
                distinct.append(run)
        if tail is not None and len(distinct) > 1:
            losses.append([tail.of(run) for run in distinct])
            keys |= {key for run in distinct[1:] for key in all_differences(distinct[0], run) if below(key, ROUNDING)}
    return Floor(losses, identical, sorted(keys), unlearned)
