"""The verb `ladder`: fit the cost of recipes over model sizes and token counts; make and grade predictions."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.compare.best_value import best_of_words
from lightning_llm.compare.command import print_escaped
from lightning_llm.compare.terms import RequestedTerms, terms_of
from lightning_llm.ladder.command import LadderRequest, ladder_named, print_data, print_text
from lightning_llm.ladder.predictions import target_of
from lightning_llm.ladder.refusal import DECADES


def ladder(arguments: argparse.Namespace) -> int:
    """Print the ladder over runs, predictions from it (--predict) or their grades (--grade); return 0.

    Raises:
        ConfigError: the arguments are invalid, or as `ladder_named`.
    """
    return run_ladder(arguments, fit=not (arguments.predict or arguments.grade))


def run_ladder(arguments: argparse.Namespace, *, fit: bool, problems: Sequence[Problem] = ()) -> int:
    """Run `ladder`, also for `compare --ladder`; return the exit code.

    Args:
        arguments: those of `ladder`.
        fit: fit the ladder even if predictions are only graded.
        problems: those that the caller found in the arguments; they are raised together with all others.
    """
    # argparse adds runs that follow --predict to its values; no run is named KEY=VALUE.
    given = arguments.predict or []
    runs = [*arguments.runs, *(each for each in given if "=" not in each)]
    asked = RequestedTerms(arguments.margin, arguments.confidence, arguments.metric, arguments.tail)
    target, best_of = None, None
    found = [*problems, *_problems(arguments)]
    with gathered(found):
        terms_of(asked)
    with gathered(found):
        best_of = best_of_words(arguments.best_of, arguments.choose_by)
    with gathered(found):
        target = target_of([each for each in given if "=" in each]) if given else None
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
    """Return the problems of a ladder's options, including options without an effect."""
    found = []
    if str(arguments.margin or "").strip().endswith("%"):
        text = (
            "must be in nats: a ladder already reports gaps in tokens. Give nats, which set the verdicts of its report "
            "and its outliers, or remove the option."
        )
        found.append(Problem("--margin", text, arguments.margin))
    if arguments.beyond is not None and not arguments.predict:
        found.append(Problem("--beyond", "has no effect without --predict. Add --predict, or remove it."))
    if arguments.beyond is not None and not arguments.beyond > 0:
        found.append(Problem("--beyond", "must be above 0 (powers of ten).", f"{arguments.beyond:g}"))
    if arguments.ledger is not None and not (arguments.predict or arguments.grade):
        text = "has no effect without --predict or --grade. Add one of them, or remove it."
        found.append(Problem("--ledger", text))
    return found
