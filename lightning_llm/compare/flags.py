"""Flags of `compare` that do not go together: each is honoured or refused, and all that are refused at once."""

import argparse
from collections.abc import Mapping
from typing import Any

from lightning_llm.errors import Problem

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
