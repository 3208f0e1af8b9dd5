"""Reasons why a ladder does not support a prediction, as messages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from lightning_llm.compare.format import count, nats, short
from lightning_llm.config.schema.sweep import FEWEST_SIZES, FEWEST_TOKENS
from lightning_llm.ladder.fit import TERMS, Fit, Runs, effect_at, fit_ladder
from lightning_llm.ladder.law import PARAMETERS, own_variance
from lightning_llm.ladder.measured import Ladder, Place

FEWEST_RUNGS = PARAMETERS + 3
"""Least number of rungs of the baseline: its law has five parameters, and three further rungs test the fit."""
FEWEST_PAIRED_RUNGS = TERMS + 2
"""Least number of rungs of a recipe: a gap has three terms, and two further rungs test the fit."""
MISFIT_LEVEL = 0.01
"""Level of the tests of fit, divided by the number of recipes: 1 % of valid ladders are refused."""
MATERIAL_SHARE = 0.05
"""Share of the fall of the loss over the ladder. A law is refused if it misses by more than this and by more than
noise. No law is exact, and with enough seeds any is refuted; one that is 2 % off still gives the slope that converts
gaps."""
DECADES = 1.0
"""Limit of extrapolation, in powers of ten of size, tokens and tokens per parameter."""


@dataclass(frozen=True)
class Target:
    """Target of a prediction: a model of `parameters` trained on `tokens`; `name`: of the model."""

    parameters: int
    tokens: int
    name: str = ""

    @property
    def text(self) -> str:
        """Parameters and tokens as text: "1.24B / 20B"."""
        return f"{short(self.parameters)} / {short(self.tokens)}"


def too_small(ladder: Ladder) -> str:
    """Return why the ladder cannot be fitted, as text: its sizes, token counts and rungs, and the missing ones.

    "" if it can be fitted.
    """
    wanted = {"model size": FEWEST_SIZES, "token count": FEWEST_TOKENS, "rung": FEWEST_RUNGS}
    here = _counted([rung.place for rung in ladder.rungs])
    lacking = [count(fewest - len(here[noun]), noun) for noun, fewest in wanted.items() if len(here[noun]) < fewest]
    if not lacking:
        return ""
    text = (
        f"a law over sizes and tokens, with {PARAMETERS} constants, requires {FEWEST_SIZES} model sizes, "
        f"{FEWEST_TOKENS} token counts and {FEWEST_RUNGS} rungs (a size at a token count)"
    )
    there = _counted([*(rung.place for rung in ladder.rungs), *ladder.left_out])
    text = f"{text}. These runs have {_described(there)}"
    if ladder.left_out:
        out = [f"{short(n)} / {short(d)}: {why}" for (n, d), why in ladder.left_out.items()]
        text += f", but only {_described(here)} can be used ({'; '.join(out)})"
    return f"{text}. Missing: {', '.join(lacking)}"


def _counted(places: Sequence[Place]) -> dict[str, list[str]]:
    """Return the sizes, token counts and rungs of `places`, as text."""
    sizes, tokens = ({place[axis] for place in places} for axis in (0, 1))
    return {
        "model size": [short(each) for each in sorted(sizes)],
        "token count": [short(each) for each in sorted(tokens)],
        "rung": ["" for _ in places],
    }


def _described(counted: dict[str, list[str]]) -> str:
    parts = []
    for noun, names in counted.items():
        listed = f" ({', '.join(names)})" if any(names) else ""
        parts.append(f"{count(len(names), noun)}{listed}")
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def too_few_pairs(ladder: Ladder, recipe: str) -> list[str]:
    """Return why the recipe's gap cannot be fitted: it has too few rungs or pairs. [] if it can."""
    rungs = [rung for rung in ladder.rungs if rung.differences.get(recipe)]
    sizes, pairs = {rung.parameters for rung in rungs}, sum(len(rung.differences[recipe]) for rung in rungs)
    if len(rungs) < FEWEST_PAIRED_RUNGS or len(sizes) < 2 or len({rung.tokens for rung in rungs}) < 2:
        where = f"{len(rungs)} rungs of {len(sizes)} sizes"
        return [f"it was run on {where}; {FEWEST_PAIRED_RUNGS} of two sizes and two token counts are needed"]
    if pairs < TERMS + 3:
        return [f"it has {pairs} pairs; {TERMS + 3} are needed, preferably two or three seeds on every rung"]
    return []


