"""A margin in tokens (--margin 2%): convert it to nats by baseline runs at other numbers of tokens; runs that lack."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.compare.effective_data import REACH, Curve
from lightning_llm.compare.format import seeds_text
from lightning_llm.compare.runs.differences import ROUNDING, same_config, validation_differences
from lightning_llm.compare.runs.factor import Factor
from lightning_llm.compare.runs.losses import LOSS, has_learned, tail_of
from lightning_llm.compare.runs.pairing import ComparisonGroup, Pair
from lightning_llm.compare.runs.usable import ENDED_EARLY, RUNNING, resume_commands, status_of
from lightning_llm.compare.terms import Terms
from lightning_llm.config.workspace import command
from lightning_llm.tracking.reading import Run

OF_TOKENS = ("trainer.max_steps", "schedule.", "optim.learning_rate", "data.global_batch_size", "branch_from")
"""Keys in which a shorter or longer run may differ and still count as the baseline: its length, the decay, and the
learning rate and batch size that go with them."""
MAY_DIFFER = (*ROUNDING, *OF_TOKENS)
SAME_TOKENS = 0.02
"""Relative difference below which two token counts count as equal: steps are whole numbers."""
MOST_FACTOR = 4.5
"""Largest factor in tokens between the judged runs and the baseline's next length; beyond it no margin is computed."""


def curve_of(family: ComparisonGroup, runs: Sequence[Run], factor: Factor, terms: Terms) -> Curve | None:
    """Return the baseline's losses at and around the number of tokens of `family`; None without other token counts.

    Of several counts the next below and the next above are used, or the two nearest if one side has none. The seeds are
    those at which the baseline finished and learned at all of them.
    """
    pairs = {pair.baseline.seed: pair for found in family.recipes.values() for pair in found}
    own = _losses_of([pair.baseline for pair in pairs.values()], terms)
    if not own or not terms.metric.startswith(LOSS):
        return None
    at = next(iter(own.values()))[0]
    others: dict[int, dict[int, float]] = {}
    lengths: dict[int, list[int]] = {}
    of_baseline = [run for run in runs if factor.level(run) == factor.baseline]
    for pair in pairs.values():
        alike = [run for run in of_baseline if _is_longer_or_shorter(run, pair, terms)]
        lengths[pair.baseline.seed] = [planned_tokens(run) for run in alike]
        # Later entries overwrite: of several runs of one length the one that differs least is kept.
        sound = [run for run in alike if is_sound(run, terms)]
        for run in sorted(sound, key=lambda run: (_unlike(run, pair.baseline), run.started_at), reverse=True):
            for seed, (tokens, loss) in _losses_of([run], terms).items():
                others.setdefault(tokens, {})[seed] = loss
    counts = around(at, [tokens for tokens in others if tokens != at])
    if not counts:
        return None
    nodes = sorted([*counts, at])
    tables = {**{tokens: others[tokens] for tokens in counts}, at: {seed: loss for seed, (_, loss) in own.items()}}
    seeds = set.intersection(*(set(table) for table in tables.values()))
    losses = {seed: np.array([tables[tokens][seed] for tokens in nodes]) for seed in sorted(seeds)}
    settled = frozenset(
        seed
        for seed, found in lengths.items()
        if all(any(abs(each - count) <= SAME_TOKENS * count for each in found) for count in counts)
    )
    return Curve(tuple(map(float, nodes)), losses, float(at), settled) if losses else None


def _losses_of(runs: Sequence[Run], terms: Terms) -> dict[int, tuple[int, float]]:
    """Return {seed: (tokens, tail loss)} of runs of one length that did not diverge."""
    sound = [run for run in runs if is_sound(run, terms)]
    tail = tail_of(sound, terms.metric, terms.tail_share)
    if tail is None:
        return {}
    return {run.seed: (run.tokens[tail.steps[-1]], tail.of(run)) for run in sound if run.tokens.get(tail.steps[-1])}


def is_sound(run: Run, terms: Terms) -> bool:
    """Return whether a baseline run finished and learned, so that its loss can be used for the curve."""
    return run.finished and has_learned(run, tail_of([run], terms.metric, terms.tail_share))


def _is_longer_or_shorter(run: Run, pair: Pair, terms: Terms) -> bool:
    base = pair.baseline
    return (
        run.seed == base.seed
        and run is not base
        and same_config(run, base, MAY_DIFFER)
        and not validation_differences(base, run, terms.metric)
    )


def _unlike(run: Run, base: Run) -> int:
    return sum(run.config.get(key) != base.config.get(key) for key in run.config.keys() | base.config.keys())


def around(at: int, counts: Sequence[int]) -> list[int]:
    """Return the token counts used for a curve around `at` tokens: the nearest below and above, ascending."""
    near = [count for count in counts if 1 / MOST_FACTOR <= count / at <= MOST_FACTOR]
    below, above = sorted(count for count in near if count < at), sorted(count for count in near if count > at)
    if below and above:
        return [below[-1], above[0]]
    return below[-2:] or above[:2]


