"""A gap as tokens: how many more the recipe needs to the loss that the baseline has after D.

On the baseline's law a run is worth m D tokens where its loss is that of the baseline after m D: gap = B (m D)^-beta -
B D^-beta, so 1 / m = (1 + gap / (B D^-beta))^(1/beta). It is the same identity by which others read a speedup from two
losses, ((L_worse - L_inf) / (L_better - L_inf))^(1 / exponent), with all but the tokens' term taken for L_inf.
"""

from dataclasses import dataclass

import numpy as np
from scipy import special

from lightning_llm.ladder.fit import Fit, design
from lightning_llm.ladder.law import Array, Law

LEAST = 1e-6
"""Of 1 + gap / (B D^-beta): a gap so far below zero that no number of tokens would do is taken for next to none."""


@dataclass(frozen=True)
class Effect:
    """A recipe's at one place. `gap` in nats with its standard error `gap_se` (of the true mean, not of a run); as a
    share, 0.041 for 4.1 % more tokens: `more_tokens`, with the interval [`low`, `high`] of `confidence`; `df` and
    `pair_sd`, nats, of the pairs that it was fitted to."""

    recipe: str
    parameters: int
    tokens: int
    gap: float
    gap_se: float
    more_tokens: float
    low: float
    high: float
    df: float
    pair_sd: float
    confidence: float

    def gap_interval(self, seeds: int | None = None) -> tuple[float, float]:
        """Return the interval of the true gap in nats, or of the mean gap of `seeds` pairs yet to be run."""
        return (
            self.gap - (half := self.quantile * self.gap_sd(seeds)),
            self.gap + half,
        )

    def gap_sd(self, seeds: int | None = None) -> float:
        """Return the SD that the mean of `seeds` pairs has about the fitted gap; without, that of the true gap."""
        return float(np.hypot(self.gap_se, self.pair_sd / seeds**0.5 if seeds else 0.0))

    @property
    def quantile(self) -> float:
        """Of Student's t."""
        return float(special.stdtrit(self.df, 0.5 + self.confidence / 2))


def more_tokens(gap: Array, law: Law, tokens: float) -> Array:
    """Return the share of tokens more that makes up for `gap`, [B], at `tokens`; -1 would be none needed at all."""
    token_term = law.parts(1.0, tokens)[2][:, 0]
    return np.maximum(1 + gap / token_term, LEAST) ** (1 / law.beta) - 1


def effect_at(fit: Fit, recipe: str, parameters: int, tokens: int, confidence: float = 0.95) -> Effect:
    """Return what the recipe costs at a place, on the ladder or beyond it."""
    gap = fit.gaps[recipe]
    here = design(fit.law, parameters, tokens)[0, 0]
    estimate, df = here @ gap.terms, gap.df_of(here)
    drawn = (design(fit.drawn_laws, parameters, tokens)[:, 0] * gap.drawn).sum(1)
    share = float(more_tokens(np.array([estimate]), fit.law, tokens)[0])
    logs = np.log1p(more_tokens(drawn, fit.drawn_laws, tokens))
    wider = special.stdtrit(df, 0.5 + confidence / 2) / special.ndtri(0.5 + confidence / 2)
    tails = np.quantile(logs, (0.5 - confidence / 2, 0.5 + confidence / 2))
    # About their own middle: what the draws' law bends them to is no part of how far they scatter.
    low, high = np.expm1(np.log1p(share) + wider * (tails - np.median(logs)))
    return Effect(
        recipe, parameters, tokens, float(estimate), float(drawn.std(ddof=1)), share, float(min(low, share)),
        float(max(high, share)), df, gap.sd, confidence,
    )  # fmt: skip
