"""The verb `compare`: verdicts over runs. Flags of earlier releases run the verbs `ladder` and `algoperf`."""

import argparse
import json
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.compare.best_value import best_of_arguments
from lightning_llm.compare.command import compare_named, print_data, print_escaped, print_table
from lightning_llm.compare.requirement import read_gate
from lightning_llm.compare.terms import RequestedTerms, terms_of
from lightning_llm.compare.time_to_target import NO_TARGETS, read_targets

NOT_SCORED: Mapping[str, str] = {
    "best_of": "--best-of", "choose_by": "--choose-by", "all_pairs": "--all-pairs", "margin": "--margin",
    "confidence": "--confidence", "tail": "--tail", "ladder": "--ladder", "predict": "--predict", "grade": "--grade",
    "beyond": "--beyond", "ledger": "--ledger", "require": "--require", "series": "--series", "looks": "--looks",
}  # fmt: skip
"""Flags that have no effect together with --time-to-target."""
NOT_OF_LADDERS: Mapping[str, str] = {
    "all_pairs": "--all-pairs", "target": "--target", "trials": "--trials",
    "require": "--require", "series": "--series", "looks": "--looks",
}  # fmt: skip
"""Flags that have no effect together with --ladder, --predict or --grade."""
NOT_OF_LOGS: Mapping[str, str] = {
    "runs": "RUN", "best_of": "--best-of", "choose_by": "--choose-by", "target": "--target", "ladder": "--ladder",
    "predict": "--predict", "grade": "--grade", "time_to_target": "--time-to-target", "trials": "--trials",
    "beyond": "--beyond", "ledger": "--ledger",
}  # fmt: skip
"""Arguments that have no effect together with --from."""
ONLY_OF_LOGS: Mapping[str, str] = {
    "pattern": "--pattern", "x": "--x", "format": "--format", "tokens_per_step": "--tokens-per-step",
    "until": "--until",
}  # fmt: skip
"""Flags that have an effect only together with --from."""


def compare(arguments: argparse.Namespace) -> int:
    """Print the verdicts over runs and write them to files; return 0, or the exit code of --require.

    Raises:
        ConfigError: the arguments are invalid, or as `compare_named`.
    """
    if arguments.json_schema:
        return _print_schema()
    if arguments.logs:
        return _logs(arguments)
    if given := _given(arguments, ONLY_OF_LOGS):
        text = "describes logs of other trainers, so it has an effect only with --from. Add --from, or remove it."
        raise ConfigError([Problem(flag, text) for flag in given])
    if arguments.time_to_target:
        return _time_to_target(arguments)
    if arguments.ladder or arguments.predict or arguments.grade:
        return _ladder(arguments)
    problems = [
        Problem(f"--{name}", f"is an option of `lightning-llm {verb}`. Use that verb, or remove --{name}.")
        for name, verb in (("trials", "algoperf"), ("beyond", "ladder"), ("ledger", "ladder"))
        if getattr(arguments, name) is not None
    ]
    targets, best_of, gate = NO_TARGETS, None, None
    with gathered(problems):
        gate = read_gate(arguments.require, arguments.series, arguments.looks)
    with gathered(problems):
        targets = read_targets(arguments.target)
    asked = RequestedTerms(
        arguments.margin, arguments.confidence, arguments.metric, arguments.tail, targets, arguments.all_pairs
    )
    with gathered(problems):
        best_of = best_of_arguments(arguments.best_of, arguments.choose_by)
    with gathered(problems):
        terms_of(asked)
    if problems:
        raise ConfigError(problems)
    done = compare_named(
        arguments.runs,
        asked,
        arguments.baseline,
        best_of,
        arguments.output,
        show=print_data if arguments.json else print_table,
        say=partial(print_escaped, file=sys.stderr if arguments.json else sys.stdout),
        gate=gate,
    )
    return 0 if done.requirement is None else done.requirement.exit_code


def _print_schema() -> int:
    from lightning_llm.compare.json_schema import compare_schema

    print(json.dumps(compare_schema(), indent=1))
    return 0


def _logs(arguments: argparse.Namespace) -> int:
    """Print the verdicts over the logs of --from and write them to files; return 0, or the exit code of --require.

    Raises:
        ConfigError: the arguments or a log are wrong.
    """
    from lightning_llm.compare.curves import LogOptions, curve_terms
    from lightning_llm.compare.curves.command import compare_named_logs

    text = "has no effect together with --from, which compares logs. Remove it."
    problems = [Problem(flag, text) for flag in _given(arguments, NOT_OF_LOGS)]
    asked = RequestedTerms(
        arguments.margin, arguments.confidence, arguments.metric, arguments.tail, all_pairs=arguments.all_pairs
    )
    options = LogOptions(arguments.x, arguments.format, arguments.tokens_per_step, arguments.until)
    gate = None
    with gathered(problems):
        gate = read_gate(arguments.require, arguments.series, arguments.looks)
    with gathered(problems):
        curve_terms(asked)
    with gathered(problems):
        options.check()
    if problems:
        raise ConfigError(problems)
    done = compare_named_logs(
        arguments.logs,
        arguments.pattern,
        asked,
        arguments.baseline,
        options,
        arguments.output,
        show=print_data if arguments.json else print_table,
        say=partial(print_escaped, file=sys.stderr if arguments.json else sys.stdout),
        gate=gate,
    )
    return 0 if done.requirement is None else done.requirement.exit_code


def _ladder(arguments: argparse.Namespace) -> int:
    """Run `ladder` for the flags of earlier releases."""
    from lightning_llm.cli.ladder import run_ladder

    _note("--ladder, --predict and --grade", "ladder")
    text = "has no effect together with --ladder, --predict or --grade. Remove it."
    problems = [Problem(flag, text) for flag in _given(arguments, NOT_OF_LADDERS)]
    return run_ladder(arguments, fit=arguments.ladder, problems=problems)


def _time_to_target(arguments: argparse.Namespace) -> int:
    """Run `algoperf` for the flag of earlier releases."""
    from lightning_llm.cli.algoperf import run_algoperf

    _note("--time-to-target", "algoperf")
    given = ", ".join(_given(arguments, NOT_SCORED))
    text = f"gives no verdicts, so {given} has no effect. Remove it; --trials, --target and --metric are allowed."
    problems = [Problem("--time-to-target", text)] if given else []
    return run_algoperf(arguments, problems)


def _note(flags: str, verb: str) -> None:
    print(f"note   compare {flags}: deprecated, use `lightning-llm {verb}` instead", file=sys.stderr)


def _given(arguments: argparse.Namespace, flags: Mapping[str, str]) -> list[str]:
    def is_given(value: Any) -> bool:
        return value is not None and value is not False and value != []

    return [flag for name, flag in flags.items() if is_given(getattr(arguments, name))]
