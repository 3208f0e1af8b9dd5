"""Requirement on verdicts (--require, --series, --looks): met, not met or open for each recipe, and the exit code."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.compare.recorded_looks import FEWEST_PAIRS, LOOKS_FILE
from lightning_llm.config.workspace import default_outputs

if TYPE_CHECKING:
    from lightning_llm.compare.verdict import Verdict

Required = Literal["lossless", "not-lossy"]
REQUIRED: tuple[Required, ...] = get_args(Required)
Outcome = Literal["met", "not met", "open"]
EXIT_CODES: dict[Outcome, int] = {"not met": 1, "open": 3, "met": 0}
"""Exit code by outcome, the worst outcome first: with several recipes the worst counts."""


@dataclass(frozen=True)
class Gate:
    """The flags of a required verdict: --require (`required`), --series and --looks; None for flags not given.

    `series`: name or file of the series of looks that share an error budget; `looks`: planned number of them.
    """

    required: Required
    series: str | None = None
    looks: int | None = None

    def file(self, folder: Path) -> Path:
        """Return the file that records the looks of the series; without --series it is in the report's `folder`."""
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
    """Return `word` if it is a verdict that can be required. Raises ConfigError for any other word."""
    for each in REQUIRED:
        if each == word:
            return each
    raise ConfigError(Problem("--require", f"must be {' or '.join(REQUIRED)}.", word))


@dataclass(frozen=True)
class Requirement:
    """Whether every recipe has the `required` verdict (then it is true). `outcomes`: (verdict, outcome) of each."""

    required: Required
    outcomes: tuple[tuple["Verdict", Outcome], ...]

    @property
    def outcome(self) -> Outcome:
        """The worst outcome of any recipe."""
        found = {outcome for _, outcome in self.outcomes}
        return next(each for each in EXIT_CODES if each in found)

    @property
    def met(self) -> bool:
        """True if every recipe meets the requirement."""
        return self.outcome == "met"

    def __bool__(self) -> bool:
        return self.met

    @property
    def exit_code(self) -> int:
        """Exit code of the worst outcome: 0 met, 1 not met, 3 open."""
        return EXIT_CODES[self.outcome]

    @property
    def text(self) -> str:
        """The outcome as a line: "not met, exit code 1: mxfp4_rne is lossy"."""
        deciding = [verdict for verdict, outcome in self.outcomes if outcome == self.outcome]
        arms = "; ".join(
            f"{' '.join(filter(None, (verdict.name, verdict.family.text)))} is {verdict.qualified}"
            for verdict in deciding
        )
        return f"{self.required} {self.outcome}, exit code {self.exit_code}: {arms}"

    def as_data(self) -> dict[str, Any]:
        """Return the entry "require" of `compare.json`."""
        return {
            "required": self.required,
            "met": self.met,
            "exit_code": self.exit_code,
            "arms": [
                {
                    "name": verdict.name,
                    "setting": verdict.family.setting,
                    "verdict": verdict.decision,
                    "outcome": outcome,
                }
                for verdict, outcome in self.outcomes
            ],
        }


def requirement_of(required: str, verdicts: Sequence["Verdict"]) -> Requirement:
    """Return whether `verdicts` meet the requirement.

    Raises:
        ConfigError: `required` is no requirement.
    """
    wanted = read_required(required)
    return Requirement(wanted, tuple((verdict, _outcome(wanted, verdict)) for verdict in verdicts))


def _outcome(required: Required, verdict: "Verdict") -> Outcome:
    """Return the outcome of one arm.

    An open verdict meets "not-lossy" only if the arm could have been found lossy: with two pairs, a baseline that has
    learned, no damaged run, and error left to spend. One that is lossy at the whole error of the series stays open:
    otherwise repeated looks, of which each spends less, would meet it in the end.
    """
    if verdict.decision == "lossy":
        return "not met"
    if verdict.decision == "lossless":
        return "met"
    judged = verdict.judged
    could_be_lossy = (
        judged.estimate.pairs >= FEWEST_PAIRS
        and judged.measured.unlearned is None
        and not verdict.damaged
        and not verdict.unbudgeted
        and not verdict.lossy_alone
        and not (verdict.sequential is not None and verdict.sequential.look is None)
    )
    return "met" if required == "not-lossy" and could_be_lossy else "open"
