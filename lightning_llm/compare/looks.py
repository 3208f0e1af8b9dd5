"""Looks at a growing sweep that are declared before its first run (`Design`).

A look is one comparison of the runs that exist at that time. A design has the looks and all terms of the verdicts;
`sweep.json` stores it with its hash. A verdict by other terms, chosen after the losses were seen, does not have the
declared error rate.

Each look spends a share of the error (group-sequential boundaries):
K. K. G. Lan and D. L. DeMets, "Discrete sequential boundaries for clinical trials", Biometrika 70 (1983) 659-663: a
spending function gives the part of the error alpha that may be used up by a look after a share t of all seeds. The
critical value of each look then follows from the joint distribution of the statistics over the looks: P(first beyond at
look k) = the error spent there. Paired t statistics, gap minus margin over its standard error, are pivotal if the gap
equals the margin: their joint distribution depends neither on it nor on the spread. So it can be simulated (seeded) for
the exact procedure that judges: recipes against one baseline, with guarded pooled variances (`intervals.spread_of`).

The result is the confidence of each look's intervals. Intervals at these confidences hold jointly over all looks and
recipes, whenever one stops and for whatever reason: the repeated confidence intervals of C. Jennison and B. W.
Turnbull, J. R. Stat. Soc. B 51 (1989) 305-361. With one look they are those of `intervals.py`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import special  # and not stats, which takes a second to import

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.compare.best_value import BestOf
from lightning_llm.compare.runs.find import RunSelection
from lightning_llm.compare.statistics.intervals import spread_of
from lightning_llm.compare.terms import LookLevels, RequestedTerms, Terms
from lightning_llm.config.schema.sweep import read_margin
from lightning_llm.tracking.sweep_file import DESIGN, FILE, read_declared

Spending = Literal["linear", "pocock", "obrien_fleming"]
SPENDINGS: tuple[Spending, ...] = get_args(Spending)
DRAWS = 50_000
"""Number of simulated sweeps: with 50,000 an error of 0.05 has a standard error of 0.001."""
MOST_NUMBERS = 20_000_000
"""Largest number of random numbers drawn at once; for many recipes fewer sweeps are simulated."""
LEAST_SPENT = 1e-5
"""Smallest error of one look. A look with a smaller share has intervals at this error: it practically never decides,
and adds at most this much to the total error."""


def spent(spending: Spending, share: float, alpha: float) -> float:
    """Return the part of the two-sided error `alpha` that may be used by looks up to `share` of all seeds (0 to 1).

    linear: alpha t (K. Kim and D. L. DeMets, Biometrika 74 (1987) 149-154, with rho = 1). pocock: alpha ln(1 + (e - 1)
    t) and obrien_fleming: 4 - 4 Phi(z(1 - alpha / 4) / sqrt(t)), both from Lan and DeMets (1983), named after the
    boundaries of equally spaced looks that they approximate.
    """
    if spending == "linear":
        return alpha * share
    if spending == "pocock":
        return alpha * math.log(1 + (math.e - 1) * share)
    return float(4 * special.ndtr(-special.ndtri(1 - alpha / 4) / math.sqrt(share)))


def increments(looks: tuple[int, ...], alpha: float, spending: Spending) -> tuple[float, ...]:
    """Return the part of the error `alpha` that each look uses; the parts sum to `alpha`.

    `looks`: number of seeds at each look, ascending.
    """
    total = [spent(spending, seeds / looks[-1], alpha) for seeds in looks]
    return tuple(now - before for now, before in zip(total, [0.0, *total], strict=False))


@lru_cache(maxsize=64)
def boundary(
    looks: tuple[int, ...], recipes: int, confidence: float, spending: Spending, draws: int = DRAWS
) -> tuple[float, ...]:
    """Return the confidence of the intervals of each look, such that all of them hold jointly with `confidence`.

    Args:
        looks: number of seeds at each look, ascending, at least 2 looks.
        recipes: number compared with the baseline together.
        confidence: of all intervals at all looks together.
        spending: how the error is divided over the looks.
        draws: simulated sweeps, fewer for many recipes (`MOST_NUMBERS`).
    """
    draws = max(2000, min(draws, MOST_NUMBERS // ((recipes + 1) * looks[-1])))
    runs = np.random.default_rng(0).standard_normal((draws, recipes + 1, looks[-1]))
    differences = runs[:, 1:] - runs[:, :1]
    inside = np.ones(draws, dtype=bool)
    found, total = [], 0.0
    for seeds, share in zip(looks, increments(looks, 1 - confidence, spending), strict=True):
        total += share
        ranks = _ranks(_smallest_levels(differences[..., :seeds]))
        due = round(total * draws) - int((~inside).sum())
        error = float(np.sort(ranks[inside])[due - 1]) if due > 0 else 0.0
        inside &= ranks > error
        found.append(1 - max(error, LEAST_SPENT))
    return tuple(found)


def _smallest_levels(differences: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the level at which the most distant recipe is just not zero, [n]; one t per sweep, which orders sweeps.

    Degrees of freedom differ if a recipe has left the pool.
    """
    spread = spread_of(differences)
    t = np.abs(spread.gap) / np.sqrt(spread.variance / spread.pairs)
    levels: NDArray[np.float64] = special.stdtr(spread.df, -t).min(-1)
    return levels


