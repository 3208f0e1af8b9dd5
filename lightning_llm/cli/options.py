"""Options that several verbs have in common."""

import argparse
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import Problem
from lightning_llm.cli import completion
from lightning_llm.golden import FALSE_ALARMS, STEPS
from lightning_llm.plan.memory.accounting import OURS


def add_composition(parser: ArgumentParser) -> None:
    """Add what a config is composed of: overrides, or a file."""
    overrides: Any = parser.add_argument("overrides", nargs="*", help="Hydra overrides: key=value, group=name, ~key")
    overrides.completer = completion.complete_override
    parser.add_argument("--config", type=Path, metavar="FILE", help="repeat a run from its config.yaml")


def add_config_dir(parser: ArgumentParser) -> None:
    """Add a user's folder of config groups and callbacks."""
    text = "further config groups, DIR/recipe/mine.yaml, and callbacks, DIR/callbacks/mine.py"
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help=text)


def add_multirun(parser: ArgumentParser) -> None:
    """Add the switch for one run per combination."""
    parser.add_argument("-m", "--multirun", action="store_true", help="one run for each combination of a=1,2")


def add_weights_output(parser: ArgumentParser) -> None:
    """Add the folder that weights are written into."""
    add = parser.add_argument
    add("--output", required=True, metavar="DIR", help="the folder to make; there whole, or not at all")
    add("--force", action="store_true", help="replace DIR if it holds weights already")
    add("--no-parity", action="store_true", help="leave out the comparison of logits with transformers")


def add_device(parser: ArgumentParser) -> None:
    """Add the device to compute on."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


WEIGHTS = "a run's folder, a checkpoint, an imported or a Hugging Face folder"


def add_import_options(parser: ArgumentParser) -> None:
    """Add to `parser` the weights that are brought in."""
    add = parser.add_argument
    add("source", metavar="FOLDER_OR_NAME", help="a Hugging Face folder, or a model's name on the hub")
    add("--revision", metavar="REVISION", help="of a name on the hub: a commit, branch or tag (the newest)")
    add_weights_output(parser)


def add_export_options(parser: ArgumentParser) -> None:
    """Add to `parser` the weights that go out."""
    add = parser.add_argument
    add("path", metavar="PATH", help="a run's folder (its newest checkpoint), a checkpoint, an imported folder")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the tensors (fp32, as runs keep them)")
    add_weights_output(parser)


def add_probe_options(parser: ArgumentParser) -> None:
    """Add to `parser` what is probed, and how."""
    add = parser.add_argument
    add("path", type=Path, metavar="PATH", help=WEIGHTS)
    add("overrides", nargs="*", help="precision=NAME[,NAME...]|all, precision.KEY=..., data=...")
    add("--text", type=Path, metavar="FILE", help="documents for a Hugging Face folder: .txt, .jsonl")
    add("--batches", type=int, default=2, metavar="N", help="micro-batches to look at (2)")
    add("--keys", type=int, default=4, metavar="N", help="draws of random numbers to compare (4)")
    add("--output", type=Path, metavar="DIR", help="where to write (outputs/probe/NAME)")
    add_device(parser)


def add_evaluate_options(parser: ArgumentParser) -> None:
    """Add to `parser` what is evaluated, and on what."""
    add = parser.add_argument
    add("path", nargs="?", type=Path, metavar="PATH", help=WEIGHTS)
    add("overrides", nargs="*", help="ranks to share it: parallel=NAME, parallel.KEY=VALUE, trainer.devices=N")
    add("--tasks", action="append", default=[], metavar="TASK", help="of lm-eval, or a .yaml of your own; also A,B")
    add("--tasks-only", action="store_true", help="no validation losses")
    add("--data", action="append", default=[], metavar="KEY=VALUE", help="other data: jsonl=FILE, or a key below data")
    add("--limit", type=float, metavar="N", help="the first N samples of each task; 0.5: the first half of them")
    add("--average", nargs="+", type=Path, default=[], metavar="PATH", help="the mean of these weights, and PATH's")
    add("--ensemble", nargs="+", type=Path, default=[], metavar="PATH", help="the mean of what these and PATH predict")
    merged = (
        "what sets of parts of the data would give, by the mean of a sweep's models of one part each (ablate/merge)"
    )
    add("--merge", type=Path, metavar="SWEEP", help=merged)
    add("--batch-size", type=int, default=8, metavar="N", help="requests of a task at once (8)")
    add("--compute-dtype", choices=("fp32", "bf16", "fp16"), help="in tasks (the run's precision.compute_dtype)")
    add_device(parser)
    add("--output", type=Path, metavar="FILE", help="where to write instead of the run's evaluation/")
    add("--result", type=Path, help=SUPPRESS)  # where ranks leave what was measured for what started them


def add_generate_options(parser: ArgumentParser) -> None:
    """Add to `parser` what goes on with which text."""
    add = parser.add_argument
    add("path", type=Path, metavar="PATH", help=WEIGHTS)
    add("--prompt", metavar="TEXT", help='the text to go on with; "" begins a document')
    add("--chat", action="store_true", help="go on with each line of the input, and what was said before")
    add("--max-new-tokens", type=int, metavar="N", help="at most (200, or what the context has room for)")
    add("--temperature", type=float, default=0.8, metavar="T", help="divides the logits; 0: the likeliest token (0.8)")
    add("--top-k", type=int, default=50, metavar="K", help="draw among the K likeliest tokens; 0: all (50)")
    add("--top-p", type=float, default=1.0, metavar="P", help="of these, the fewest of together P (1: all)")
    add("--seed", type=int, default=0, metavar="N", help="same seed, same text (0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    add("--end-of-document", metavar="TOKEN", help="ends a document (what the weights' files say, or a usual name)")
    add("--compute-dtype", choices=("fp32", "bf16", "fp16"), help="of activations (the run's precision.compute_dtype)")
    add_device(parser)


GOLDEN_EXIT_CODES = (
    "exit codes: 0 recorded, or equal; 1 different, or the run failed; 2 the config or an input is wrong"
)


def golden_actions(parser: ArgumentParser, epilog: str) -> Iterator[ArgumentParser]:
    """Declare both actions with their own options; yield the parser of each, for those of a config."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="record|check")
    for name, text, add_own in (
        ("record", "make a recipe's first steps and write them, with what made them, to a golden file", _golden_record),
        ("check", "make them anew; exit 1 with the first step and parameter that are not as recorded", _golden_check),
    ):
        child = actions.add_parser(
            name, help=text, description=text, epilog=epilog + GOLDEN_EXIT_CODES, formatter_class=parser.formatter_class
        )
        yield child
        child.add_argument("--file", type=Path, metavar="FILE", help="the golden file (golden/RECIPE.json)")
        child.add_argument("--json", action="store_true", help="print data instead of text")
        add_own(child)


