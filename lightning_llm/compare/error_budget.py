"""Error budget of a series of looks: the error that each look may use, so that all looks together keep the error rate.

A look is one comparison of the runs that exist at that time. A series is the arms that are compared, under a declared
name (--series NAME), or else in one folder. Its budget is 1 - confidence, the error that a single verdict may have.
Each look at new losses spends a part: half of the rest, or 1/N of all with --looks N. The verdict of a look that spends
e has intervals at confidence 1 - e.

The k-th look at an arm has number k or higher in its series, so the parts spent on one arm are at most the budget.
Therefore (union bound: P(any of several events) is at most the sum of their probabilities) the chance that any look is
wrong about that arm is at most the budget, however the looks depend on each other: more seeds of a sweep, a new sweep,
or another metric. The chance of a false "lossless", one side of the intervals, is at most half of it. Looks at other
arms are other claims: together they may spend more.

Every recorded look counts, also those without --require: after seeing a verdict one could choose when to require it.
`judged_at_look` takes the next look of a series.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.compare.recorded_looks import (
    FEWEST_PAIRS,
    LOOKS_FILE,
    RecordedLook,
    appended,
    look_at,
    read_looks,
    record_look,
    write_looks,
)
from lightning_llm.compare.requirement import Gate
from lightning_llm.compare.statistics.seeds import SeedPlan
from lightning_llm.compare.terms import Terms

if TYPE_CHECKING:
    from lightning_llm.compare.comparison import Comparison
    from lightning_llm.compare.verdict import Verdict

LEAST_SPENT = 1e-5
"""A look that could spend less than this decides nothing: the budget is used up."""


@dataclass(frozen=True)
class Spending:
    """The error that one look uses: it is number `look` of its series, uses `spent` of the `budget`, and leaves `left`.

    `look` is 0 for a look that uses nothing because no recipe has two pairs. `file`: the looks of the series;
    `planned_looks`: number given by --looks, None without.
    """

    file: Path
    look: int
    budget: float
    spent: float
    left: float
    planned_looks: int | None

    @property
    def exhausted(self) -> bool:
        """True if nothing of the budget was left for this look."""
        return self.look > 0 and not self.spent

    @property
    def next_spent(self) -> float:
        """The error that the next look of the series may use."""
        return _share(self.look + 1, self.budget, self.planned_looks)

    @property
    def text(self) -> str:
        """The number of the look and the state of the budget, as a sentence."""
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
    """Return the error that `look` uses, given the `earlier` looks of the file, oldest first.

    `earlier` may contain the same look, which then uses nothing new. `budget`: error of the whole series.

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
    """Return whether any recipe has enough pairs to be called lossless; only such a look uses error."""
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
        text = f"the series in {file} was begun with {1 - first.budget:g}. Use that, or another --series."
        problems.append(Problem("--confidence", text, f"{1 - budget:g}"))
    if gate.looks is not None and first is not None and first.planned_looks != gate.looks:
        begun = "without --looks" if first.planned_looks is None else f"with --looks {first.planned_looks}"
        text = f"the series in {file} was begun {begun} ({first.at}). Remove --looks."
        problems.append(Problem("--looks", text, gate.looks))
    elif gate.looks is not None and first is None and any(can_decide(each) for each in same):
        text = (
            f"must be declared before the first look, and {file} has one of {same[0].at}. Remove --looks: each look "
            "then uses half of the remaining error."
        )
        problems.append(Problem("--looks", text, gate.looks))
    if problems:
        raise ConfigError(problems)


def with_spending(look: RecordedLook, spending: Spending) -> RecordedLook:
    """Return `look` with the error that it used, in the form in which looks are recorded."""
    return replace(look, spent=spending.spent, budget=spending.budget, planned_looks=spending.planned_looks)


def merged(series: Sequence[RecordedLook], beside: Sequence[RecordedLook], look: RecordedLook) -> list[RecordedLook]:
    """Return the looks of a named `series`, and the looks at its recipes that only the runs' folder has (`beside`)."""
    known = {each.identity for each in series}
    found = [each.recognized(series) for each in beside]
    lacking = [each for each in found if each.identity not in known and _of_one_series(each, look)]
    return [*series, *(replace(each, spent=None, budget=None, planned_looks=None) for each in lacking)]


