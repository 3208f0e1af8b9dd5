"""Looks at a growing sweep: declared before its first run (`Design`), or recorded as they are taken (`RecordedLook`).

A look is one comparison of the runs that exist at that time. A design has the looks and all terms of the verdicts;
`sweep.json` stores it with its hash. A verdict by other terms, chosen after the losses were seen, does not have the
declared error rate. Looks that were not declared are recorded in `looks.json` beside the runs, because each is another
chance of a false verdict.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.compare.best_value import BestOf
from lightning_llm.compare.runs.find import RunSelection
from lightning_llm.compare.statistics.boundary import Spending, boundary, increments
from lightning_llm.compare.terms import LookLevels, RequestedTerms, Terms
from lightning_llm.config.schema.sweep import read_margin
from lightning_llm.tracking.files import write_json
from lightning_llm.tracking.sweep_file import DESIGN, FILE, read_declared

if TYPE_CHECKING:
    from lightning_llm.compare.verdict import Verdict


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
    def words(self) -> str:
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
            f"({design.words}), but this comparison differs: {'; '.join(others)}. Its verdicts are taken at one "
            "undeclared look at the existing runs and do not have the declared error rate."
        )
        return Declared(None, (text,))
    text = (
        f"Looks were declared before the first run: {design.words}. The intervals are valid jointly over all looks and "
        f"recipes with {100 * design.terms.confidence:g} %, whenever a sweep stops (repeated confidence intervals). "
        "The verdict and interval of a recipe are those of the look that decided it, or of its last look."
    )
    return Declared(design, (text,))


def _other_terms(design: Design, asked: RequestedTerms, baseline: str | None, best_of: BestOf | None) -> list[str]:
    now, were = asked.over(design.terms), design.terms
    named = {
        "margin": (were.margin_words, now.margin_words), "confidence": (were.confidence, now.confidence),
        "metric": (were.metric, now.metric), "tail": (were.tail_share, now.tail_share),
        "baseline": (design.baseline or USUAL, baseline or design.baseline or USUAL),
    }  # fmt: skip
    if baseline == "precision=bf16" and design.baseline is None:
        named.pop("baseline")  # the default
    others = [f"{name} {new} in place of {old}" for name, (old, new) in named.items() if new != old]
    return [*others, *([f"--best-of {best_of.key}"] if best_of else [])]


LOOKS_FILE = "looks.json"
FEWEST_PAIRS = 2
"""Least number of pairs with which a recipe can be called lossless. A look with fewer for all uses no error."""
LOOKS = (
    "Every look at a growing sweep is another chance of a false verdict. With a true gap at the margin, lossless is "
    "reported falsely in {few} of sweeps with looks after 2, 3, 4 and 5 seeds, and in {many} with looks after 2 to 20 "
    "seeds, instead of 2.5 %. Choose the number of seeds first, and take the verdict at that number."
)
FALSE_LOSSLESS_BY_LOOKS = {(2, 5): 0.068, (2, 20): 0.129}
"""{(first, last number of seeds at a look): rate of a false lossless at some look with the gap at the margin}, for one
recipe and 95 % intervals; from tests/compare/test_stability.py."""


@dataclass(frozen=True)
class RecordedLook:
    """One look as `looks.json` stores it: its time `at` (ISO 8601), terms, and by recipe its pairs and verdicts.

    `seen`: hash of the judged losses and the terms. `margin`: in nats, None if it was given as the share `token_margin`
    of tokens.
    """

    at: str
    seen: str
    margin: float | None
    confidence: float
    metric: str
    tail: float
    pairs: dict[str, int]
    verdicts: dict[str, str]
    token_margin: float | None = None
    baseline: str = ""
    data: str = ""
    """Hash of the judged losses, the metric and the tail, equal under every margin and confidence; empty in files of
    earlier releases."""
    spent: float | None = None
    """Error that this look used of the budget of its series (`error_budget`); None without --require."""
    budget: float | None = None
    planned_looks: int | None = None

    @property
    def identity(self) -> str:
        """Hash that identifies the judged losses: two looks with the same hash count as one look."""
        return self.data or self.seen


def look_at(verdicts: Sequence["Verdict"], terms: Terms) -> RecordedLook:
    """Return the record of a look with these verdicts and terms; `seen` equals an earlier look's if nothing is new."""
    names = {id(each): " ".join(filter(None, (each.name, each.family.words))) for each in verdicts}
    shown = [
        [names[id(each)], each.factor.baseline_label, sorted(each.judged.measured.differences.items()),
         each.judged.measured.seeds, each.judged.measured.missing_seeds]
        for each in verdicts
    ]  # fmt: skip
    return RecordedLook(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        seen=hash_of([_asked(terms), shown], 16),
        margin=terms.margin if terms.token_margin is None else None,
        confidence=terms.confidence,
        metric=terms.metric,
        tail=terms.tail_share,
        pairs={names[id(each)]: len(each.judged.measured.seeds) for each in verdicts},
        verdicts={names[id(each)]: each.decision for each in verdicts},
        token_margin=terms.token_margin,
        baseline=verdicts[0].factor.baseline_label if verdicts else "",
        data=hash_of([terms.metric, terms.tail_share, shown], 16),
    )


