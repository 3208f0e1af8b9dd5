"""Verdicts at declared looks: each recipe is judged at one look after another, until it is decided.

The result of a look is a function of the runs, the declared seeds and the terms. So a sweep killed between two looks
repeats the same results, and no look is spent twice. A decided recipe keeps its decision and interval, whatever later
seeds of other recipes do to the pooled variance.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_llm.compare.effective_data import Curve
from lightning_llm.compare.estimate import Measured, VerdictInputs, judge_all, measure
from lightning_llm.compare.looks import DeclaredLook, Design
from lightning_llm.compare.runs.pairing import ComparisonGroup
from lightning_llm.compare.runs.usable import status_of
from lightning_llm.compare.terms import LookLevels
from lightning_llm.tracking.reading import Run

MOST_AWAITED = 3
"""Maximum number of awaited runs listed by name."""


@dataclass(frozen=True)
class SequentialState:
    """Progress of a recipe among the declared looks of `design`.

    `look`: its last look, None before the first; `coming`: its next look, None if it gets no more. `unlearned`: the
    baseline has not learned, so no more seeds are run. `waits_for`: {recipe: its unfinished runs} that the coming look
    needs, of the baseline and of all undecided recipes.
    """

    look: DeclaredLook | None
    coming: DeclaredLook | None
    design: Design
    unlearned: bool = False
    waits_for: Mapping[str, Sequence[Run]] = field(default_factory=dict)

    @property
    def levels(self) -> LookLevels:
        """The error rates of the recipe's last look; before any look, those of the first."""
        return (self.look or self.design.looks[0]).levels

    @property
    def seeds(self) -> list[int]:
        """The seeds judged at the recipe's last look; before any look, those of the first."""
        return self.design.seeds_at(self.look or self.design.looks[0])

    @property
    def settled(self) -> bool:
        """True if the recipe gets no more seeds: it is decided, or all looks are taken."""
        return self.coming is None

    @property
    def text(self) -> str:
        """The look as text: "look 2 of 6"."""
        return f"look {self.look.number if self.look else 0} of {len(self.design.looks)}"

    @property
    def what_next(self) -> str:
        """State and next look of an undecided recipe, as text: "open at look 2 of 6; the next is after 4 seeds"."""
        if self.coming is not None and self.waits_for:
            return f"open at {self.text}; the next, after {self.coming.seeds} seeds, waits for {self._awaited}"
        if self.coming is not None:
            return f"open at {self.text}; the next is after {self.coming.seeds} seeds"
        if self.unlearned:
            return f"open at {self.text}; more seeds would not help"
        return f"open at {self.text}, the last: the declared {self.design.last.seeds} seeds are spent"

    @property
    def _awaited(self) -> str:
        """The awaited runs as text: "bf16 at seed 1 (job 3: unreadable)"."""
        found = [
            f"{label} at seed {run.seed} (job {run.folder.name}: {status_of(run)})"
            for label, runs in self.waits_for.items()
            for run in runs
        ]
        more = f" and {len(found) - MOST_AWAITED} more" if len(found) > MOST_AWAITED else ""
        return f"{', '.join(found[:MOST_AWAITED])}{more}"

    def as_data(self) -> dict[str, Any]:
        """Return the entry "look" of `compare.json`."""
        return {
            "number": self.look.number if self.look else 0,
            "of": len(self.design.looks),
            "seeds": self.look.seeds if self.look else 0,
            "interval_confidence": self.look.levels.intervals if self.look else None,
            "settled": self.settled,
            "next_seeds": self.coming.seeds if self.coming else None,
            "waits_for": [str(run.folder) for runs in self.waits_for.values() for run in runs],
        }


FloorAt = Callable[[Sequence[int]], float | None]
"""Function that returns the A/A floor (noise of runs that differ only in rounding) at given seeds, nats or None."""


def judge_by_looks(
    family: ComparisonGroup, floor_at: FloorAt, design: Design, curve: Curve | None = None
) -> dict[str, tuple[VerdictInputs, SequentialState]]:
    """Return {recipe: (its results at its last look, its progress)} of one group.

    A look is taken once every open recipe has a usable run, finished or diverged, at all its seeds; runs at later seeds
    are ignored. Recipes decided at an earlier look stay in the pool with their results there. A margin in tokens uses
    the baseline's `curve` over the seeds of the look, so the baseline's other runs must have ended, too.
    """
    share = design.terms.token_margin

    def is_there(label: str, seeds: Sequence[int]) -> bool:
        priced = share is None or (curve is not None and set(seeds) <= curve.settled)
        return priced and set(seeds) <= {pair.run.seed for pair in family.recipes[label]}

    def measured(label: str, seeds: Sequence[int]) -> Measured:
        missing = [seed for seed in family.missing.get(label, ()) if seed in seeds]
        pairs = [pair for pair in family.recipes[label] if pair.run.seed in seeds]
        margins = None if share is None or curve is None else curve.within(seeds).margins(share)
        return measure(label, pairs, missing, design.terms, margins)

    found = replay(list(family.recipes), is_there, measured, floor_at, design)
    return {label: (judged, _with_awaited(state, family, found)) for label, (judged, state) in found.items()}


def _with_awaited(
    state: SequentialState, family: ComparisonGroup, found: Mapping[str, tuple[VerdictInputs, SequentialState]]
) -> SequentialState:
    """Return `state` with the unfinished runs that its coming look needs, of any recipe that takes part."""
    if state.coming is None:
        return state
    seeds = state.design.seeds_at(state.coming)
    settled = {label for label, (_, each) in found.items() if each.coming is None}
    lacking = {
        label: [run for run in runs if run.seed in seeds]
        for label, runs in family.unfinished.items()
        if label not in settled
    }
    return replace(state, waits_for={label: runs for label, runs in lacking.items() if runs})


def replay(
    labels: Sequence[str],
    is_there: Callable[[str, Sequence[int]], bool],
    measured: Callable[[str, Sequence[int]], Measured],
    floor_at: FloorAt,
    design: Design,
) -> dict[str, tuple[VerdictInputs, SequentialState]]:
    """Judge the recipes `labels` at one declared look after another, and return the same as `judge_by_looks`.

    `is_there(label, seeds)`: whether the recipe has usable runs at all these seeds; `measured(label, seeds)`: their
    results; `floor_at`: see `FloorAt`.
    """
    found: dict[str, tuple[VerdictInputs, SequentialState]] = {}
    done: dict[str, DeclaredLook] = {}

    def judged_at(look: DeclaredLook) -> dict[str, VerdictInputs]:
        recipes = [measured(label, design.seeds_at(done.get(label, look))) for label in labels]
        return dict(
            zip(labels, judge_all(recipes, floor_at(design.seeds_at(look)), design.terms, look.levels), strict=True)
        )

    for look, following in zip(design.looks, (*design.looks[1:], None), strict=True):
        if len(done) == len(labels):
            break
        if not all(label in done or is_there(label, design.seeds_at(look)) for label in labels):
            break
        for label, judged in judged_at(look).items():
            if label not in done:
                unlearned = judged.measured.unlearned is not None
                settled = judged.decision != "inconclusive" or unlearned
                found[label] = judged, SequentialState(look, None if settled else following, design, unlearned)
        done |= {label: look for label, (_, state) in found.items() if state.coming is None and label not in done}
    if not found:  # before the first look: the existing runs, without a decision
        first = design.looks[0]
        for label, judged in judged_at(first).items():
            found[label] = replace(judged, decision="inconclusive"), SequentialState(None, first, design)
    return found
