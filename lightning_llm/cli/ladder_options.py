"""The arguments of `compare` that have to do with ladders."""

from argparse import ArgumentParser
from pathlib import Path


def add_ladder_options(parser: ArgumentParser) -> None:
    """Declare --ladder, --predict, --beyond, --grade and --ledger."""
    group = parser.add_argument_group("the ladder: runs of several model sizes and numbers of tokens")
    add = group.add_argument
    add("--ladder", action="store_true", help="fit the gap over sizes and tokens: what each recipe costs in tokens")
    place = "write down what the ladder says of a size to come: model=NAME data.tokens=NUMBER"
    add("--predict", nargs="+", metavar="KEY=VALUE", help=place)
    add("--beyond", type=float, metavar="DECADES", help="how far beyond it, in powers of ten at most (1)")
    add("--grade", action="store_true", help="hold earlier predictions against the runs that are there now")
    add("--ledger", type=Path, metavar="FILE", help="of the predictions (compare/predictions.jsonl beside the runs)")
