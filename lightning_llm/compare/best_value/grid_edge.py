"""A grid whose best value is its last: nobody knows how much better one beyond is, so the recipe is not judged."""

from collections.abc import Sequence
from typing import NamedTuple

from lightning_llm.base.errors import Problem
from lightning_llm.compare.best_value.best_of import BestOf, Choice
from lightning_llm.tracking.reading import Run
from lightning_llm.tracking.sweep_definition import command_with_values


class Beyond(NamedTuple):
    """Where a grid ends with its best: which `end`, the next value `further` on, as its neighbours go, and `seeds`."""

    end: str
    further: float
    seeds: tuple[int, ...]


def beyond_of(choice: Choice, runs: Sequence[Run]) -> Beyond:
    """Return where the grid of `choice`, whose best is its last value, is to go on, at the seeds of `runs`."""
    values = sorted(choice.losses)
    end = "below" if choice.value == values[0] else "above"
    neighbour = values[1] if end == "below" else values[-2]
    further = choice.value * choice.value / neighbour if neighbour else choice.value
    return Beyond(end, float(f"{further:.3g}"), tuple(sorted({run.seed for run in runs})))


def edge_problem(choices: Sequence[Choice], where: Beyond, asked: BestOf) -> Problem:
    """Return that the best value of recipes is the grid's last, which end to extend, and the command that does.

    A better value may lie beyond, and how much better nobody knows: such a recipe is not judged.
    """
    *others, name = (f"{each.words} (at {each.value:g})" for each in choices)
    names = f"{', '.join(others)} and {name}" if others else name
    last = "least" if where.end == "below" else "greatest"
    verb, they = ("is", "it is") if len(choices) == 1 else ("are", "they are")
    text = (
        f"{names} {verb} best at the {last} value of the grid, so that a better one may lie beyond, and {they} not "
        f"judged. Extend the grid {where.end}"
    )
    command = ""
    if len(asked.sweeps) == 1 and where.further > 0:
        command = command_with_values(asked.sweeps[0], asked.key, [where.further], where.seeds)
    return Problem(f"--best-of {asked.key}", f"{text}: {command}" if command else f"{text}, to {where.further:g}, say.")
