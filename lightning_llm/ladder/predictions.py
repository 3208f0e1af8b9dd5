"""Ledger of predictions that are recorded before they are tested: `predictions.jsonl`, one per line.

A line has the `date`, a `hash` over date, claim and terms, the `claim`, the `terms` by which it is graded, and its
`outcome`, null until there are runs to grade it. A claim that was changed afterwards no longer matches its hash.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from scipy import special

from lightning_llm.base import __version__
from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.compare.format import json_ready, nats
from lightning_llm.compare.terms import Terms
from lightning_llm.config.compose import compose_config
from lightning_llm.ladder.fit import Fit, effect_at, line_of
from lightning_llm.ladder.measured import Ladder, Rung
from lightning_llm.ladder.refusal import Target
from lightning_llm.model.flops import count_parameters

FILE = "predictions.jsonl"
SAME_TOKENS = 0.02
"""Relative difference in tokens up to which a run tests a prediction: steps are whole numbers, and targets are
rounded."""


@dataclass
class Prediction:
    """One line of the ledger: the predicted cost of a recipe at one model size and number of tokens.

    `date`: when it was made, ISO 8601; `claim`: the predicted gap, its interval and their place; `terms`: how it is
    graded, and the runs it was fitted to; `outcome`: measured gap and grade, None until there are runs.
    """

    date: str
    claim: dict[str, Any]
    terms: dict[str, Any]
    outcome: dict[str, Any] | None = None

    @property
    def hash(self) -> str:
        """Hash of date, claim and terms, 16 hex digits: it shows whether they were changed afterwards."""
        predicted = {"date": self.date, "claim": self.claim, "terms": self.terms}
        return sha256(json.dumps(predicted, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def same_as(self) -> tuple[Any, ...]:
        """Key that is equal for equal predictions: the claim, and the runs from which it was made."""
        return json.dumps(self.claim, sort_keys=True), self.terms["fitted_to"]["digest"]

    def as_data(self) -> dict[str, Any]:
        """Return the line of the ledger as JSON data."""
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
    """Write `predictions` to `file` atomically, so that a crash leaves the old file.

    Raises:
        ConfigError: the file cannot be written.
    """
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
    """Return whether the prediction is about the ladder's baseline and metric, so that the ladder can grade it."""
    return (ladder.baseline, ladder.metric) == (prediction.claim["baseline"], prediction.claim["metric"])


def grade(prediction: Prediction, ladder: Ladder) -> bool:
    """Grade a prediction without an outcome by the ladder's runs at its place; return whether it was graded now.

    The outcome states the measured gap, and whether it is inside the interval that was predicted.
    """
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


TOKENS = "data.tokens"
FLAG = "--predict"


def target_of(arguments: Sequence[str]) -> Target:
    """Return the target that --predict names: model=NAME, further keys of the model, data.tokens=NUMBER.

    Raises:
        ConfigError: with everything missing or invalid, including errors of the model's config.
    """
    problems = [
        Problem(FLAG, f"'{word}' is neither a model (model=NAME, model.KEY=VALUE) nor {TOKENS}=NUMBER.")
        for word in arguments
        if not word.startswith((f"{TOKENS}=", "model=", "model."))
    ]
    model = [word for word in arguments if word.startswith(("model=", "model."))]
    counts = [word.partition("=")[2] for word in arguments if word.startswith(f"{TOKENS}=")]
    if not any(word.startswith("model=") for word in model):
        problems.append(Problem(FLAG, "has no model. Add one to set the number of parameters, e.g. model=llama_1b."))
    if len(counts) != 1:
        problems.append(Problem(FLAG, f"has {len(counts)} numbers of tokens. Give one, for example {TOKENS}=20e9."))
    tokens = _number(counts[0]) if counts else math.nan
    if len(counts) == 1 and not tokens >= 1:
        problems.append(Problem(FLAG, f"{TOKENS}={counts[0]} is not a number of tokens. Use for example 20e9."))
    if problems:
        raise ConfigError(problems)
    config = compose_config([*model, "data=python", "logger=none"]).model
    return Target(count_parameters(config).total, round(tokens), config.name)


