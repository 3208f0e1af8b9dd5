"""Whether a comparison is one of a sweep whose looks were declared, by the terms that were declared."""

from dataclasses import dataclass, replace
from pathlib import Path

from lightning_llm.base.errors import ConfigError
from lightning_llm.compare.best_value.best_of import BestOf
from lightning_llm.compare.estimate import Terms
from lightning_llm.compare.runs.find import Found
from lightning_llm.compare.sequential.design import Design, read_design
from lightning_llm.compare.target import NO_TARGETS, Targets
from lightning_llm.compare.tokens.token_margin import margin_of
from lightning_llm.tracking.sweep_file import FILE, read_declared

USUAL = "the usual one"


@dataclass(frozen=True)
class AskedTerms:
    """The terms that were asked for, None where nothing was; `margin` in nats, or "2%" of tokens."""

    margin: float | str | None = None
    confidence: float | None = None
    metric: str | None = None
    tail: float | None = None
    targets: Targets = NO_TARGETS
    all_pairs: bool = False

    def margins(self, terms: Terms) -> tuple[float, float | None]:
        """Return the margin in nats, and as a share of tokens where it was asked for so. Raises ConfigError."""
        return (terms.margin, terms.token_margin) if self.margin is None else margin_of(self.margin)

    def over(self, terms: Terms) -> Terms:
        """Return `terms` with what was asked for in their place. Raises ConfigError for a margin that is none."""
        margin, share = self.margins(terms)
        return replace(
            terms,
            margin=margin,
            token_margin=share,
            targets=self.targets,
            all_pairs=self.all_pairs,
            confidence=terms.confidence if self.confidence is None else self.confidence,
            metric=terms.metric if self.metric is None else self.metric,
            tail_share=terms.tail_share if self.tail is None else self.tail,
        )


@dataclass(frozen=True)
class Declared:
    """The `design` that verdicts are taken by, None where they are not; `notes` on that; the declared `baseline`."""

    design: Design | None = None
    notes: tuple[str, ...] = ()

    @property
    def baseline(self) -> str | None:
        """What was declared that the others are held against, if anything."""
        return self.design.baseline if self.design else None


def declared_looks(found: Found, asked: AskedTerms, baseline: str | None, best_of: BestOf | None) -> Declared:
    """Return the design that the runs which were found are judged by: that of the one sweep that was named whole.

    By other terms than it declares, or with other runs, a verdict has not its error, which is noted.

    Raises:
        ConfigError: the design is damaged, or was changed after it was declared.
    """
    folders = found.sweeps or sorted({run.parent for run in found.folders if (run.parent / FILE).is_file()})
    designs: dict[Path, Design] = {}
    for folder in folders:
        try:
            declared = read_declared(folder)
        except ConfigError:  # which `lost_jobs` names
            continue
        if design := read_design(declared, str(folder / FILE)):
            designs[folder] = design
    if not designs:
        return Declared()
    design = next(iter(designs.values()))
    others = _other_terms(design, asked, baseline, best_of)
    if len(found.sweeps) != 1 or any(run.parent != found.sweeps[0] for run in found.folders):
        others.append("runs of several folders, or not all of the sweep's")
    if others:
        text = (
            f"The looks of {', '.join(folder.name for folder in designs)} were declared before its first run "
            f"({design.words}), and this asks for something else: {'; '.join(others)}. These verdicts are of one look "
            "at what is there, stopped for another reason, and do not have the declared error."
        )
        return Declared(None, (text,))
    text = (
        f"Looks were declared before the first run: {design.words}. The intervals hold together over all looks and "
        f"recipes with {100 * design.terms.confidence:g} %, whenever a sweep stops (repeated confidence intervals). A "
        "recipe has the verdict, and the interval, of the look that decided it, or else of its last."
    )
    return Declared(design, (text,))


def _other_terms(design: Design, asked: AskedTerms, baseline: str | None, best_of: BestOf | None) -> list[str]:
    now, were = asked.over(design.terms), design.terms
    named = {
        "margin": (were.margin_words, now.margin_words), "confidence": (were.confidence, now.confidence),
        "metric": (were.metric, now.metric), "tail": (were.tail_share, now.tail_share),
        "baseline": (design.baseline or USUAL, baseline or design.baseline or USUAL),
    }  # fmt: skip
    if baseline == "precision=bf16" and design.baseline is None:
        named.pop("baseline")  # which is the usual one
    others = [f"{name} {new} in place of {old}" for name, (old, new) in named.items() if new != old]
    return [*others, *([f"--best-of {best_of.key}"] if best_of else [])]
