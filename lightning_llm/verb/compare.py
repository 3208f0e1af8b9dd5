"""The verb `compare`: verdicts over runs; with --ladder, --predict or --grade the ladder over them."""

import argparse
from collections.abc import Callable


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
        from lightning_llm.compare.command import compare as chosen
    return chosen(arguments)