def refusals(fit: Fit, recipe: str, target: Target | None = None, decades: float = DECADES) -> list[str]:
    """Return all reasons against a prediction for `recipe` from the fit; [] if it is allowed.

    `target`: place of the prediction, None for no place beyond the ladder; `decades`: limit of extrapolation, in powers
    of ten.
    """
    return [*law_misfit(fit), *_gap_misfit(fit, recipe), *_not_foreseen(fit, recipe), *_too_far(fit, target, decades)]


def law_misfit(fit: Fit) -> list[str]:
    """Return why no cost may be computed from the fit: the losses do not follow the baseline's law. [] if they do."""
    share = fit.misfit / fit.fall if fit.fall else 1.0
    known = not math.isnan(fit.lack_of_fit)
    if share <= MATERIAL_SHARE or (known and fit.lack_of_fit >= MISFIT_LEVEL):
        return []
    p = f", p = {fit.lack_of_fit:.1g}" if known else ""
    return [
        f"the baseline's losses do not follow E + A N^-alpha + B D^-beta: they miss it by {nats(fit.misfit)} nats, "
        f"{100 * share:.0f} % of their fall over the ladder{p}. Use rungs of one regime: enough updates, each "
        "at its best learning rate"
    ]


def _gap_misfit(fit: Fit, recipe: str) -> list[str]:
    lack = fit.gaps[recipe].lack_of_fit
    if math.isnan(lack) or lack >= MISFIT_LEVEL / len(fit.gaps):
        return []
    return [
        f"its gaps do not follow the terms of the fit: they scatter about it by more than seeds do (p = {lack:.1g}). "
        "Another effect appears within the ladder, so the fit cannot be extrapolated"
    ]


def _not_foreseen(fit: Fit, recipe: str) -> list[str]:
    """Return a reason if the smaller sizes would not have predicted the largest: a test of extrapolation itself."""
    largest = max(rung.parameters for rung in fit.ladder.rungs)
    top = [rung for rung in fit.ladder.rungs if rung.parameters == largest]
    smaller = fit.ladder.without(rung.place for rung in top)
    measured = [rung for rung in top if rung.differences.get(recipe)]
    if not measured or too_small(smaller) or too_few_pairs(smaller, recipe):
        return []
    before = fit_ladder(smaller, draws=len(fit.drawn_laws.theta))
    foreseen = [effect_at(before, recipe, *rung.place) for rung in measured]
    values = Runs.from_ladder(Ladder(fit.ladder.baseline, fit.ladder.metric, measured)).differences[recipe]
    miss = np.nanmean(values, axis=1) - [each.gap for each in foreseen]
    variance, own_df = own_variance(miss, values, before.gaps[recipe].sd ** 2)
    # Errors of the fit are common to its predictions and add up; those of the pairs average out.
    shared = float(np.mean([each.gap_se for each in foreseen])) ** 2
    own = variance * float((1 / np.isfinite(values).sum(1)).sum()) / len(measured) ** 2
    t = float(miss.mean()) / (shared + own) ** 0.5 if shared + own else 0.0
    shared_df = float(np.mean([each.df for each in foreseen]))
    df = (shared + own) ** 2 / (shared**2 / shared_df + own**2 / own_df) if shared + own else own_df
    p = 2 * float(special.stdtr(df, -abs(t)))
    if p >= MISFIT_LEVEL / len(fit.gaps):
        return []
    return [
        f"the smaller sizes do not predict its own largest, {short(largest)}: measured minus predicted is "
        f"{nats(float(miss.mean()), signed=True)} nats (p = {p:.1g})"
    ]


def _too_far(fit: Fit, target: Target | None, decades: float) -> list[str]:
    if target is None:
        return []
    rungs = fit.ladder.rungs
    asked: dict[str, tuple[float, list[float]]] = {
        "parameters": (target.parameters, [rung.parameters for rung in rungs]),
        "tokens": (target.tokens, [rung.tokens for rung in rungs]),
        "tokens per parameter": (
            target.tokens / target.parameters,
            [rung.tokens / rung.parameters for rung in rungs],
        ),
    }
    found = []
    for what, (wanted, there) in asked.items():
        away = max(math.log10(wanted / max(there)), math.log10(min(there) / wanted))
        if away > decades + 1e-9:
            found.append(
                f"{short(wanted)} {what} are {away:.1f} decades beyond the ladder ({short(min(there))} to "
                f"{short(max(there))}), and predictions are limited to {decades:g} (--beyond DECADES raises the limit)"
            )
    return found