def _ranks(levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return levels as the share of all levels that are at most as large: uniform, like those of exact intervals.

    The guard of the pool makes the intervals of one look conservative. Treating levels as uniform keeps that reserve,
    as with one look, for spreads less similar than those simulated here.
    """
    ranks = np.empty(len(levels))
    ranks[np.argsort(levels, kind="stable")] = np.arange(1, len(levels) + 1) / len(levels)
    return ranks


@dataclass(frozen=True)
class DeclaredLook:
    """A look that was declared before the sweep's first run: taken after `seeds` seeds, with the error rates `levels`.

    `number` counts from 1.
    """

    number: int
    seeds: int
    levels: LookLevels


@dataclass(frozen=True)
class Design:
    """The declared plan of a sweep: `looks`, terms of the verdicts, and `seeds` in the order in which they are run.

    `spending`: how the error is divided over the looks; `recipes`: largest number compared with one baseline.
    """

    looks: tuple[DeclaredLook, ...]
    seeds: tuple[int, ...]
    terms: Terms
    spending: Spending
    recipes: int
    baseline: str | None = None

    @property
    def last(self) -> DeclaredLook:
        """The look at which all declared seeds are used."""
        return self.looks[-1]

    def seeds_at(self, look: DeclaredLook) -> list[int]:
        """Return the seeds that are judged at `look`."""
        return list(self.seeds[: look.seeds])

    def as_data(self) -> dict[str, Any]:
        """Return the design as `sweep.json` stores it, with its hash as the last entry."""
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
    def text(self) -> str:
        """The design as text: "after 2, 3, 4 seeds, margin 0.01 nats per token, pocock spending"."""
        looks = ", ".join(str(look.seeds) for look in self.looks)
        return f"after {looks} seeds, margin {self.terms.margin_and_unit}, {self.spending} spending"


def hash_of(value: Any, digits: int = 12) -> str:
    """Return the first `digits` hex digits of the SHA-256 hash of JSON data: a design, or losses."""
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:digits]


def declare(
    looks: tuple[int, ...], seeds: tuple[int, ...], terms: Terms, spending: Spending, recipes: int, baseline: str | None
) -> Design:
    """Return the design for these looks, with the confidence of the intervals of each.

    `looks`: number of seeds at each look, ascending; `recipes`: number compared with one baseline.
    """
    confidences = boundary(looks, recipes, terms.confidence, spending)
    failures = increments(looks, 1 - terms.confidence, spending)
    made = (
        DeclaredLook(number, count, LookLevels(round(confidence, 6), round(failure, 6)))
        for number, (count, confidence, failure) in enumerate(zip(looks, confidences, failures, strict=True), 1)
    )
    return Design(tuple(made), seeds, terms, spending, recipes, baseline)


def read_design(about: Any, where: str) -> Design | None:
    """Return the design in `about`, the content of the `sweep.json` at `where`; None if it has none.

    Raises:
        ConfigError: the design was changed after it was declared: its hash does not match.
    """
    if not isinstance(about, Mapping) or DESIGN not in about:
        return None
    data = about[DESIGN]
    try:
        if not isinstance(data, Mapping) or not data:
            raise ValueError("it is damaged: it is empty")
        rest = {key: value for key, value in data.items() if key != "hash"}
        if hash_of(rest) != data["hash"]:
            raise ValueError("its hash does not match, so it was changed after it was declared")
        derived = data["derived"]
        levels = zip(data["looks"], derived["interval_confidences"], derived["failure_levels"], strict=True)
        looks = tuple(
            DeclaredLook(n, seeds, LookLevels(each, failures)) for n, (seeds, each, failures) in enumerate(levels, 1)
        )
        nats, share = read_margin(data["margin"])
        terms = Terms(nats, data["confidence"], data["metric"], data["tail"], token_margin=share)
        return Design(looks, tuple(data["seeds"]), terms, data["spending"], data["recipes"], data["baseline"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        text = f"the declared looks ('{DESIGN}') cannot be used: {error}. Restore the file from a copy."
        raise ConfigError(Problem(where, text)) from error


USUAL = "the default"


@dataclass(frozen=True)
class Declared:
    """The `design` that the verdicts on the selected runs follow, None without one, and `notes` on it."""

    design: Design | None = None
    notes: tuple[str, ...] = ()

    @property
    def terms(self) -> Terms | None:
        """The declared terms of verdicts; None without a design."""
        return self.design.terms if self.design else None

    @property
    def baseline(self) -> str | None:
        """The declared baseline; None for the default, or without a design."""
        return self.design.baseline if self.design else None


def declared_looks(
    found: RunSelection, asked: RequestedTerms, baseline: str | None, best_of: BestOf | None
) -> Declared:
    """Return the design for the selected runs, if they are exactly one whole sweep and the declared terms are kept.

    With other terms or other runs a verdict does not have the declared error rate, which a note reports.

    Raises:
        ConfigError: the design is damaged or was changed after it was declared.
    """
    folders = found.sweeps or sorted({run.parent for run in found.folders if (run.parent / FILE).is_file()})
    designs: dict[Path, Design] = {}
    for folder in folders:
        try:
            declared = read_declared(folder)
        except ConfigError:  # `lost_jobs` reports it
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
            f"({design.text}), but this comparison differs: {'; '.join(others)}. Its verdicts are taken at one "
            "undeclared look at the existing runs and do not have the declared error rate."
        )
        return Declared(None, (text,))
    text = (
        f"Looks were declared before the first run: {design.text}. The intervals are valid jointly over all looks and "
        f"recipes with {100 * design.terms.confidence:g} %, whenever a sweep stops (repeated confidence intervals). "
        "The verdict and interval of a recipe are those of the look that decided it, or of its last look."
    )
    return Declared(design, (text,))


def _other_terms(design: Design, asked: RequestedTerms, baseline: str | None, best_of: BestOf | None) -> list[str]:
    now, were = asked.over(design.terms), design.terms
    named = {
        "margin": (were.margin_text, now.margin_text), "confidence": (were.confidence, now.confidence),
        "metric": (were.metric, now.metric), "tail": (were.tail_share, now.tail_share),
        "baseline": (design.baseline or USUAL, baseline or design.baseline or USUAL),
    }  # fmt: skip
    if baseline == "precision=bf16" and design.baseline is None:
        named.pop("baseline")  # the default
    others = [f"{name} {new} in place of {old}" for name, (old, new) in named.items() if new != old]
    return [*others, *([f"--best-of {best_of.key}"] if best_of else [])]
