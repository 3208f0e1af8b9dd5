"""The verb `compare`: verdicts over runs; with --ladder, --predict or --grade the ladder over them."""

import argparse
import sys
from collections.abc import Callable
from functools import partial

from lightning_llm.base.errors import ConfigError, gathered
from lightning_llm.compare.command import as_json, compare_named, print_data, print_escaped, print_table
from lightning_llm.compare.flags import best_of_words, of_scores, of_verdicts, terms_of
from lightning_llm.compare.runs.losses import LOSS
from lightning_llm.compare.sequential.declared_looks import AskedTerms
from lightning_llm.compare.target import NO_TARGETS, Targets, read_targets


def compare(arguments: argparse.Namespace) -> int:
    """Print verdicts, or what the ladder over the runs says; return 0. Raises ConfigError."""
    chosen: Callable[[argparse.Namespace], int]
    if (arguments.ladder or arguments.predict or arguments.grade) and not arguments.time_to_target:
        from lightning_llm.ladder.command import ladder as chosen

        # A run may follow --predict, which takes all words there are; no run is called KEY=VALUE.
        words = arguments.predict or []
        arguments.runs = [*arguments.runs, *(word for word in words if "=" not in word)]
        arguments.predict = [word for word in words if "=" in word] if words else None
    else:
        chosen = _verdicts
    return chosen(arguments)


def _verdicts(arguments: argparse.Namespace) -> int:
    """Print the verdicts over runs and write them to files; return 0.

    Raises:
        ConfigError: as `compare_named`.
    """
    scored = arguments.time_to_target
    problems = of_scores(arguments) if scored else of_verdicts(arguments)
    targets, best_of = NO_TARGETS, None
    with gathered(problems):
        targets = read_targets(arguments.target)
    asked = AskedTerms(
        arguments.margin, arguments.confidence, arguments.metric, arguments.tail, targets, arguments.all_pairs
    )
    if not scored:
        with gathered(problems):
            best_of = best_of_words(arguments.best_of, arguments.choose_by)
        with gathered(problems):
            terms_of(asked, None)
    if problems:
        raise ConfigError(problems)
    if scored:
        return _time_to_target(arguments, targets)
    compare_named(
        arguments.runs,
        asked,
        arguments.baseline,
        best_of,
        arguments.output,
        show=print_data if arguments.json else print_table,
        say=partial(print_escaped, file=sys.stderr if arguments.json else sys.stdout),
    )
    return 0


def _time_to_target(arguments: argparse.Namespace, targets: Targets) -> int:
    """Print the scores of --time-to-target; return 0. Raises ConfigError."""
    from lightning_llm.algoperf.command import benchmark_named, print_benchmark

    benchmark_named(
        arguments.runs,
        arguments.metric or LOSS,
        targets,
        arguments.baseline,
        (arguments.trials or "").split(",") if arguments.trials else (),
        arguments.output,
        show=(lambda found: print(as_json(found.as_data()))) if arguments.json else print_benchmark,
        write=as_json,
        say=partial(print_escaped, file=sys.stderr if arguments.json else sys.stdout),
    )
    return 0
