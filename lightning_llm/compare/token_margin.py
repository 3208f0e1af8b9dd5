"""A margin in tokens, made one in nats by the baseline's curve; and what to run where that is not known."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_llm.compare.differences import same_config
from lightning_llm.compare.effective_data import REACH, Curve
from lightning_llm.compare.estimate import Terms
from lightning_llm.compare.pairing import Family
from lightning_llm.compare.token_curve import OTHERWISE, around, is_sound, planned_tokens
from lightning_llm.compare.unfinished import how_they_go_on
from lightning_llm.config.commands import command
from lightning_llm.config.margin import read_margin
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.record.reading import Run

NEEDS = "needs the baseline at two other numbers of tokens, about half and twice, each with its own decay,"


def in_nats(terms: Terms, family: Family, curve: Curve | None, of_baseline: Sequence[Run] = ()) -> Terms:
    """Return the terms with a margin given in tokens made one in nats for this family; others as they are.

    A recipe that needs a share m of tokens more is worth D / (1 + m): the margin is that much of the baseline's loss.
    It is the mean over all seeds; a verdict is by that of each seed (`Curve.margins`), so that its noise is accounted.

    Args:
        of_baseline: all its runs, of any length, those that may yet come to their end as well.

    Raises:
        ConfigError: the baseline was not run at other numbers of tokens, or its loss does not fall with them.
    """
    share = terms.token_margin
    if share is None:
        return terms
    where = f" ({family.words})" if family.words else ""
    if curve is None or not _shows(curve, share):
        lacking = _lacking(family, curve, terms, of_baseline)
        raise ConfigError(Problem("--margin", f"{100 * share:g}%{where} {lacking}"))
    nats = float(np.mean(list(curve.margins(share).values())))
    if not nats > 0:
        text = f"{100 * share:g}%{where} is no loss in nats: the baseline's loss does not fall from "
        counts = ", ".join(f"{count:,.0f}" for count in curve.tokens)
        raise ConfigError(Problem("--margin", f"{text}{counts} tokens. Give the margin in nats, say --margin 0.01."))
    return replace(terms, margin=nats)


def _shows(curve: Curve, share: float) -> bool:
    """Whether the baseline's token counts are enough to read off what `share` more tokens are worth."""
    return len(curve.tokens) >= 3 and curve.reach[0] <= 1 / (1 + share) <= curve.reach[1]


def _shows_with(at: int, counts: set[int], share: float) -> bool:
    """Whether runs of the baseline at `counts` tokens would be enough beside those at `at`."""
    return _shows(Curve(tuple(map(float, sorted({*around(at, sorted(counts - {at})), at}))), {}, float(at)), share)


@dataclass(frozen=True)
class Unplanned:
    """A setting whose margin in tokens planned jobs would leave unknown.

    `baseline`: a run of it, of the length that is judged, which is `steps`; `there`: all the numbers of steps that it
    is planned for; `others`: two that would be enough beside.
    """

    setting: str
    baseline: Run
    there: tuple[int, ...]
    steps: int
    others: tuple[int, int]


