"""Error budget of a series of looks: the error that each look may use, so that all looks together keep the error rate.

A series is the arms that are compared, under a declared name (--series NAME), or else in one folder. Its budget is
1 - confidence, the error that a single verdict may have. Each look at new losses spends a part: half of the rest,
or 1/N of all with --looks N. The verdict of a look that spends e has intervals at confidence 1 - e.

The k-th look at an arm has number k or higher in its series, so the parts spent on one arm are at most the budget.
Therefore (union bound: P(any of several events) is at most the sum of their probabilities) the chance that any look is
wrong about that arm is at most the budget, however the looks depend on each other: more seeds of a sweep, a new sweep,
or another metric. The chance of a false "lossless", one side of the intervals, is at most half of it. Looks at other
arms are other claims: together they may spend more.

Every recorded look counts, also those without --require: who sees a verdict can choose when to ask for it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.compare.looks import LOOKS_FILE, RecordedLook
from lightning_llm.config.workspace import default_outputs

Required = Literal["lossless", "not-lossy"]
REQUIRED: tuple[Required, ...] = get_args(Required)
LEAST_SPENT = 1e-5
"""A look that could spend less than this decides nothing: the budget is used up."""
FEWEST_PAIRS = 2
"""Pairs of an arm without which no look can call it lossless, so that the look spends nothing."""


@dataclass(frozen=True)
class Gate:
    """The verdict that is `required`; the name or file of the `series`, and its planned number of `looks`, if given."""

    required: Required
    series: str | None = None
    looks: int | None = None

    def file(self, folder: Path) -> Path:
        """Return the file of the looks of the series; without a name that of the report's `folder`."""
        if self.series is None:
            return folder / LOOKS_FILE
        if self.series.endswith(".json"):
            return Path(self.series).expanduser().absolute()
        return Path(default_outputs(), "series", f"{self.series}.json").absolute()


def read_gate(required: str | None, series: str | None = None, looks: int | None = None) -> Gate | None:
    """Return the gate of --require, --series and --looks; None without --require.

    Raises:
        ConfigError: with all that is wrong.
    """
    problems: list[Problem] = []
    wanted: Required | None = None
    with gathered(problems):
        wanted = None if required is None else read_required(required)
    if required is None:
        given = [flag for flag, value in (("--series", series), ("--looks", looks)) if value is not None]
        problems += [Problem(flag, "has no effect without --require. Add --require lossless.") for flag in given]
    if series is not None and not series.endswith(".json") and not re.fullmatch(r"\w[\w.-]*", series):
        text = "must be a name of letters, digits, '.', '_' and '-', or a file that ends in .json."
        problems.append(Problem("--series", text, series))
    if looks is not None and (type(looks) is not int or looks < 1):
        problems.append(Problem("--looks", "must be a whole number of at least 1.", looks))
    if problems:
        raise ConfigError(problems)
    return None if wanted is None else Gate(wanted, series, looks)


def read_required(word: str) -> Required:
    """Return the required verdict that `word` names. Raises ConfigError."""
    for each in REQUIRED:
        if each == word:
            return each
    raise ConfigError(Problem("--require", f"must be {' or '.join(REQUIRED)}.", word))


@dataclass(frozen=True)
class Spending:
    """Spending of one look: number `look` of its series, `spent` of the `budget`, and `left` after it.

    `look` is 0 for a look that spends nothing because no arm has two pairs.
    """

    file: Path
    look: int
    budget: float
    spent: float
    left: float
    planned_looks: int | None

    @property
    def exhausted(self) -> bool:
        """True if nothing was left for this look."""
        return self.look > 0 and not self.spent

    @property
    def next_spent(self) -> float:
        """The error that the next look can spend."""
        return _share(self.look + 1, self.budget, self.planned_looks)

    @property
    def text(self) -> str:
        """The look and the budget as a sentence."""
        total = f"the error budget of {100 * self.budget:g} %"
        of = "" if self.planned_looks is None else f" of {self.planned_looks}"
        if not self.look:
            return f"This look spends nothing of {total} of its series ({self.file}): no arm has two pairs."
        if self.exhausted:
            return (
                f"This is look {self.look} of its series ({self.file}), and nothing is left of {total}: no verdict. A "
                "new claim, such as another recipe or model, is a new series: --series NAME."
            )
        return (
            f"This is look {self.look}{of} of its series ({self.file}): its intervals, at {100 * (1 - self.spent):.6g} "
            f"%, spend {100 * self.spent:.3g} % of {total}; {100 * self.left:.3g} % is left. The same losses again are "
            "the same look."
        )

    def as_data(self) -> dict[str, Any]:
        """Return the entry "error_budget" of `compare.json`."""
        return {
            "series": str(self.file),
            "look": self.look,
            "budget": self.budget,
            "spent": self.spent,
            "left": self.left,
            "planned_looks": self.planned_looks,
        }


