"""Which options of `plan` go with a search. Apart from the search, which other plans need not import."""

import argparse
from collections.abc import Iterator

from lightning_llm.errors import Problem
from lightning_llm.plan.accounting import OURS


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