def planned_tokens(run: Run) -> int:
    """Return the number of tokens of a run up to its last planned step, also if it diverged or has not run yet."""
    steps = int(run.config.get("trainer.max_steps") or run.last_step)
    if run.tokens:
        seen = max(run.tokens)
        return round(run.tokens[seen] / seen * steps)
    return steps * math.prod(
        int(run.config.get(f"data.{key}") or 0) for key in ("global_batch_size", "sequence_length")
    )


LONGER = (2, 4, 3)
"""Multiples of the judged length proposed for further baseline runs, in order of preference."""
NEEDS = "needs the baseline at two other numbers of tokens, about half and twice, each with its own decay,"


def in_nats(terms: Terms, family: ComparisonGroup, curve: Curve | None, of_baseline: Sequence[Run] = ()) -> Terms:
    """Return `terms` with a margin in tokens converted to nats for this group; other terms are unchanged.

    A recipe that needs a share m of further tokens is worth D / (1 + m): the margin is the baseline's loss increase
    there. It is the mean over all seeds; a verdict uses that of each seed (`Curve.margins`), which accounts for its
    noise.

    Args:
        of_baseline: all baseline runs, of any length, also unfinished ones.

    Raises:
        ConfigError: the baseline was not run at other numbers of tokens, or its loss does not fall with tokens.
    """
    share = terms.token_margin
    if share is None:
        return terms
    where = f" ({family.text})" if family.text else ""
    if curve is None or not _shows(curve, share):
        lacking = _lacking(family, curve, terms, of_baseline)
        raise ConfigError(Problem("--margin", f"{100 * share:g}%{where} {lacking}"))
    nats = float(np.mean(list(curve.margins(share).values())))
    if not nats > 0:
        text = f"{100 * share:g}%{where} cannot be converted to nats: the baseline's loss does not fall from "
        counts = ", ".join(f"{count:,.0f}" for count in curve.tokens)
        raise ConfigError(Problem("--margin", f"{text}{counts} tokens. Give the margin in nats, e.g. --margin 0.01."))
    return replace(terms, margin=nats)


def _shows(curve: Curve, share: float) -> bool:
    """True if the baseline's token counts suffice for a margin of `share` further tokens."""
    return len(curve.tokens) >= 3 and curve.reach[0] <= 1 / (1 + share) <= curve.reach[1]


def _shows_with(at: int, counts: set[int], share: float) -> bool:
    """True if baseline runs at `counts` tokens would suffice together with those at `at`."""
    return _shows(Curve(tuple(map(float, sorted({*around(at, sorted(counts - {at})), at}))), {}, float(at)), share)


@dataclass(frozen=True)
class Unplanned:
    """A setting in which the planned jobs would leave a margin in tokens unknown.

    `baseline`: a baseline run of the judged length, `steps`; `there`: all its planned numbers of steps; `others`: two
    further numbers of steps that would suffice.
    """

    setting: str
    baseline: Run
    there: tuple[int, ...]
    steps: int
    others: tuple[int, int]