def spending_of(look: RecordedLook, earlier: Sequence[RecordedLook], gate: Gate, budget: float, file: Path) -> Spending:
    """Return the spending of `look` after the `earlier` looks, oldest first, which may contain it.

    Raises:
        ConfigError: the series has another budget or another number of planned looks.
    """
    same = [each for each in earlier if _of_one_series(each, look)]
    _check_declared(same, look, gate, budget, file)
    planned = next((each.planned_looks for each in same if each.spent is not None), gate.looks)
    before = [each.identity for each in same if can_decide(each)]
    places = list(dict.fromkeys(before))
    number = places.index(look.identity) + 1 if look.identity in places else len(places) + 1
    last = max(number, len(places))
    left = budget - sum(_share(each, budget, planned) for each in range(1, last + 1))
    if not can_decide(look):
        left = budget - sum(_share(each, budget, planned) for each in range(1, len(places) + 1))
        return Spending(file, 0, budget, 0.0, max(left, 0.0), planned)
    return Spending(file, number, budget, _share(number, budget, planned), max(left, 0.0), planned)


def can_decide(look: RecordedLook) -> bool:
    """Return whether an arm has enough pairs to be called lossless: only such looks spend error."""
    return any(pairs >= FEWEST_PAIRS for pairs in look.pairs.values())


def _share(number: int, budget: float, planned: int | None) -> float:
    """Return the error that look `number`, from 1 on, may spend."""
    share = budget / 2**number if planned is None else budget / planned if number <= planned else 0.0
    return share if share >= LEAST_SPENT else 0.0


def _of_one_series(one: RecordedLook, other: RecordedLook) -> bool:
    """Return whether two looks have an arm in common, against the same baseline."""
    same_baseline = one.baseline == other.baseline or not (one.baseline and other.baseline)
    return same_baseline and bool(one.pairs.keys() & other.pairs.keys())


def _check_declared(same: Sequence[RecordedLook], look: RecordedLook, gate: Gate, budget: float, file: Path) -> None:
    problems = []
    first = next((each for each in same if each.spent is not None), None)
    if first is not None and first.budget is not None and abs(first.budget - budget) > 1e-12:
        text = f"the series in {file} was begun with {1 - first.budget:g}. Use that."
        problems.append(Problem("--confidence", text, f"{1 - budget:g}"))
    if gate.looks is not None and first is not None and first.planned_looks != gate.looks:
        begun = "without --looks" if first.planned_looks is None else f"with --looks {first.planned_looks}"
        text = f"the series in {file} was begun {begun} ({first.at}). Remove --looks."
        problems.append(Problem("--looks", text, gate.looks))
    elif gate.looks is not None and first is None and any(can_decide(each) for each in same):
        text = (
            f"must be declared before the first look, and {file} has one of {same[0].at}. Remove --looks: each look "
            "then spends half of the rest."
        )
        problems.append(Problem("--looks", text, gate.looks))
    if problems:
        raise ConfigError(problems)


def with_spending(look: RecordedLook, spending: Spending) -> RecordedLook:
    """Return `look` with its spending, as it is recorded."""
    return replace(look, spent=spending.spent, budget=spending.budget, planned_looks=spending.planned_looks)


def appended(earlier: Sequence[RecordedLook], look: RecordedLook) -> list[RecordedLook]:
    """Return the looks of a series with `look`, unless it is recorded already."""
    known = any(each.seen == look.seen and each.spent is not None for each in earlier)
    return list(earlier) if known else [*earlier, look]


def merged(series: Sequence[RecordedLook], beside: Sequence[RecordedLook], look: RecordedLook) -> list[RecordedLook]:
    """Return the looks of a named series, and looks at the same arms from the runs' folder that it lacks."""
    known = {each.identity for each in series}
    lacking = [each for each in beside if each.identity not in known and _of_one_series(each, look)]
    return [*series, *(replace(each, spent=None, budget=None, planned_looks=None) for each in lacking)]
