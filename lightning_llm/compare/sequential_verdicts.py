"""Verdicts at declared looks: each recipe is judged at one look after the other, until it is decided.

What a look finds is a function of the runs, the declared seeds and the terms. So a sweep that was killed between two
looks finds what it had found, and no look is spent twice. A recipe that is decided stays so, with the interval it was
decided by, whatever later seeds of others make of the pooled variance.
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
"""Runs that a look waits for, named one by one."""


@dataclass(frozen=True)
class SequentialState:
    """Where a recipe stands: `look` its last one, None before the first; `coming` the one it waits for, None if none.

    `unlearned`: the baseline has not learned, and no more seeds are run for that. `waits_for`: {label: runs}, of the
    baseline and of every recipe that is open, whose runs at the seeds of the coming look have no end.
    """

    look: DeclaredLook | None
    coming: DeclaredLook | None
    design: Design
    unlearned: bool = False
    waits_for: Mapping[str, Sequence[Run]] = field(default_factory=dict)

    @property
    def levels(self) -> LookLevels:
        """What the look that it was judged at may use up; before the first, that one's."""
        return (self.look or self.design.looks[0]).levels

    @property
    def seeds(self) -> list[int]:
        """The seeds that it was judged by."""
        return self.design.seeds_at(self.look or self.design.looks[0])

    @property
    def settled(self) -> bool:
        """Whether the recipe gets no more seeds: it is decided, or all looks are taken."""
        return self.coming is None

    @property
    def words(self) -> str:
        """The look in words: "look 2 of 6"."""
        return f"look {self.look.number if self.look else 0} of {len(self.design.looks)}"

    @property
    def what_next(self) -> str:
        """What is to come where the recipe is open."""
        if self.coming is not None and self.waits_for:
            return f"open at {self.words}; the next, after {self.coming.seeds} seeds, waits for {self._awaited}"
        if self.coming is not None:
            return f"open at {self.words}; the next is after {self.coming.seeds} seeds"
        if self.unlearned:
            return f"open at {self.words}; more seeds would not help"
        return f"open at {self.words}, the last: the declared {self.design.last.seeds} seeds are spent"

    @property
    def _awaited(self) -> str:
        """The runs that it waits for in words: "bf16 at seed 1 (job 3: unreadable)"."""
        found = [
            f"{label} at seed {run.seed} (job {run.folder.name}: {status_of(run)})"
            for label, runs in self.waits_for.items()
            for run in runs
        ]
        more = f" and {len(found) - MOST_AWAITED} more" if len(found) > MOST_AWAITED else ""
        return f"{', '.join(found[:MOST_AWAITED])}{more}"

    def as_data(self) -> dict[str, Any]:
        """Return what `compare.json` has under "look"."""
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
"""The A/A floor over the runs of these seeds: outliers, and so a look, depend on it."""


def judge_by_looks(
    family: ComparisonGroup, floor_at: FloorAt, design: Design, curve: Curve | None = None
) -> dict[str, tuple[VerdictInputs, SequentialState]]:
    """Return {recipe: (its verdict at its last look, where it stands)} of one family.

    A look is taken where every recipe that is still open has a run, whatever became of it, at all its seeds. Runs at
    later seeds are not looked at. Recipes that were decided at an earlier look stay in the pool with what they had. A
    margin in tokens is by the baseline's `curve` over the seeds of the look, whose other runs have to have ended, too.
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
    """Return where a recipe stands, with the runs that its coming look lacks: of any recipe that takes it, too."""
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
    """Return what `judge_by_looks` does, of recipes called `labels`.

    `is_there`: whether a recipe has its runs at all these seeds; `measured`: what came of them there.
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
    if not found:  # not one look yet: what there is, and no decision
        first = design.looks[0]
        for label, judged in judged_at(first).items():
            found[label] = replace(judged, decision="inconclusive"), SequentialState(None, first, design)
    return found
