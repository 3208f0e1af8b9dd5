"""The verb `ladder`: the cost of recipes over model sizes and token counts, fitted, predicted and graded."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.compare.best_value import best_of_words
from lightning_llm.compare.command import print_escaped
from lightning_llm.compare.terms import RequestedTerms, terms_of
from lightning_llm.ladder.command import LadderRequest, ladder_named, print_data, print_text
from lightning_llm.ladder.predicting import target_of
from lightning_llm.ladder.refusal import DECADES


def ladder(arguments: argparse.Namespace) -> int:
    """Print the ladder over runs; with --predict predict from it, with --grade grade what was predicted; return 0.

    Raises:
        ConfigError: all that is wrong with the arguments; else as `ladder_named`.
    """
    return run_ladder(arguments, fit=not (arguments.predict or arguments.grade))


def run_ladder(arguments: argparse.Namespace, *, fit: bool, problems: Sequence[Problem] = ()) -> int:
    """Do what `ladder` does.

    Args:
        fit: fit the ladder where nothing is predicted.
        problems: known to be wrong with the arguments; raised together with all others.
    """
    # A run may follow --predict, which takes all words there are; no run is called KEY=VALUE.
    words = arguments.predict or []
    runs = [*arguments.runs, *(word for word in words if "=" not in word)]
    asked = RequestedTerms(arguments.margin, arguments.confidence, arguments.metric, arguments.tail)
    target, best_of = None, None
    found = [*problems, *_problems(arguments)]
    with gathered(found):
        terms_of(asked)
    with gathered(found):
        best_of = best_of_words(arguments.best_of, arguments.choose_by)
    with gathered(found):
        target = target_of([word for word in words if "=" in word]) if words else None
    if found:
        raise ConfigError(found)
    decades = DECADES if arguments.beyond is None else arguments.beyond
    ladder_named(
        runs,
        asked,
        arguments.baseline,
        best_of,
        LadderRequest(fit, target, decades, arguments.grade, arguments.ledger, arguments.output),
        show=print_data if arguments.json else print_text,
        say=partial(print_escaped, file=sys.stderr if arguments.json else sys.stdout),
    )
    return 0


def _problems(arguments: argparse.Namespace) -> list[Problem]:
    """Return what is wrong with the options of a ladder, and which have no effect beside the others."""
    found = []
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