def _golden_record(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, default=STEPS, metavar="N", help=f"how many steps ({STEPS})")
    add("--repeats", type=int, default=0, metavar="N", help="further runs, whose scatter makes a band (0: bits alone)")
    nudge = "move the weights of repeats as far as sums round: a band for other machines"
    add("--nudge", action="store_true", help=nudge)
    add("--force", action="store_true", help="replace the golden file")
    add("--result", type=Path, help=SUPPRESS)  # where ranks leave what was measured for what started them
    add("--nudged-by", type=int, help=SUPPRESS)


def _golden_check(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, metavar="N", help="check the first N of the recorded steps (all of them)")
    add("--band", action="store_true", help="allow the measured band also where bits could be compared")
    share = f"the share of checks of an unchanged program that may fail, which sets the band's width ({FALSE_ALARMS})"
    add("--false-alarms", type=float, default=FALSE_ALARMS, metavar="P", help=share)
    add("--allow-differences", action="store_true", help="compare another recipe, too, and say what differs")


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


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a search."""
    add = parser.add_argument
    add("--search", action="store_true", help="the fastest layout of `world` ranks that fits; keys that are typed stay")
    planners = "every layout; with recomputation block by block; placed on measured links (exhaustive)"
    add("--planner", choices=("exhaustive", "galvatron", "pipette"), help=planners)
    add("--links", type=Path, metavar="FILE", help="for pipette: GB/s between machines, or devices, as YAML or JSON")
    add("--write", type=Path, metavar="FILE", help="the fastest as DIR/parallel/NAME.yaml, for train parallel=NAME")
    add("--force", action="store_true", help="replace the file of --write")
    add("--pareto", type=Path, metavar="FILE", help="a picture of seconds and memory, .svg or .png")
    weights = "which side of each weight of a Hugging Face folder tensor parallelism would share, by names and shapes"
    add("--tensor-axes", type=Path, metavar="DIR", help=weights)


def search_option_problems(arguments: argparse.Namespace) -> Iterator[Problem]:
    """Yield which options go with a search, or with one planner, alone."""
    given = {f"--{name}": getattr(arguments, name) for name in ("planner", "links", "write", "force", "pareto")}
    if not arguments.search:
        for option, value in given.items():
            if value:
                yield Problem(option, "is of a search. Add --search, or leave it out.")
        return
    for option, chosen in (
        ("--matrix", arguments.matrix),
        ("-m", arguments.multirun),
        ("--dry-run", arguments.dry_run),
        ("--accounting", arguments.accounting != OURS.name),
    ):
        if chosen:
            yield Problem(
                "--search",
                f"looks for a layout of this trainer's, and {option} describes given ones. Leave one of them out.",
            )
    if arguments.links and arguments.planner != "pipette":
        yield Problem("--links", "has the links that --planner pipette places ranks on. Add that, or leave it out.")
    if arguments.pareto and arguments.planner == "pipette":
        text = "draws every layout that fits, and --planner pipette times but the few that it places. Leave one out."
        yield Problem("--pareto", text)
    if arguments.force and not arguments.write:
        yield Problem("--force", "replaces the file of --write. Add that, or leave it out.")