def _number(word: str) -> float:
    try:
        found = float(word.replace("_", ""))
    except ValueError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def is_run(measured: Ladder, recipe: str, target: Target) -> bool:
    """Return whether the recipe has runs at `target` already."""
    return any(
        rung.parameters == target.parameters and abs(rung.tokens - target.tokens) <= 0.02 * target.tokens
        for rung in measured.rungs
        if rung.differences.get(recipe)
    )


def predict(fit: Fit, recipes: Iterable[str], target: Target, terms: Terms, file: Path) -> list[Prediction]:
    """Record the predicted cost of each of `recipes` at `target` in the ledger `file`; return the ledger's entries."""
    date = now()
    made = [_prediction(fit, name, target, terms, date) for name in recipes]
    return add_predictions(file, made) if made else []


def _prediction(fit: Fit, recipe: str, target: Target, terms: Terms, date: str) -> Prediction:
    effect = effect_at(fit, recipe, target.parameters, target.tokens, terms.confidence)
    gap = fit.gaps[recipe]
    fitted_to = fit.ladder.rows()
    return Prediction(
        date,
        claim={
            "line": line_of(effect, gap, target.name),
            "recipe": recipe,
            "baseline": fit.ladder.baseline,
            "metric": fit.ladder.metric,
            "model": target.name,
            "parameters": target.parameters,
            "tokens": target.tokens,
            "more_tokens": effect.more_tokens,
            "more_tokens_interval": [effect.low, effect.high],
            "gap": effect.gap,
            "gap_interval": list(effect.gap_interval()),
            "baseline_loss": float(fit.law.loss(target.parameters, target.tokens)[0, 0]),
            "growth_p": json_ready(gap.growth[1]),
        },
        terms={
            "confidence": terms.confidence,
            "tail": terms.tail_share,
            "gap_se": effect.gap_se,
            "pair_sd": effect.pair_sd,
            "df": effect.df,
            "graded_by": "the mean gap of S pairs within t(df) sqrt(gap_se^2 + pair_sd^2 / S) of `gap`",
            "law": fit.law.constants(),
            "gap_terms": dict(zip(("c_D", "c_N", "c_O"), map(float, gap.terms), strict=True)),
            "fitted_to": {
                "rungs": len(fit.ladder.rungs),
                "runs": len(fitted_to),
                "digest": sha256(json.dumps(fitted_to, sort_keys=True).encode()).hexdigest()[:16],
            },
            "version": __version__,
        },
    )


def prediction_line(prediction: Prediction) -> str:
    """Return a prediction as a line of text: its claim, date and hash, and its outcome if it has one."""
    claim, outcome = prediction.claim, prediction.outcome
    text = f"{claim['line']} [{prediction.date} {prediction.hash}]"
    if outcome is None:
        return f"{text}: not run yet"
    low, high = (nats(each, signed=True) for each in outcome["interval"])
    pairs = len(outcome["seeds"])
    when = {
        True: "predicted before it was run",
        False: "NOT before it was run",
        None: "the time of its runs is not known",
    }[outcome["made_before_the_runs"]]
    held = "held" if outcome["inside"] else "FAILED"
    measured, predicted = (nats(each, signed=True) for each in (outcome["gap"], claim["gap"]))
    return (
        f"{text}: {held}, measured {measured} over {pairs} pair{'s' * (pairs > 1)}, predicted {predicted} "
        f"[{low}, {high}], z = {outcome['z']:+.1f}; {when}"
    )


def tally(predictions: Sequence[Prediction]) -> str:
    """Return how many predictions held, as text: "3 of 4 graded predictions held at 95 %; 1 not run yet"."""
    graded = [each for each in predictions if each.outcome]
    early = [each for each in graded if each.outcome and each.outcome["made_before_the_runs"] is True]
    held = sum(1 for each in early if each.outcome and each.outcome["inside"])
    levels = sorted({100 * each.terms["confidence"] for each in early})
    at = f" at {' or '.join(f'{level:g} %' for level in levels)}" if levels else ""
    late = len(graded) - len(early)
    return f"{held} of {len(early)} graded predictions held{at}; {len(predictions) - len(graded)} not run yet" + (
        f"; {late} made after the runs, which do not count" if late else ""
    )
