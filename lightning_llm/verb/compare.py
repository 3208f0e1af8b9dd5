"""The verb `compare`: verdicts over runs; with --ladder, --predict or --grade the ladder over them."""

import argparse
from collections.abc import Callable


def compare(arguments: argparse.Namespace) -> int:
    """Print verdicts, or what the ladder over the runs says; return 0. Raises ConfigError."""
    chosen: Callable[[argparse.Namespace], int]
    if arguments.ladder or arguments.predict or arguments.grade:
        from lightning_llm.ladder.command import ladder as chosen
    else:
        from lightning_llm.compare.command import compare as chosen
    return chosen(arguments)
