"""The baseline's runs at other numbers of tokens, beside a family: what its gaps are worth in tokens, and a margin."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning_llm.compare.differences import ROUNDING, same_config, validation_differences
from lightning_llm.compare.effective_data import REACH, Curve
from lightning_llm.compare.estimate import Terms
from lightning_llm.compare.factor import Factor
from lightning_llm.compare.losses import LOSS, has_learned, tail_of
from lightning_llm.compare.pairing import Family, Pair
from lightning_llm.config.commands import command
from lightning_llm.config.margin import read_margin
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.record.reading import Run

OF_TOKENS = ("trainer.max_steps", "schedule.", "optim.learning_rate", "data.global_batch_size", "branch_from")
"""What a run of more or fewer tokens may have otherwise and still be the baseline: its length and decay, and the rate
and batch that go with them."""
OTHERWISE = (*ROUNDING, *OF_TOKENS)
SAME_TOKENS = 0.02
"""Two numbers of tokens are one, to this share: steps are whole."""
MOST_FACTOR = 4.5
"""Of tokens, between the judged runs and the next of the baseline: further apart the curve between them is a guess."""


def curve_of(family: Family, runs: Sequence[Run], factor: Factor, terms: Terms) -> Curve | None:
    """Return the baseline's losses at and around the family's number of tokens; None without any other number.

    Of several it is the next below and the next above; where one side has none, the two nearest. Seeds are those at
    which the baseline ran, and learned, at all of them.
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
        lengths[pair.baseline.seed] = [_planned_tokens(run) for run in alike]
        # The last stays: of several of one length the one that differs least.
        sound = [run for run in alike if _sound(run, terms)]
        for run in sorted(sound, key=lambda run: (_unlike(run, pair.baseline), run.started_at), reverse=True):
            for seed, (tokens, loss) in _losses_of([run], terms).items():
                others.setdefault(tokens, {})[seed] = loss
    counts = _around(at, [tokens for tokens in others if tokens != at])
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
    """Return {seed: (tokens, tail loss)} of runs of one length, those that lost their loss left out."""
    sound = [run for run in runs if _sound(run, terms)]
    tail = tail_of(sound, terms.metric, terms.tail_share)
    if tail is None:
        return {}
    return {run.seed: (run.tokens[tail.steps[-1]], tail.of(run)) for run in sound if run.tokens.get(tail.steps[-1])}


def _sound(run: Run, terms: Terms) -> bool:
    return run.finished and has_learned(run, tail_of([run], terms.metric, terms.tail_share))


def _is_longer_or_shorter(run: Run, pair: Pair, terms: Terms) -> bool:
    base = pair.baseline
    return (
        run.seed == base.seed
        and run is not base
        and same_config(run, base, OTHERWISE)
        and not validation_differences(base, run, terms.metric)
    )


def _unlike(run: Run, base: Run) -> int:
    return sum(run.config.get(key) != base.config.get(key) for key in run.config.keys() | base.config.keys())


def _around(at: int, counts: Sequence[int]) -> list[int]:
    near = [count for count in counts if 1 / MOST_FACTOR <= count / at <= MOST_FACTOR]
    below, above = sorted(count for count in near if count < at), sorted(count for count in near if count > at)
    if below and above:
        return [below[-1], above[0]]
    return below[-2:] or above[:2]


def in_nats(terms: Terms, family: Family, curve: Curve | None) -> Terms:
    """Return the terms with a margin given in tokens made one in nats for this family; others as they are.

    A recipe that needs a share m of tokens more is worth D / (1 + m): the margin is that much of the baseline's loss.
    It is the mean over all seeds; a verdict is by that of each seed (`Curve.margins`), so that its noise is accounted.

    Raises:
        ConfigError: the baseline was not run at other numbers of tokens, or its loss does not fall with them.
    """
    share = terms.token_margin
    if share is None:
        return terms
    where = f" ({family.words})" if family.words else ""
    if curve is None or not _shows(curve, share):
        raise ConfigError(Problem("--margin", f"{100 * share:g}%{where} {_wanted(family, curve, share)}"))
    nats = float(np.mean(list(curve.margins(share).values())))
    if not nats > 0:
        text = f"{100 * share:g}%{where} is no loss in nats: the baseline's loss does not fall from "
        counts = ", ".join(f"{count:,.0f}" for count in curve.tokens)
        raise ConfigError(Problem("--margin", f"{text}{counts} tokens. Give the margin in nats, say --margin 0.01."))
    return replace(terms, margin=nats)


