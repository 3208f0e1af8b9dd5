"""The baseline's runs at other numbers of tokens, beside a family: what its gaps are worth in tokens."""

import math
from collections.abc import Sequence

import numpy as np

from lightning_llm.compare.estimate import Terms
from lightning_llm.compare.runs.differences import ROUNDING, same_config, validation_differences
from lightning_llm.compare.runs.factor import Factor
from lightning_llm.compare.runs.losses import LOSS, has_learned, tail_of
from lightning_llm.compare.runs.pairing import Family, Pair
from lightning_llm.compare.tokens.effective_data import Curve
from lightning_llm.tracking.reading import Run

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
        lengths[pair.baseline.seed] = [planned_tokens(run) for run in alike]
        # The last stays: of several of one length the one that differs least.
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
    """Return {seed: (tokens, tail loss)} of runs of one length, those that lost their loss left out."""
    sound = [run for run in runs if is_sound(run, terms)]
    tail = tail_of(sound, terms.metric, terms.tail_share)
    if tail is None:
        return {}
    return {run.seed: (run.tokens[tail.steps[-1]], tail.of(run)) for run in sound if run.tokens.get(tail.steps[-1])}


def is_sound(run: Run, terms: Terms) -> bool:
    """Return whether a run of the baseline came to its end and learned, so that its loss tells of its tokens."""
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


def around(at: int, counts: Sequence[int]) -> list[int]:
    """Return those of `counts`, numbers of tokens, that a curve around `at` is read from: the nearest either side."""
    near = [count for count in counts if 1 / MOST_FACTOR <= count / at <= MOST_FACTOR]
    below, above = sorted(count for count in near if count < at), sorted(count for count in near if count > at)
    if below and above:
        return [below[-1], above[0]]
    return below[-2:] or above[:2]


def planned_tokens(run: Run) -> int:
    """Return the tokens that a run sees until its last step; one that diverged, or is yet to run, has not got there."""
    steps = int(run.config.get("trainer.max_steps") or run.last_step)
    if run.tokens:
        seen = max(run.tokens)
        return round(run.tokens[seen] / seen * steps)
    return steps * math.prod(
        int(run.config.get(f"data.{key}") or 0) for key in ("global_batch_size", "sequence_length")
    )
