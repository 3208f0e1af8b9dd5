"""The number of further seeds that would decide a verdict that is open, and the command that runs them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_llm.compare.estimate import Judged, Terms
from lightning_llm.compare.runs.branches import trunks_are_replicates
from lightning_llm.compare.statistics.power import MOST_SEEDS, PLANNED_GAP, seeds_needed
from lightning_llm.compare.statistics.stability import seeds_to_show_stability
from lightning_llm.tracking.reading import Run
from lightning_llm.tracking.sweep_definition import command_with_seeds

FEWEST_SEEDS = 3
"""Pairs that show a spread well enough to plan by."""
MOST_ADVISED = 12
"""More seeds than this are only advised where nothing is decided by fewer."""


@dataclass(frozen=True)
class SeedPlan:
    """`more`: seeds beside those at hand that would decide if the true gap is 0; None where that is no question.

    In all: `if_no_gap` for a gap of 0, `if_lossy` for one of `PLANNED_GAP` margins, None for more than `MOST_SEEDS`;
    `if_stable`: to show that failures like those seen are rare, where they alone stand against lossless.
    """

    more: int | None = None
    if_no_gap: int | None = None
    if_lossy: int | None = None
    if_stable: int | None = None


@dataclass(frozen=True)
class Advice:
    """One command for what is open: how many seeds it adds, and which recipes that would decide."""

    command: str
    more_seeds: int
    decides: tuple[str, ...]

    def as_data(self) -> dict[str, Any]:
        """Return what `compare.json` has under "advice"."""
        return {"command": self.command, "more_seeds": self.more_seeds, "decides": list(self.decides)}


def plan_seeds(judged: Judged, terms: Terms) -> SeedPlan:
    """Return how many seeds would decide where those at hand did not.

    By the spread as estimated and how well it is known, with the recipes judged together and pooled as they are. `more`
    is None where the seeds at hand would mostly have told a gap of 0, and the interval is no wider than the margin:
    then the gap is near the margin, and more seeds hardly decide.
    """
    estimate, count = judged.estimate, len(judged.measured.seeds)
    if judged.decision != "inconclusive" or judged.measured.unlearned or judged.measured.missing_seeds:
        return SeedPlan()
    if judged.loss == "lossless":
        needed = seeds_to_show_stability(judged.stability.recipe_alone, judged.stability.level, MOST_SEEDS)
        return SeedPlan(more=None if needed is None else max(needed - count, 1), if_stable=needed)
    if estimate.pairs < 2:
        return SeedPlan(more=max(FEWEST_SEEDS - estimate.pairs, 1))
    no_gap, lossy = (
        seeds_needed(
            gap, estimate.pool_sd, terms.margin, estimate.comparisons, estimate.pool, terms.confidence, estimate.df
        )
        for gap in (0.0, PLANNED_GAP * terms.margin)
    )
    near = estimate.high - estimate.low <= terms.margin
    open_ended = no_gap is None or (no_gap <= estimate.pairs and near)
    return SeedPlan(None if no_gap is None or open_ended else max(no_gap - estimate.pairs, 1), no_gap, lossy)


def advise(open_verdicts: dict[str, int], sweeps: Sequence[Path], runs: Sequence[Run]) -> Advice | None:
    """Return the command that adds seeds to the one sweep that was judged; None where there is none, or nothing open.

    `open_verdicts`: {recipe: how many more seeds would decide}. Finished jobs are skipped by it, so nothing is run
    twice.
    """
    if len(sweeps) != 1 or not open_verdicts or trunks_are_replicates(runs):  # which are to be trained first
        return None
    few = [more for more in open_verdicts.values() if more <= MOST_ADVISED]
    more = max(few) if few else min(open_verdicts.values())
    seeds = sorted({run.seed for run in runs if run.folder.parent == sweeps[0]})
    following = max(seeds, default=-1) + 1
    command = command_with_seeds(sweeps[0], [*seeds, *range(following, following + more)])
    decides = tuple(name for name, needed in open_verdicts.items() if needed <= more)
    return Advice(command, more, decides) if command else None
