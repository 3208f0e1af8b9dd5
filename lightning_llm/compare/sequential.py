"""Verdicts at declared looks: each recipe is judged at one look after the other, until it is decided.

What a look finds is a function of the runs, the declared seeds and the terms. So a sweep that was killed between two
looks finds what it had found, and no look is spent twice. A recipe that is decided stays so, with the interval it was
decided by, whatever later seeds of others make of the pooled variance.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_llm.compare.design import Design, Look
from lightning_llm.compare.effective_data import Curve
from lightning_llm.compare.estimate import Judged, LookLevels, Measured, judge_all, measure
from lightning_llm.compare.pairing import Family


@dataclass(frozen=True)
class Stage:
    """Where a recipe stands: `look` its last one, None before the first; `coming` the one it waits for, None if none.

    `unlearned`: the baseline has not learned, and no more seeds are run for that.
    """

    look: Look | None
    coming: Look | None
    design: Design
    unlearned: bool = False

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
        if self.coming is not None:
            return f"open at {self.words}; the next is after {self.coming.seeds} seeds"
        if self.unlearned:
            return f"open at {self.words}; more seeds would not help"
        return f"open at {self.words}, the last: the declared {self.design.last.seeds} seeds are spent"

    def as_data(self) -> dict[str, Any]:
        """Return what `compare.json` has under "look"."""
        return {
            "number": self.look.number if self.look else 0,
            "of": len(self.design.looks),
            "seeds": self.look.seeds if self.look else 0,
            "interval_confidence": self.look.levels.intervals if self.look else None,
            "settled": self.settled,
            "next_seeds": self.coming.seeds if self.coming else None,
        }


FloorAt = Callable[[Sequence[int]], float | None]
"""The A/A floor over the runs of these seeds: outliers, and so a look, depend on it."""


def judge_by_looks(
    family: Family, floor_at: FloorAt, design: Design, curve: Curve | None = None
) -> dict[str, tuple[Judged, Stage]]:
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

    return replay(list(family.recipes), is_there, measured, floor_at, design)


def replay(
    labels: Sequence[str],
    is_there: Callable[[str, Sequence[int]], bool],
    measured: Callable[[str, Sequence[int]], Measured],
    floor_at: FloorAt,
    design: Design,
) -> dict[str, tuple[Judged, Stage]]:
    """Return what `judge_by_looks` does, of recipes called `labels`.

    `is_there`: whether a recipe has its runs at all these seeds; `measured`: what came of them there.
    """
    found: dict[str, tuple[Judged, Stage]] = {}
    done: dict[str, Look] = {}

    def judged_at(look: Look) -> dict[str, Judged]:
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
                found[label] = judged, Stage(look, None if settled else following, design, unlearned)
        done |= {label: look for label, (_, stage) in found.items() if stage.coming is None and label not in done}
    if not found:  # not one look yet: what there is, and no decision
        first = design.looks[0]
        for label, judged in judged_at(first).items():
            found[label] = replace(judged, decision="inconclusive"), Stage(None, first, design)
    return found