def _asked(terms: Terms) -> dict[str, Any]:
    """Return the terms that determine verdicts, for the hash; other terms only change the display."""
    words = {key: getattr(terms, key) for key in ("margin", "confidence", "metric", "tail_share")}
    return words if terms.token_margin is None else words | {"token_margin": terms.token_margin}


def record_look(look: RecordedLook, folder: Path) -> list[RecordedLook]:
    """Append `look` to the looks recorded in `folder`, unless it saw nothing new, and return all of them.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: it does not contain looks.
    """
    known = read_looks(folder / LOOKS_FILE)
    looks = appended(known, look)
    if looks != known:
        write_looks(folder / LOOKS_FILE, looks)
    return looks


def appended(known: Sequence[RecordedLook], look: RecordedLook) -> list[RecordedLook]:
    """Return the `known` looks with `look` added, unless it repeats one of them (same losses, its error recorded)."""
    same = [each for each in known if each.seen == look.seen]
    recorded = any(each.spent is not None or look.spent is None for each in same)
    return list(known) if recorded else [*known, look]


def read_looks(file: Path) -> list[RecordedLook]:
    """Return the looks recorded in `file`, none if it does not exist.

    Raises:
        OSError: it cannot be read.
        ValueError: it does not contain looks.
    """
    try:
        return [_read(each) for each in json.loads(file.read_text(encoding="utf-8"))["looks"]] if file.exists() else []
    except (KeyError, TypeError, RecursionError, ValueError) as error:
        raise ValueError(f"{file} is damaged: {error}. Restore it from a copy, or move it away") from error


def write_looks(file: Path, looks: Sequence[RecordedLook]) -> None:
    """Write `looks` to `file`, atomically. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"looks": [asdict(each) for each in looks]})


def _read(each: Any) -> RecordedLook:
    """Return one recorded look. Raises TypeError or ValueError if it is invalid."""
    look = RecordedLook(**each)
    numbers: dict[str, Any] = {"confidence": look.confidence, "tail": look.tail}
    numbers |= {"token_margin": look.token_margin} if look.margin is None else {"margin": look.margin}
    numbers |= {key: value for key in ("spent", "budget") if (value := getattr(look, key)) is not None}
    wrong = [key for key, value in numbers.items() if type(value) not in (int, float) or not math.isfinite(value)]
    wrong += [key for key in ("at", "seen", "metric", "baseline", "data") if not isinstance(getattr(look, key), str)]
    for key, kind in (("pairs", int), ("verdicts", str)):
        found = getattr(look, key)
        if not isinstance(found, dict) or not all(type(value) is kind for value in found.values()):
            wrong.append(key)
    if look.planned_looks is not None and type(look.planned_looks) is not int:
        wrong.append("planned_looks")
    if not wrong and look.pairs.keys() != look.verdicts.keys():
        wrong.append("pairs")
    if wrong:
        raise ValueError(f"a look has no valid {', '.join(wrong)}")
    return look


def looks_statement() -> str:
    """Return the sentence of reports on how repeated looks raise the rate of false verdicts."""
    few, many = (f"{100 * rate:.1f} %" for rate in FALSE_LOSSLESS_BY_LOOKS.values())
    return LOOKS.format(few=few, many=many)
