"""Verdicts under a requirement: they are taken at the next look of a series, whose spending is recorded."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.error_budget import Gate, Spending, appended, merged, spending_of, with_spending
from lightning_llm.compare.looks import LOOKS_FILE, look_at, read_looks, record_look, write_looks
from lightning_llm.compare.statistics.seeds import SeedPlan
from lightning_llm.compare.terms import Terms
from lightning_llm.compare.verdict import Verdict

LOCK_SECONDS = 60.0
"""Timeout for another process that takes a look of the same series."""


def judged_at_look(judge: Callable[[Terms], Comparison], terms: Terms, gate: Gate, folder: Path) -> Comparison:
    """Return the comparison at the next look of the series of `gate`, after recording the look.

    Args:
        judge: returns the comparison under given terms.
        terms: their `confidence` is that of all looks together; 1 - confidence is the error budget.
        gate: the requirement and the series.
        folder: of the report; it has the looks that were taken at these runs.

    Raises:
        ConfigError: the looks cannot be read or recorded, so the error is unknown, or the series was begun with other
            terms.
    """
    comparison = judge(terms)
    file = gate.file(folder)
    with _problems_as_config_errors(file), _locked(file):
        look = look_at(comparison.verdicts, terms)
        earlier = read_looks(file)
        if gate.series is not None:
            earlier = merged(earlier, read_looks(folder / LOOKS_FILE), look)
        spending = spending_of(look, earlier, gate, round(1 - terms.confidence, 12), file)
        comparison = _at(spending, judge, comparison, terms)
        look = with_spending(look_at(comparison.verdicts, comparison.terms), spending)
        comparison.looks = appended(earlier, look)
        write_looks(file, comparison.looks)
        if gate.series is not None:
            record_look(look, folder)
    comparison.spending = spending
    comparison.notes.append(spending.text)
    return comparison


def _at(spending: Spending, judge: Callable[[Terms], Comparison], comparison: Comparison, terms: Terms) -> Comparison:
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


def _withheld(verdict: Verdict) -> Verdict:
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
    """Raise ConfigError for a series of sweeps with looks that were declared in the sweep.

    Such a sweep spends the whole error of its verdicts itself.
    """
    given = [flag for flag, value in (("--series", gate.series), ("--looks", gate.looks)) if value is not None]
    text = f"cannot be used for {sweeps[0].name}, as its declared looks spend its error. Remove it."
    if given:
        raise ConfigError([Problem(flag, text) for flag in given])
