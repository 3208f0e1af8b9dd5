"""What `golden record` and `golden check` take beside a config."""

from argparse import SUPPRESS, ArgumentParser
from collections.abc import Iterator
from pathlib import Path

from lightning_llm.golden import FALSE_ALARMS, STEPS

EXIT_CODES = "exit codes: 0 recorded, or equal; 1 different, or the run failed; 2 the config or an input is wrong"


def golden_actions(parser: ArgumentParser, epilog: str) -> Iterator[ArgumentParser]:
    """Declare both actions with their own options; yield the parser of each, for those of a config."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="record|check")
    for name, text, add_own in (
        ("record", "make a recipe's first steps and write them, with what made them, to a golden file", _record),
        ("check", "make them anew; exit 1 with the first step and parameter that are not as recorded", _check),
    ):
        child = actions.add_parser(
            name, help=text, description=text, epilog=epilog + EXIT_CODES, formatter_class=parser.formatter_class
        )
        yield child
        child.add_argument("--file", type=Path, metavar="FILE", help="the golden file (golden/RECIPE.json)")
        child.add_argument("--json", action="store_true", help="print data instead of text")
        add_own(child)


def _record(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, default=STEPS, metavar="N", help=f"how many steps ({STEPS})")
    add("--repeats", type=int, default=0, metavar="N", help="further runs, whose scatter makes a band (0: bits alone)")
    nudge = "move the weights of repeats as far as sums round: a band for other machines"
    add("--nudge", action="store_true", help=nudge)
    add("--force", action="store_true", help="replace the golden file")
    add("--result", type=Path, help=SUPPRESS)  # where ranks leave what was measured for what started them
    add("--nudged-by", type=int, help=SUPPRESS)


def _check(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, metavar="N", help="check the first N of the recorded steps (all of them)")
    add("--band", action="store_true", help="allow the measured band also where bits could be compared")
    share = f"the share of checks of an unchanged program that may fail, which sets the band's width ({FALSE_ALARMS})"
    add("--false-alarms", type=float, default=FALSE_ALARMS, metavar="P", help=share)
    add("--allow-differences", action="store_true", help="compare another recipe, too, and say what differs")
