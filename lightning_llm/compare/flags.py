"""Flags of `compare`: what they ask for, and those that do not go together, each honoured or refused, all at once."""

import argparse
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.compare.best_value.best_of import BestOf
from lightning_llm.compare.estimate import Terms
from lightning_llm.compare.runs.find import Found
from lightning_llm.compare.runs.losses import LOSS
from lightning_llm.compare.sequential.declared_looks import AskedTerms
from lightning_llm.compare.sequential.design import Design
from lightning_llm.config.commands import command

SCORED = "scores runs by when they reached a target, and judges none: leave out {}"
NOT_SCORED: Mapping[str, str] = {
    "best_of": "--best-of", "choose_by": "--choose-by", "all_pairs": "--all-pairs", "margin": "--margin",
    "confidence": "--confidence", "tail": "--tail", "ladder": "--ladder", "predict": "--predict", "grade": "--grade",
    "beyond": "--beyond", "ledger": "--ledger",
}  # fmt: skip
"""What --time-to-target has no use for: its trials are those of --trials, its time that of the first validation."""
NOT_OF_LADDERS: Mapping[str, str] = {"all_pairs": "--all-pairs", "target": "--target", "trials": "--trials"}
"""What ladders have no use for."""


def _given(arguments: argparse.Namespace, flags: Mapping[str, str]) -> list[str]:
    def is_given(value: Any) -> bool:
        return value is not None and value is not False and value != []

    return [flag for name, flag in flags.items() if is_given(getattr(arguments, name, None))]


def of_scores(arguments: argparse.Namespace) -> list[Problem]:
    """Return what is given beside --time-to-target for nothing."""
    given = _given(arguments, NOT_SCORED)
    text = f"{SCORED.format(', '.join(given))}. See --trials, --target and --metric."
    return [Problem("--time-to-target", text)] if given else []


def of_ladder(arguments: argparse.Namespace) -> list[Problem]:
    """Return what is given beside --ladder, --predict or --grade for nothing."""
    found = [
        Problem(flag, "has no use beside --ladder, --predict and --grade, which say what a recipe costs over sizes and "
                "tokens. Leave it out.")
        for flag in _given(arguments, NOT_OF_LADDERS)
    ]  # fmt: skip
    if str(arguments.margin or "").strip().endswith("%"):
        text = (
            f"is {arguments.margin}, and a ladder says what each gap is in tokens. Leave it out, or give nats, for the "
            "verdicts of its report, and for what is an outlier."
        )
        found.append(Problem("--margin", text))
    if arguments.beyond is not None and not arguments.predict:
        found.append(Problem("--beyond", "says how far a prediction may be. Give --predict, too, or leave it out."))
    if arguments.beyond is not None and not arguments.beyond > 0:
        found.append(Problem("--beyond", f"is {arguments.beyond:g}, must be above 0 (powers of ten)."))
    if arguments.ledger is not None and not (arguments.predict or arguments.grade):
        found.append(Problem("--ledger", "is of predictions. Give --predict or --grade, too, or leave it out."))
    return found


def of_verdicts(arguments: argparse.Namespace) -> list[Problem]:
    """Return what is given to a comparison of neither kind for nothing."""
    found = []
    if arguments.trials is not None:
        found.append(Problem("--trials", "says which runs are trials of one study. Give --time-to-target, too."))
    for name in ("beyond", "ledger"):
        if getattr(arguments, name, None) is not None:
            found.append(Problem(f"--{name}", "is of predictions from a ladder. Give --predict or --grade, too."))
    return found


def against_all_pairs(terms: Terms, best_of: BestOf | None, design: Design | None, found: Found) -> str:
    """Return why recipes are not held against each other here, and what to do; empty where they are."""
    if best_of is not None:
        return f"goes without --best-of {best_of.key}, whose whole grid it does not look at. Leave out one of the two."
    if design is not None:
        runs = f"{shlex.quote(str(found.sweeps[0]))}/[0-9]*/"
        return (
            "is a table of one look, and the verdicts here are by looks that were declared, whose error it does not "
            "have. Leave it out; or name the runs in place of their sweep, and all of it is of one look at what is "
            f"there: {command('compare')} {runs} --all-pairs"
        )
    if terms.token_margin is not None:
        return (
            "takes a margin in nats: tokens are read off the baseline's own curve, and these gaps are to others. Give "
            "one, --margin 0.01, or leave --all-pairs out."
        )
    return ""


def terms_of(asked: AskedTerms, design: Design | None) -> Terms:
    """Return the terms of a verdict: `design`'s, or those asked for. Raises ConfigError with all that are none."""
    if design is not None:
        return replace(design.terms, targets=asked.targets, all_pairs=asked.all_pairs)
    problems: list[Problem] = []
    terms = Terms()
    with gathered(problems):
        asked.margins(terms)
    terms = (replace(asked, margin=None) if problems else asked).over(terms)
    if terms.token_margin is not None and not terms.metric.startswith(LOSS):
        text = f"in tokens is one of a loss, and --metric is {terms.metric}. Give it in its unit."
        problems.append(Problem("--margin", text))
    if not 0.5 <= terms.confidence < 1:
        problems.append(Problem("--confidence", f"is {terms.confidence:g}, must be from 0.5 to below 1, say 0.95."))
    if not 0 <= terms.tail_share < 1:
        problems.append(Problem("--tail", f"is {terms.tail_share:g}, must be from 0 (the last validation) to below 1."))
    if problems:
        raise ConfigError(problems)
    return terms


def flags_of(asked: AskedTerms, baseline: str | None, key: str) -> list[str]:
    """Return the flags that ask for the same terms and baseline beside --best-of `key`, which takes no --all-pairs.

    A recipe's best value of `key` is no part of the baseline's name there: "optim=adamw (learning_rate=0.002)".
    """
    value = rf" \((\w+\.)*{re.escape(key.rpartition('.')[2])}=[^,()]*\)$"
    given = {
        "--baseline": baseline and re.sub(value, "", baseline), "--metric": asked.metric, "--margin": asked.margin,
        "--confidence": asked.confidence, "--tail": asked.tail,
    }  # fmt: skip
    words = [word for flag, value in given.items() if value is not None for word in (flag, str(value))]
    return [*words, *(word for target in asked.targets.words for word in ("--target", target))]


def best_of_words(best_of: str | None, choose_by: str | None) -> BestOf | None:
    """Return what --best-of and --choose-by ask for. Raises ConfigError."""
    if best_of is None:
        if choose_by is not None:
            raise ConfigError(Problem("--choose-by", "says by which seeds --best-of KEY chooses. Give that, too."))
        return None
    if choose_by == "all":
        return BestOf(best_of, by_all=True)
    words = [] if choose_by is None else choose_by.split(",")
    if not all(word.isdecimal() for word in words):
        raise ConfigError(Problem("--choose-by", f"is '{choose_by}', must be seeds, such as 0 or 0,1, or all."))
    return BestOf(best_of, tuple(sorted({int(word) for word in words})))