def _shows(curve: Curve, share: float) -> bool:
    """Whether the baseline's token counts are enough to read off what `share` more tokens are worth."""
    return len(curve.tokens) >= 3 and curve.reach[0] <= 1 / (1 + share) <= curve.reach[1]


def unplanned(families: Sequence[Family], runs: Sequence[Run], seeds: Sequence[int], terms: Terms) -> list[Problem]:
    """Return where jobs that are planned would leave a margin in tokens unknown, and what to add; [] for one in nats.

    Args:
        runs: every job, of all seeds, as a run that has only its config.
        seeds: at which the margin is needed.
    """
    share, problems = terms.token_margin, []
    if share is None:
        return []
    for family in families:
        pair = next(iter(family.recipes.values()))[0]
        at, steps = _planned_tokens(pair.baseline), int(pair.baseline.config["trainer.max_steps"])
        alike = [run for run in runs if run is not pair.baseline and same_config(run, pair.baseline, OTHERWISE)]
        of_seeds = [{_planned_tokens(run) for run in alike if run.seed == seed} for seed in seeds]
        counts = set.intersection(*of_seeds) - {at}
        curve = Curve(tuple(map(float, sorted({*_around(at, sorted(counts)), at}))), {}, float(at))
        if _shows(curve, share):
            continue
        there = ", ".join(str(round(count / at * steps)) for count in sorted({*counts, at}))
        where = f" ({family.words})" if family.words else ""
        text = (
            f"{100 * share:g}%{where} needs the baseline at two other numbers of tokens, about half and twice, each "
            f"with its own decay, at every seed of the looks, and these jobs have it at {there} steps. Give "
            f"trainer.max_steps={max(1, steps // 2)},{steps},{2 * steps}, or a line of the baseline alone to the "
            "recipe's sweep.also, or the margin in nats."
        )
        problems.append(Problem("sweep.margin", text))
    return problems


def _planned_tokens(run: Run) -> int:
    """Return the tokens that a run sees until its last step; one that diverged, or is yet to run, has not got there."""
    steps = int(run.config.get("trainer.max_steps") or run.last_step)
    if run.tokens:
        seen = max(run.tokens)
        return round(run.tokens[seen] / seen * steps)
    return steps * math.prod(
        int(run.config.get(f"data.{key}") or 0) for key in ("global_batch_size", "sequence_length")
    )


def _wanted(family: Family, curve: Curve | None, share: float) -> str:
    """Return what runs a margin in tokens needs, those that are there, and the command that adds one."""
    base = next(iter(family.recipes.values()))[0].baseline
    steps = int(base.config.get("trainer.max_steps") or base.last_step)
    seeds = sorted({pair.baseline.seed for pairs in family.recipes.values() for pair in pairs})
    there = [round(count / curve.at * steps) for count in curve.tokens] if curve else [steps]
    fewest = round(min(steps / 2, steps * REACH / (1 + share)))
    wanted = [each for each in (fewest, 2 * steps) if each not in there] or [4 * steps]
    config = str(base.folder / "config.yaml")
    runs = "; ".join(command("train", "--config", config, f"trainer.max_steps={n}", "run.name=NEW") for n in wanted)
    return (
        "needs the baseline at two other numbers of tokens, about half and twice, each with its own decay, at the same "
        f"seeds. It is there at {', '.join(map(str, there))} steps. Add {' and '.join(map(str, wanted))} to the sweep "
        f"(trainer.max_steps), at seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}, or run by run: {runs}"
    )


def margin_of(word: str | float) -> tuple[float, float | None]:
    """Return (nats, None) of "0.01", and (NaN, 0.02) of "2%": a share of tokens, which becomes nats for each family.

    Raises:
        ConfigError: it is neither.
    """
    try:
        return read_margin(word)
    except ValueError as error:
        raise ConfigError(Problem("--margin", f"{error}.")) from error
