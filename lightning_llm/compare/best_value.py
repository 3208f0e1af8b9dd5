"""Compare each recipe at its own best value of a key, chosen by the losses of some seeds and judged by other seeds.

If the seeds that choose a value also judged it, the recipe with more values or more noise would look better than it is,
because the lowest of several losses is low by luck, too.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.compare.runs.factor import varying_keys
from lightning_llm.compare.runs.losses import Tail, tail_of
from lightning_llm.compare.terms import Terms
from lightning_llm.compare.tuned import plateau
from lightning_llm.tracking.reading import Run
from lightning_llm.tracking.sweep_definition import command_with_values


@dataclass(frozen=True)
class BestOf:
    """Request to compare each recipe at its best value of `key` (--best-of), chosen by the losses of `seeds`.

    Without `seeds` the lowest seed chooses. `by_all`: every seed both chooses and judges, which the tests over the
    whole grid account for (`tuned`).
    """

    key: str
    seeds: tuple[int, ...] = ()
    sweeps: tuple[Path, ...] = ()
    """Folders of the judged sweeps, for the command that extends a grid."""
    by_all: bool = False


@dataclass(frozen=True)
class Choice:
    """The value chosen for one recipe.

    `text` names the recipe; `losses`: {value: mean loss over the choosing seeds}, infinite if a run failed. `value` is
    None if all values failed. `lost_seeds` are the judging seeds that failed at it. `plateau` is the range of values
    within the margin of the best mean over all seeds that have every value. `best_over_all` is the best value over
    those seeds: it may differ from `value` and be at the end of the grid.
    """

    text: str
    value: Any
    losses: dict[Any, float]
    lost_seeds: tuple[int, ...] = ()
    plateau: tuple[float, float] | None = None
    best_over_all: Any = None

    @property
    def at_the_edge(self) -> bool:
        """True if the chosen value is the smallest or largest of several, so a better one may lie outside the grid."""
        return len(self.losses) > 1 and self.value in (min(self.losses), max(self.losses))

    def line(self, name: str) -> str:
        """Return the choice as a sentence; `name`: short name of the key, such as "learning_rate"."""
        losses = ", ".join(
            f"{f'{loss:.4f}' if math.isfinite(loss) else 'diverged'} at {value:g}"
            for value, loss in sorted(self.losses.items())
        )
        if self.value is None:
            return f"{self.text}: no {name} can be chosen, all diverged ({losses}); the recipe is not judged."
        edge = " It is at the end of the grid." if self.at_the_edge else ""
        if self.plateau is not None:
            low, high = self.plateau
            flat = f"from {low:.3g} to {high:.3g}, a factor of {high / low:.3g}" if low else ""
            least = "" if self.best_over_all in (None, self.value) else f", {self.best_over_all:g},"
            edge += f" Over all seeds the loss is within the margin of its best{least} {flat}." if flat else ""
        seeds = f"seed{'s' if len(self.lost_seeds) > 1 else ''} {', '.join(map(str, self.lost_seeds))}"
        lost = f" At the judging {seeds} it diverged." if self.lost_seeds else ""
        return f"{self.text}: best at {name}={self.value:g} (loss {losses}).{edge}{lost}"


@dataclass(frozen=True)
class Grid:
    """The runs of one recipe over all values of the tuned key, at the seeds that judge.

    `runs`: {value: {seed: run}}; `value`: the chosen one; `tried`: all values, also those without a judging run.
    """

    value: Any
    runs: dict[Any, dict[int, Run]]
    tried: tuple[Any, ...]


@dataclass
class Selection:
    """The value of `key` chosen for each recipe by `seeds` (`choices`), and the `runs` to judge at these values.

    `unfinished`: unfinished runs at the chosen values; `others`: the keys that distinguish recipes; `grids`: {values of
    these keys as text: grid of that recipe}; `problems`: recipes that are not judged; `by_all`: as in `BestOf`.
    """

    key: str
    seeds: tuple[int, ...]
    choices: list[Choice] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    unfinished: list[Run] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    grids: dict[str, Grid] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    by_all: bool = False

    def grid_of(self, run: Run) -> Grid:
        """Return the grid of the recipe to which `run` belongs."""
        return self.grids[_identity(run, self.others)]

    def as_data(self) -> dict[str, Any]:
        """Return the entry "selection" of `compare.json`."""
        choices = [
            {
                "recipe": each.text,
                "value": each.value,
                "losses": each.losses,
                "plateau": list(each.plateau) if each.plateau else None,
                "at_the_edge": each.at_the_edge,
            }
            for each in self.choices
        ]
        return {"key": self.key, "seeds": list(self.seeds), "choices": choices}

    def lines(self) -> list[str]:
        """Return a note on how values were chosen, and one sentence per recipe."""
        name, seeds = self.key.rpartition(".")[2], ", ".join(map(str, self.seeds))
        over = "all of them" if self.by_all else "the other seeds"
        what = f"Each recipe runs at its best {self.key}, chosen by the loss at seed {seeds}; verdicts are over {over}."
        return [what, *(each.line(name) for each in self.choices)]


def best_of_arguments(best_of: str | None, choose_by: str | None) -> BestOf | None:
    """Return the request of the flags --best-of and --choose-by; None without --best-of.

    Raises:
        ConfigError: the seeds of --choose-by are invalid, or given without --best-of.
    """
    if best_of is None:
        if choose_by is not None:
            raise ConfigError(Problem("--choose-by", "requires --best-of KEY. Add --best-of KEY."))
        return None
    if choose_by == "all":
        return BestOf(best_of, by_all=True)
    seeds = [] if choose_by is None else choose_by.split(",")
    if not all(word.isdecimal() for word in seeds):
        raise ConfigError(Problem("--choose-by", "must be seeds such as 0 or 0,1, or all.", choose_by))
    return BestOf(best_of, tuple(sorted({int(word) for word in seeds})))


def select_best(runs: Sequence[Run], unfinished: Sequence[Run], asked: BestOf, terms: Terms) -> Selection:
    """Choose the best value of `asked.key` for each recipe (combination of the other varying keys).

    Return the choices and the runs to judge: those at the chosen values.

    Raises:
        ConfigError: the key does not vary or is not numeric, a recipe lacks a choosing seed, no seed is left to judge,
            or fewer than two recipes have a value at which no run diverged.
    """
    others = _other_keys(runs, unfinished, asked.key)
    every = tuple(sorted({run.seed for run in runs}))
    seeds = every if asked.by_all else asked.seeds or every[:1]
    kept_back = () if asked.by_all else seeds
    selection = Selection(asked.key, seeds, others=others, by_all=asked.by_all)
    tail = tail_of([run for run in runs if run.seed in seeds and not run.diverged], terms.metric, terms.tail_share)
    recipes: dict[str, tuple[list[Run], list[Run]]] = {}
    for number, each in enumerate((runs, unfinished)):
        for run in each:
            recipes.setdefault(_identity(run, others), ([], []))[number].append(run)
    problems: list[Problem] = []
    beyond: dict[Beyond, list[Choice]] = {}
    for finished, rest in recipes.values():
        recipe = _recipe_text([*finished, *rest][0], others)
        losses = _losses_by_value(finished, asked.key, seeds, tail, recipe, problems)
        if not losses:
            continue
        best = min(losses, key=lambda value: losses[value])
        if math.isinf(losses[best]):
            selection.choices.append(Choice(recipe, None, losses))
            continue
        judged = [run for run in finished if run.config[asked.key] == best and run.seed not in kept_back]
        lost = tuple(sorted(run.seed for run in judged if run.diverged))
        over_all = _losses_over_all(finished, asked.key, terms)
        flat = plateau(over_all, terms.margin) if math.isfinite(terms.margin) else None  # NaN: in tokens
        least = min(over_all, key=lambda value: over_all[value], default=None)
        selection.choices.append(choice := Choice(recipe, best, losses, lost, flat, least))
        if choice.at_the_edge:
            beyond.setdefault(beyond_of(choice, [*finished, *rest]), []).append(choice)
            continue
        selection.runs += judged
        selection.grids[_identity(finished[0], others)] = Grid(
            best, _by_seed(finished, asked.key, kept_back), tuple(losses)
        )
        selection.unfinished += [run for run in rest if run.config[asked.key] == best and run.seed not in kept_back]
    selection.problems = [edge_problem(choices, where, asked) for where, choices in beyond.items()]
    problems += [] if problems else _nothing_to_judge(selection)
    if problems:
        raise ConfigError([*selection.problems, *problems])
    return selection


def has_grid(runs: Sequence[Run], key: str) -> bool:
    """Return whether at least two recipes ran at three or more values of `key`, so each can be compared at its best.

    With two values the best is always at an end of the grid.
    """
    others = [each for each in varying_keys(runs) if each != key]
    values: dict[str, dict[int, set[Any]]] = {}
    for run in runs:
        values.setdefault(_identity(run, others), {}).setdefault(run.seed, set()).add(run.config.get(key))
    return sum(sum(len(found) > 2 for found in by_seed.values()) > 1 for by_seed in values.values()) > 1


class Beyond(NamedTuple):
    """Extension of a grid of values that has its best value at an end.

    `end`: "below" or "above"; `further`: the value to add there; `seeds`: at which to run it.
    """

    end: str
    further: float
    seeds: tuple[int, ...]


def beyond_of(choice: Choice, runs: Sequence[Run]) -> Beyond:
    """Return how to extend the grid of `choice`, which has its best value at an end, at the seeds of `runs`."""
    values = sorted(choice.losses)
    end = "below" if choice.value == values[0] else "above"
    neighbour = values[1] if end == "below" else values[-2]
    further = choice.value * choice.value / neighbour if neighbour else choice.value
    return Beyond(end, float(f"{further:.3g}"), tuple(sorted({run.seed for run in runs})))


def edge_problem(choices: Sequence[Choice], where: Beyond, asked: BestOf) -> Problem:
    """Return the problem of recipes with their best value at the end of the grid, and the command that extends it.

    Such a recipe is not judged: a better value may lie beyond, and its loss is unknown.
    """
    *others, name = (f"{each.text} (at {each.value:g})" for each in choices)
    names = f"{', '.join(others)} and {name}" if others else name
    last = "smallest" if where.end == "below" else "largest"
    verb, they = ("is", "it is") if len(choices) == 1 else ("are", "they are")
    text = (
        f"{names} {verb} best at the {last} value of the grid. A better value may lie beyond it, so {they} not judged. "
        f"Extend the grid {where.end}"
    )
    command = ""
    if len(asked.sweeps) == 1 and where.further > 0:
        command = command_with_values(asked.sweeps[0], asked.key, [where.further], where.seeds)
    text += f": {command}" if command else f", for example to {where.further:g}."
    return Problem(f"--best-of {asked.key}", text)


def _by_seed(finished: Sequence[Run], key: str, choosing: Sequence[int]) -> dict[Any, dict[int, Run]]:
    """Return {value: {judging seed: run}}."""
    found: dict[Any, dict[int, Run]] = {}
    for run in finished:
        if run.seed not in choosing:
            found.setdefault(run.config[key], {})[run.seed] = run
    return found


def _losses_over_all(finished: Sequence[Run], key: str, terms: Terms) -> dict[Any, float]:
    """Return {value: mean loss} over the seeds that have all values; infinite if a run diverged."""
    runs = {(run.config[key], run.seed): run for run in finished}
    values = sorted({value for value, _ in runs})
    seeds = [seed for seed in sorted({seed for _, seed in runs}) if all((value, seed) in runs for value in values)]
    tail = tail_of([run for run in runs.values() if not run.diverged], terms.metric, terms.tail_share)
    if tail is None or not seeds:
        return {}
    return {
        value: math.inf
        if any(runs[value, seed].diverged for seed in seeds)
        else math.fsum(tail.of(runs[value, seed]) for seed in seeds) / len(seeds)
        for value in values
    }


def _other_keys(runs: Sequence[Run], unfinished: Sequence[Run], key: str) -> list[str]:
    """Return the other keys that vary. Raises ConfigError if `key` does not vary or is not numeric."""
    varying = varying_keys([*runs, *unfinished])
    if key not in varying:
        raise ConfigError(Problem("--best-of", f"'{key}' does not vary over these runs.{_tunable(runs, key, varying)}"))
    if not _is_numeric(runs, key):
        text = f"'{key}' is not numeric. Choose a numeric key such as optim.learning_rate."
        raise ConfigError(Problem("--best-of", text))
    return [each for each in varying if each != key]


def _is_numeric(runs: Sequence[Run], key: str) -> bool:
    values = [run.config.get(key) for run in runs]
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _tunable(runs: Sequence[Run], key: str, varying: Sequence[str]) -> str:
    """Suggest keys that can be tuned instead of `key`; if there are none, name the keys that vary and the runs to
    add."""
    found = [each for each in varying if _is_numeric(runs, each) and has_grid(runs, each)]
    if found:
        return did_you_mean(key, found)
    groups = ", ".join(dict.fromkeys(each.partition(".")[0] for each in varying))
    what = f": only {groups} varies, and defines the recipes" if groups else ": nothing varies"
    return (
        f" No key can be tuned here{what}. Run each recipe at several values of a key, for example "
        "optim.learning_rate=1e-3,2e-3,4e-3,8e-3."
    )


def _losses_by_value(
    finished: Sequence[Run], key: str, seeds: Sequence[int], tail: Tail | None, recipe: str, problems: list[Problem]
) -> dict[Any, float]:
    """Return one recipe's {value: mean loss over `seeds`}, infinite if a run diverged.

    A value that lacks a seed is reported in `problems`.
    """
    losses: dict[Any, float] = {}
    for value in sorted({run.config[key] for run in finished}):
        found = {run.seed: run for run in finished if run.config[key] == value}
        if missing := sorted(set(seeds) - found.keys()):
            text = f"has no finished run of {recipe} at {value:g} and seed {missing[0]}. "
            problems.append(Problem(f"--best-of {key}", f"{text}Finish it, or choose other --choose-by seeds."))
            continue
        of_seeds = [found[seed] for seed in seeds]
        whole = tail is not None and not any(run.diverged for run in of_seeds)
        losses[value] = math.fsum(map(tail.of, of_seeds)) / len(seeds) if tail is not None and whole else math.inf
    return losses


def _nothing_to_judge(selection: Selection) -> list[Problem]:
    """Return the problems if `selection` leaves nothing to judge."""
    key, lost = selection.key, [each for each in selection.choices if each.value is None]
    if lost and len(selection.choices) - len(lost) < 2:  # nothing is left to compare
        text = " ".join(each.line(key.rpartition(".")[2]) for each in lost)
        return [Problem(f"--best-of {key}", f"{text} Try lower values, or choose other --choose-by seeds.")]
    judged = {_identity(run, selection.others) for run in selection.runs}
    if selection.problems and len(judged) < 2:
        return [Problem(f"--best-of {key}", "fewer than two recipes have their best value inside the grid. Extend it.")]
    if selection.runs:
        return []
    text = f"all runs at the best values have the choosing seeds ({', '.join(map(str, selection.seeds))})."
    best = [each for each in selection.choices if each.value is not None]
    chosen = "; ".join(f"{each.text} {key}={each.value:g}" for each in best)
    return [Problem(f"--best-of {key}", f"{text} Run other seeds of {chosen}.")]


def _identity(run: Run, keys: Sequence[str]) -> str:
    return json.dumps([run.config.get(key) for key in keys], default=str)


def _recipe_text(run: Run, keys: Sequence[str]) -> str:
    """Return the name of a recipe: the names of the groups that vary, or KEY=VALUE for groups without a name."""
    parts = []
    for group in dict.fromkeys(key.partition(".")[0] for key in keys):
        name = run.config.get(f"{group}.name")
        own = [f"{key}={run.config.get(key)}" for key in keys if key.startswith(group)]
        parts += [f"{group}={name}"] if name else own
    return " ".join(parts) or "the recipe"
