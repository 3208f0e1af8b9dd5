"""Ledger of predictions that are recorded before they are tested: `predictions.jsonl`, one per line.

A line has the `date`, a `hash` over date, claim and terms, the `claim`, the `terms` by which it is graded, and its
`outcome`, null until there are runs to grade it. A claim that was changed afterwards no longer matches its hash.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from scipy import special

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.ladder.measured import Ladder, Rung

FILE = "predictions.jsonl"
SAME_TOKENS = 0.02
"""Relative difference in tokens up to which a run tests a prediction: steps are whole numbers, and targets are
rounded."""


@dataclass
class Prediction:
    """One line of the ledger."""

    date: str
    claim: dict[str, Any]
    terms: dict[str, Any]
    outcome: dict[str, Any] | None = None

    @property
    def hash(self) -> str:
        """Hash of the prediction without its outcome."""
        predicted = {"date": self.date, "claim": self.claim, "terms": self.terms}
        return sha256(json.dumps(predicted, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def same_as(self) -> tuple[Any, ...]:
        """Key of equal predictions: the claim, and the runs from which it was made."""
        return json.dumps(self.claim, sort_keys=True), self.terms["fitted_to"]["digest"]

    def as_data(self) -> dict[str, Any]:
        """Return the line as data."""
        return {
            "date": self.date,
            "hash": self.hash,
            "claim": self.claim,
            "terms": self.terms,
            "outcome": self.outcome,
        }


def now() -> str:
    """Return the date of a prediction or a grade, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_ledger(file: Path) -> list[Prediction]:
    """Return the predictions of `file`, none if there is no such file.

    Raises:
        ConfigError: a line is no prediction, or does not match its hash.
    """
    found, problems = [], []
    try:
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem(str(file), f"cannot be read ({error}). Restore it from a copy.")) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            each = Prediction(data["date"], data["claim"], data["terms"], data["outcome"])
            hashed = data["hash"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            problems.append(Problem(f"{file}:{number}", f"is no prediction ({type(error).__name__}: {error})."))
            continue
        if hashed != each.hash:
            text = f"was changed after it was made: its hash is {hashed}, but its content has {each.hash}. Restore it."
            problems.append(Problem(f"{file}:{number}", text))
        found.append(each)
    if problems:
        raise ConfigError(problems)
    return found


def write_ledger(file: Path, predictions: Sequence[Prediction]) -> None:
    """Replace the file atomically: a crash leaves the old one. Raises ConfigError."""
    text = "".join(json.dumps(each.as_data(), sort_keys=True, allow_nan=False) + "\n" for each in predictions)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f"{file.name}.{os.getpid()}")
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    except OSError as error:
        raise ConfigError(Problem("--ledger", f"{file} cannot be written ({error.strerror}).")) from error


def add_predictions(file: Path, made: Sequence[Prediction]) -> list[Prediction]:
    """Append new predictions to those of `file`; return the ledger's entries for `made`.

    A prediction that was made before from the same runs keeps its earlier date.
    """
    ledger = read_ledger(file)
    earlier = {each.same_as: each for each in ledger}
    new = [each for each in made if each.same_as not in earlier]
    if new:
        write_ledger(file, [*ledger, *new])
    return [earlier.get(each.same_as, each) for each in made]


def is_of(prediction: Prediction, ladder: Ladder) -> bool:
    """Return whether the prediction has the ladder's baseline and metric, so that the ladder can grade it."""
    return (ladder.baseline, ladder.metric) == (prediction.claim["baseline"], prediction.claim["metric"])


def grade(prediction: Prediction, ladder: Ladder) -> bool:
    """Set the outcome of a prediction without one if it has runs; return whether it was set."""
    claim, terms = prediction.claim, prediction.terms
    alike = is_of(prediction, ladder)
    rung = next((rung for rung in ladder.rungs if alike and _is_place(rung, claim)), None)
    pairs = sorted((rung.differences.get(claim["recipe"]) or {}).items()) if rung else []
    if prediction.outcome is not None or rung is None or not pairs:
        return False
    measured = math.fsum(value for _, value in pairs) / len(pairs)
    spread = math.hypot(terms["gap_se"], terms["pair_sd"] / len(pairs) ** 0.5)
    half = float(special.stdtrit(terms["df"], 0.5 + terms["confidence"] / 2)) * spread
    began = rung.began.get(claim["recipe"], "")
    prediction.outcome = {
        "date": now(),
        "gap": measured,
        "seeds": [seed for seed, _ in pairs],
        "interval": [claim["gap"] - half, claim["gap"] + half],
        "inside": abs(measured - claim["gap"]) <= half,
        "z": (measured - claim["gap"]) / spread if spread else math.copysign(math.inf, measured - claim["gap"]),
        "runs_began": began or None,
        "made_before_the_runs": _is_before(prediction.date, began) if began else None,
    }
    return True


def _is_place(rung: Rung, claim: dict[str, Any]) -> bool:
    near = abs(rung.tokens - claim["tokens"]) <= SAME_TOKENS * claim["tokens"]
    return rung.parameters == claim["parameters"] and near


def _is_before(one: str, other: str) -> bool:
    return datetime.fromisoformat(one) < datetime.fromisoformat(other)