LOCK_SECONDS = 60.0
"""Seconds to wait for another process that takes a look of the same series."""


def judged_at_look(
    judge: Callable[[Terms], "Comparison"], terms: Terms, gate: Gate, folder: Path | None
) -> "Comparison":
    """Take the next look of the series of `gate`: compare with the error it may use, record it, return the comparison.

    Args:
        judge: returns the comparison under given terms.
        terms: their `confidence` is that of all looks together; 1 - confidence is the error budget.
        gate: the requirement and the series.
        folder: of the report; it has the looks that were taken at these runs. None: there is no report; looks without
            a series are in ./compare.

    Raises:
        ConfigError: the looks cannot be read or recorded, so the error is unknown, or the series was begun with other
            terms.
    """
    comparison = judge(terms)
    file = gate.file(folder or Path("compare"))
    with _problems_as_config_errors(file), _locked(file):
        look = look_at(comparison.verdicts, comparison.terms)  # with the metric that logs have
        earlier = read_looks(file)
        if gate.series is not None and folder is not None:
            earlier = merged(earlier, read_looks(folder / LOOKS_FILE), look)
        look = look.recognized(earlier)
        spending = spending_of(look, earlier, gate, round(1 - terms.confidence, 12), file)
        comparison = _at(spending, judge, comparison, terms)
        look = with_spending(look_at(comparison.verdicts, comparison.terms).recognized(earlier), spending)
        comparison.looks = appended(earlier, look)
        write_looks(file, comparison.looks)
        if gate.series is not None and folder is not None:
            record_look(look, folder)
    comparison.spending = spending
    comparison.notes.append(spending.text)
    return comparison


def _at(
    spending: Spending, judge: Callable[[Terms], "Comparison"], comparison: "Comparison", terms: Terms
) -> "Comparison":
    """Return the comparison with the error that the look spends."""
    if spending.exhausted:
        comparison.verdicts = [_withheld(verdict) for verdict in comparison.verdicts]
    elif spending.look:
        following = 1 - spending.next_spent if spending.next_spent else None
        alone = [verdict.decision for verdict in comparison.verdicts]
        comparison = judge(replace(terms, confidence=1 - spending.spent, next_confidence=following))
        comparison.verdicts = [
            replace(verdict, lossy_alone=decision == "lossy" and verdict.decision == "inconclusive")
            for verdict, decision in zip(comparison.verdicts, alone, strict=True)
        ]
    if spending.look and not spending.next_spent:  # more seeds could not decide
        comparison.verdicts = [replace(verdict, plan=SeedPlan()) for verdict in comparison.verdicts]
    return comparison


def _withheld(verdict: "Verdict") -> "Verdict":
    """Return the verdict, inconclusive as nothing is left of the budget; equal bits need no error and stay."""
    if verdict.judged.measured.identical:
        return verdict
    judged = replace(verdict.judged, decision="inconclusive", loss="inconclusive")
    return replace(verdict, judged=judged, plan=SeedPlan(), unbudgeted=True)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the lock of the series: two looks at a time would spend the same error."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_name(f".{file.name}.lock"), timeout=LOCK_SECONDS):
        yield


@contextmanager
def _problems_as_config_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except Timeout as error:
        text = f"{file} is locked by another comparison of this series. Wait for it, then try again."
        raise ConfigError(Problem("--require", text)) from error
    except (OSError, ValueError) as error:
        text = f"the looks of the series cannot be read and recorded, so its error is unknown: {error}."
        raise ConfigError(Problem("--require", text)) from error


def refuse_with_declared_looks(gate: Gate, sweeps: Sequence[Path]) -> None:
    """Raise ConfigError if --series or --looks are given for a sweep with declared looks.

    Such a sweep uses the whole error of its verdicts itself.
    """
    given = [flag for flag, value in (("--series", gate.series), ("--looks", gate.looks)) if value is not None]
    text = f"cannot be used for {sweeps[0].name}: its declared looks use its whole error rate. Remove it."
    if given:
        raise ConfigError([Problem(flag, text) for flag in given])