def unplanned(
    families: Sequence[ComparisonGroup], runs: Sequence[Run], seeds: Sequence[int], terms: Terms
) -> list[Unplanned]:
    """Return the settings in which the planned jobs would leave a margin in tokens unknown; [] for a margin in nats.

    Args:
        runs: every job, of all seeds, as a run with only a config.
        seeds: seeds at which the margin is needed.
    """
    share, found = terms.token_margin, []
    if share is None:
        return []
    for family in families:
        pair = next(iter(family.recipes.values()))[0]
        at, steps = planned_tokens(pair.baseline), int(pair.baseline.config["trainer.max_steps"])
        alike = [run for run in runs if run is not pair.baseline and same_config(run, pair.baseline, MAY_DIFFER)]
        counts = set.intersection(*({planned_tokens(run) for run in alike if run.seed == seed} for seed in seeds))
        if not _shows_with(at, counts, share):
            there = tuple(round(count / at * steps) for count in sorted({*counts, at}))
            others = max(1, steps // 2), 2 * steps
            found.append(Unplanned(family.text, pair.baseline, there, steps, others))
    return found


def _lacking(family: ComparisonGroup, curve: Curve | None, terms: Terms, of_baseline: Sequence[Run]) -> str:
    """Return the problem of a margin in tokens: runs needed, present, useless or unfinished, and the command to add
    them."""
    share, base = terms.token_margin or 0.0, next(iter(family.recipes.values()))[0].baseline
    steps, at = int(base.config.get("trainer.max_steps") or base.last_step), planned_tokens(base)
    seeds = sorted({pair.baseline.seed for pairs in family.recipes.values() for pair in pairs})
    alike = [run for run in of_baseline if run.seed in seeds and same_config(run, base, MAY_DIFFER)]
    useless = _by_length([run for run in alike if _is_over(run) and not is_sound(run, terms)], base)
    if curve is None and steps in useless:
        return f"is not known: at {steps} steps {_why_useless({steps: useless[steps]})}. Train longer."
    there = {round(count / curve.at * steps): round(count) for count in curve.tokens} if curve else {steps: at}
    text = f"{NEEDS} at the same seeds. Usable runs exist at {_listed(there)} steps."
    useless = {length: runs for length, runs in useless.items() if length not in there}
    if useless:
        text += f" At {_listed(useless)} steps {_why_useless(useless)}."
    pending = [run for run in alike if not _is_over(run)]
    if ended := _by_length([run for run in pending if status_of(run) == ENDED_EARLY], base):
        text += f" At {_where(ended)} a search stopped its runs early."
    coming = _by_length([run for run in pending if status_of(run) != ENDED_EARLY], base)
    waiting = {length: runs for length, runs in coming.items() if length not in there}
    expected = {**there, **{length: planned_tokens(runs[0]) for length, runs in waiting.items()}}
    if waiting:
        text += f" {_unfinished(waiting)}"
        if _shows_with(at, set(expected.values()), share):
            return text
        text += "."
    return f"{text} {_what_to_add(base, steps, share, seeds, expected, set(useless))}"


def _is_over(run: Run) -> bool:
    return run.finished or run.diverged


def _by_length(runs: Sequence[Run], base: Run) -> dict[int, list[Run]]:
    """Return {steps, in batches of the size of the base: runs}, ascending."""
    steps, at = int(base.config.get("trainer.max_steps") or base.last_step), planned_tokens(base)
    found: dict[int, list[Run]] = {}
    for run in sorted(runs, key=planned_tokens):
        found.setdefault(round(planned_tokens(run) / at * steps), []).append(run)
    return found


def _why_useless(useless: Mapping[int, Sequence[Run]]) -> str:
    """Return why the baseline's runs of these lengths cannot be used."""
    diverged = {run.diverged for runs in useless.values() for run in runs}
    why = {True: "the baseline diverged", False: "the baseline has not learned"}
    return f"{' or '.join(why[each] for each in sorted(diverged))}, so these runs cannot be used"


def _what_to_add(
    base: Run, steps: int, share: float, seeds: Sequence[int], known: Mapping[int, int], useless: set[int]
) -> str:
    """Return the lengths that suffice together with `known`, {steps: tokens}, and how to run them.

    Lengths below one that is too short to learn are not proposed, nor lengths that would not determine so large a
    margin.
    """
    at, below = planned_tokens(base), max(1, steps // 2)
    lengths = [] if any(below <= length < steps for length in useless) else [below]
    lengths = [n for n in (*lengths, *(n * steps for n in LONGER)) if n not in {*known, *useless}]
    for wanted in (*combinations(lengths, 1), *combinations(lengths, 2)):
        if _shows_with(at, {*known.values(), *(round(n * at / steps) for n in wanted)}, share):
            break
    else:
        return _no_length_shows(steps, share, known)
    config = str(base.folder / "config.yaml")
    commands = "; ".join(command("train", "--config", config, f"trainer.max_steps={n}", "run.name=NEW") for n in wanted)
    return (
        f"Add {' and '.join(map(str, wanted))} to the sweep (trainer.max_steps), at {seeds_text(seeds)}, "
        f"or run by run: {commands}"
    )


def _no_length_shows(steps: int, share: float, known: Iterable[int]) -> str:
    """Return the advice if no further length suffices; `known`: existing and expected lengths in steps."""
    shortest = max((length for length in known if length < steps), default=steps)  # the next length below
    most = math.floor(100 * (REACH * steps / shortest - 1) + 1e-6)
    margin = f"a margin of at most {most}%, or one" if 100 * share > most else "a margin"
    return f"No longer run can determine {100 * share:g}%. Train longer, or give {margin} in nats (--margin 0.01)."


def _unfinished(waiting: Mapping[int, Sequence[Run]]) -> str:
    """Return the lengths and seeds at which the baseline's runs are running or stopped, and the command to resume
    them."""
    running = {n: [run for run in runs if status_of(run) == RUNNING] for n, runs in waiting.items()}
    stopped = {n: [run for run in runs if status_of(run) != RUNNING] for n, runs in waiting.items()}
    sentences = [f"At {_where(running)} its runs are running: wait for them"] if any(running.values()) else []
    if any(stopped.values()):
        go_on = resume_commands([run for runs in stopped.values() for run in runs])
        how = f". Resume them: {go_on}" if go_on else ". Resume them"
        sentences.append(f"At {_where(stopped)} its runs are not finished{how}")
    return ". ".join(sentences)


def _where(runs: Mapping[int, Sequence[Run]]) -> str:
    """Return the keys of {steps: runs} that have runs, with their seeds, as text."""
    lengths = [f"{steps} steps ({seeds_text(sorted({run.seed for run in at}))})" for steps, at in runs.items() if at]
    return " and ".join(lengths)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