def unplanned(families: Sequence[Family], runs: Sequence[Run], seeds: Sequence[int], terms: Terms) -> list[Unplanned]:
    """Return the settings in which jobs that are planned would leave a margin in tokens unknown; [] for one in nats.

    Args:
        runs: every job, of all seeds, as a run that has only its config.
        seeds: at which the margin is needed.
    """
    share, found = terms.token_margin, []
    if share is None:
        return []
    for family in families:
        pair = next(iter(family.recipes.values()))[0]
        at, steps = planned_tokens(pair.baseline), int(pair.baseline.config["trainer.max_steps"])
        alike = [run for run in runs if run is not pair.baseline and same_config(run, pair.baseline, OTHERWISE)]
        counts = set.intersection(*({planned_tokens(run) for run in alike if run.seed == seed} for seed in seeds))
        if not _shows_with(at, counts, share):
            there = tuple(round(count / at * steps) for count in sorted({*counts, at}))
            others = max(1, steps // 2), 2 * steps
            found.append(Unplanned(family.words, pair.baseline, there, steps, others))
    return found


def _lacking(family: Family, curve: Curve | None, terms: Terms, of_baseline: Sequence[Run]) -> str:
    """Return what runs a margin in tokens needs, which of them tell it, which go on, and what adds the others."""
    share, base = terms.token_margin or 0.0, next(iter(family.recipes.values()))[0].baseline
    steps, at = int(base.config.get("trainer.max_steps") or base.last_step), planned_tokens(base)
    seeds = sorted({pair.baseline.seed for pairs in family.recipes.values() for pair in pairs})
    alike = [run for run in of_baseline if run.seed in seeds and same_config(run, base, OTHERWISE)]
    useless = _by_length([run for run in alike if _is_over(run) and not is_sound(run, terms)], base)
    if curve is None and steps in useless:
        return f"is not known: at {steps} steps {_says_nothing({steps: useless[steps]})}. Train for longer."
    there = {round(count / curve.at * steps): round(count) for count in curve.tokens} if curve else {steps: at}
    text = f"{NEEDS} at the same seeds. It is there at {_listed(there)} steps."
    useless = {length: runs for length, runs in useless.items() if length not in there}
    if useless:
        text += f" At {_listed(useless)} steps {_says_nothing(useless)}."
    waiting = {n: runs for n, runs in _by_length([r for r in alike if not _is_over(r)], base).items() if n not in there}
    if waiting:
        runs = [run for found in waiting.values() for run in found]
        text += f" {_unfinished(waiting)}: {how_they_go_on(runs) or 'go on with them'}"
        if _shows_with(at, {*there.values(), *map(planned_tokens, runs)}, share):
            return text
        text += "."
    return f"{text} {_what_to_add(base, steps, share, seeds, {*there, *waiting}, set(useless))}"


def _is_over(run: Run) -> bool:
    return run.finished or run.lost_its_loss


def _by_length(runs: Sequence[Run], base: Run) -> dict[int, list[Run]]:
    """Return {steps, of batches as the base's: runs}, in ascending order."""
    steps, at = int(base.config.get("trainer.max_steps") or base.last_step), planned_tokens(base)
    found: dict[int, list[Run]] = {}
    for run in sorted(runs, key=planned_tokens):
        found.setdefault(round(planned_tokens(run) / at * steps), []).append(run)
    return found


def _says_nothing(useless: Mapping[int, Sequence[Run]]) -> str:
    """Return why the baseline's runs there tell nothing of tokens."""
    diverged = {run.lost_its_loss for runs in useless.values() for run in runs}
    why = {True: "the baseline diverged", False: "the baseline has not learned"}
    return f"{' or '.join(why[each] for each in sorted(diverged))}, which tells nothing of tokens"


def _what_to_add(base: Run, steps: int, share: float, seeds: Sequence[int], known: set[int], useless: set[int]) -> str:
    """Return the lengths that would be enough, and how to run them: none below one that is too short to learn."""
    fewest = round(min(steps / 2, steps * REACH / (1 + share)))
    below = [] if any(length >= fewest for length in useless if length < steps) else [fewest]
    wanted = [each for each in (*below, 2 * steps) if each not in known | useless]
    if len(wanted) + len(known) < 3 or not wanted:
        wanted.append(next(n * steps for n in (4, 3, 6) if n * steps not in known | useless))
    config = str(base.folder / "config.yaml")
    commands = "; ".join(command("train", "--config", config, f"trainer.max_steps={n}", "run.name=NEW") for n in wanted)
    return (
        f"Add {' and '.join(map(str, wanted))} to the sweep (trainer.max_steps), at {_seeds(seeds)}, or run by run: "
        f"{commands}"
    )


def _unfinished(waiting: Mapping[int, Sequence[Run]]) -> str:
    """Return at what lengths, and seeds, the baseline has runs that are not finished."""
    lengths = [f"{steps} steps ({_seeds(sorted({run.seed for run in runs}))})" for steps, runs in waiting.items()]
    return f"At {' and '.join(lengths)} its runs are there and not finished, and this goes on with them"


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {_listed(seeds)}"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def margin_of(word: str | float) -> tuple[float, float | None]:
    """Return (nats, None) of "0.01", and (NaN, 0.02) of "2%": a share of tokens, which becomes nats for each family.

    Raises:
        ConfigError: it is neither.
    """
    try:
        return read_margin(word)
    except ValueError as error:
        raise ConfigError(Problem("--margin", f"{error}.")) from error
