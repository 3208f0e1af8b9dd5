"""The runs of a grid behind verdicts at each recipe's best value: what they say of these (`tuned`)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_llm.compare.best_value.selection import Selection
from lightning_llm.compare.best_value.tuned import Tuned, grid_bounds
from lightning_llm.compare.runs.losses import Tail, diverged, tail_of
from lightning_llm.compare.statistics.intervals import Array
from lightning_llm.compare.verdict import Verdict
from lightning_llm.tracking.reading import Run


def borne_out(verdicts: Sequence[Verdict], selection: Selection) -> list[Verdict]:
    """Return one family's verdicts, lossy or lossless only where the whole grid bears that out."""
    if not verdicts:
        return []
    arms = [selection.grid_of(verdicts[0].pairs[0].baseline)]
    arms += [selection.grid_of(verdict.pairs[0].run) for verdict in verdicts]
    values = sorted({value for arm in arms for value in arm.runs})
    outliers = {verdict.name: verdict.judged.estimate.outlier_seeds for verdict in verdicts}
    seeds = sorted({seed for arm in arms for runs in arm.runs.values() for seed in runs})
    kept = [run for arm in arms for runs in arm.runs.values() for run in runs.values() if not run.lost_its_loss]
    terms = verdicts[0].terms
    tail = tail_of(kept, terms.metric, terms.tail_share)
    if tail is None:
        return list(verdicts)
    losses = np.full((len(arms), len(values), len(seeds)), math.nan)
    for number, arm in enumerate(arms):
        for value, runs in arm.runs.items():
            for seed, run in runs.items():
                if number and seed in outliers[verdicts[number - 1].name] and value == arm.value:
                    continue
                losses[number, values.index(value), seeds.index(seed)] = _loss(run, tail)
    chosen = np.array([values.index(arm.value) for arm in arms])
    margin = terms.margin
    if terms.token_margin is not None:  # of each seed its own, whose noise is then that of the differences
        losses[1:] -= _margins(verdicts, seeds)
        margin = 0.0
    bounds = grid_bounds(_settled(losses, chosen), chosen, terms.confidence)
    lossy, lossless = bounds.lossy(margin), bounds.lossless(margin)
    found = []
    for place, verdict in enumerate(verdicts):
        own, base = arms[1 + place], arms[0]
        against: list[tuple[str, Any]] = []
        withheld = None
        if verdict.judged.loss == "lossy" and verdict.decision == "lossy" and not lossy[place]:
            withheld = None if verdict.judged.stability.verdict == "unstable" else "lossy"
            fails = ~(bounds.low[place] > margin) & ~bounds.worse[place] & bounds.judged[place]
            against = [("own", values[index]) for index in np.flatnonzero(fails)]
        elif verdict.decision == "lossless" and not lossless[place]:
            withheld = "lossless"
            fails = ~(bounds.high[place] < margin) & ~bounds.baseline_worse[place] & bounds.baseline_judged[place]
            against = [("baseline's", values[index]) for index in np.flatnonzero(fails)]
        unjudged = [
            value
            for index, value in enumerate(values)
            if (value in own.tried and not bounds.judged[place, index])
            or (value in base.tried and not bounds.baseline_judged[place, index])
        ]
        tuned = Tuned(selection.key, own.value, base.value, withheld, tuple(against), tuple(unjudged))
        judged = replace(verdict.judged, decision="inconclusive") if withheld else verdict.judged
        found.append(replace(verdict, judged=judged, tuned=tuned))
    return found


def _margins(verdicts: Sequence[Verdict], seeds: Sequence[int]) -> Array:
    """Return a margin in tokens at each of `seeds`, [S] in nats, NaN where it is not known."""
    known = {seed: nats for verdict in verdicts for seed, nats in (verdict.judged.measured.margins or {}).items()}
    return np.array([known.get(seed, math.nan) for seed in seeds])


def _loss(run: Run, tail: Tail) -> float:
    return math.inf if diverged(run, tail, learnable=True) else tail.of(run)


def _settled(losses: Array, chosen: "np.ndarray[Any, Any]") -> Array:
    """Return `losses` without what failed at a chosen value: of that the verdict on stability speaks."""
    found = losses.copy()
    for arm, place in enumerate(chosen):
        found[arm, place] = np.where(np.isinf(found[arm, place]), math.nan, found[arm, place])
    return found
