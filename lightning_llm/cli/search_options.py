"""The options of `plan --search`, and which go with it. Apart from the search, which other plans need not import."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from lightning_llm.base.errors import Problem
from lightning_llm.plan.memory.accounting import OURS


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
