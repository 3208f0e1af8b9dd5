"""Design of a sequential sweep: looks, and all that a verdict is asked for, declared before its first run.

It lies in `sweep.json` with its hash. A verdict by other terms, chosen after the losses were seen, has not its error.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.compare.best_value.selection import BestOf
from lightning_llm.compare.runs.find import Found
from lightning_llm.compare.sequential.boundary import Spending, boundary, increments
from lightning_llm.compare.terms import AskedTerms, LookLevels, Terms
from lightning_llm.config.schema.sweep import read_margin
from lightning_llm.tracking.sweep_file import DESIGN, FILE, read_declared


@dataclass(frozen=True)
class Look:
    """A declared look: after `seeds`, with intervals at `levels`; `number` counts from 1."""

    number: int
    seeds: int
    levels: LookLevels


@dataclass(frozen=True)
class Design:
    """`seeds`: in the order they are run; `recipes`: the most that are held against one baseline together."""

    looks: tuple[Look, ...]
    seeds: tuple[int, ...]
    terms: Terms
    spending: Spending
    recipes: int
    baseline: str | None = None

    @property
    def last(self) -> Look:
        """The look at which the budget of seeds is spent."""
        return self.looks[-1]

    def seeds_at(self, look: Look) -> list[int]:
        """Return the seeds that are judged at `look`."""
        return list(self.seeds[: look.seeds])

    def as_data(self) -> dict[str, Any]:
        """Return what `sweep.json` has of it, its hash last."""
        about: dict[str, Any] = {
            "looks": [look.seeds for look in self.looks],
            "spending": self.spending,
            "margin": self.terms.margin if self.terms.token_margin is None else f"{100 * self.terms.token_margin:g}%",
            "confidence": self.terms.confidence,
            "metric": self.terms.metric,
            "tail": self.terms.tail_share,
            "baseline": self.baseline,
            "seeds": list(self.seeds),
            "recipes": self.recipes,
            "derived": {
                "interval_confidences": [look.levels.intervals for look in self.looks],
                "failure_levels": [look.levels.failures for look in self.looks],
            },
        }
        return {**about, "hash": hash_of(about)}

    @property
    def words(self) -> str:
        """The looks in a few words, for plans and notes."""
        looks = ", ".join(str(look.seeds) for look in self.looks)
        return f"after {looks} seeds, margin {self.terms.margin_and_unit}, {self.spending} spending"


def hash_of(about: Mapping[str, Any]) -> str:
    """Return 12 hex digits over a design as data."""
    return sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]


def declare(
    looks: tuple[int, ...], seeds: tuple[int, ...], terms: Terms, spending: Spending, recipes: int, baseline: str | None
) -> Design:
    """Return the design of these looks, with the confidence that each takes."""
    confidences = boundary(looks, recipes, terms.confidence, spending)
    failures = increments(looks, 1 - terms.confidence, spending)
    made = (
        Look(number, count, LookLevels(round(confidence, 6), round(failure, 6)))
        for number, (count, confidence, failure) in enumerate(zip(looks, confidences, failures, strict=True), 1)
    )
    return Design(tuple(made), seeds, terms, spending, recipes, baseline)


def read_design(about: Any, where: str) -> Design | None:
    """Return the design in the content of a `sweep.json`, None where it declares none.

    Raises:
        ConfigError: it is not as it was declared: its hash is another's.
    """
    if not isinstance(about, Mapping) or DESIGN not in about:
        return None
    data = about[DESIGN]
    try:
        if not isinstance(data, Mapping) or not data:
            raise ValueError("it is damaged: nothing is declared in it")
        rest = {key: value for key, value in data.items() if key != "hash"}
        if hash_of(rest) != data["hash"]:
            raise ValueError("its hash is another's, so it was changed after it was declared")
        derived = data["derived"]
        levels = zip(data["looks"], derived["interval_confidences"], derived["failure_levels"], strict=True)
        looks = tuple(Look(n, seeds, LookLevels(each, failures)) for n, (seeds, each, failures) in enumerate(levels, 1))
        nats, share = read_margin(data["margin"])
        terms = Terms(nats, data["confidence"], data["metric"], data["tail"], token_margin=share)
        return Design(looks, tuple(data["seeds"]), terms, data["spending"], data["recipes"], data["baseline"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        text = f"the declared looks ('{DESIGN}') cannot be used: {error}."
        raise ConfigError(Problem(where, text)) from error


USUAL = "the usual one"


@dataclass(frozen=True)
class Declared:
    """The `design` that verdicts are taken by, None where they are not; `notes` on that; the declared `baseline`."""

    design: Design | None = None
    notes: tuple[str, ...] = ()

    @property
    def terms(self) -> Terms | None:
        """The declared terms, if verdicts are taken by a design."""
        return self.design.terms if self.design else None

    @property
    def baseline(self) -> str | None:
        """The declared baseline, if any."""
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
