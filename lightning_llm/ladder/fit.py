"""The fit of a ladder: the baseline's law, each recipe's gap over it, and their uncertainty.

A recipe's gap over the baseline at N parameters and D tokens, in nats per token, is fitted as

    gap(N, D) = c_D B D^-beta  +  c_N A N^-alpha  +  c_O D / N

on the terms of the baseline's law (`law.py`). A recipe that makes D tokens worth m D leaves B (m D)^-beta, so c_D =
m^-beta - 1; one that makes N parameters worth m N (the effective parameter count of T. Kumar et al., "Scaling Laws for
Precision", 2024, arXiv 2411.04330, section 4) leaves c_N = m^-alpha - 1. Both have no unit. c_O, in nats per (token per
parameter), is a term that grows as a model is trained on more tokens per parameter, as the same paper finds for
weights quantised after training (section 3, there as a power of D / N).

The uncertainty is from a wild bootstrap (C. F. J. Wu, Ann. Statist. 14 (1986) 1261-1295): the residuals of every run,
the baseline's and its pairs', get one random sign and are added to the fitted values, and law and gaps are fitted
again. So the scatter may differ between rungs, and noise shared by the runs of a seed stays shared. Residuals are
divided by 1 - leverage (J. G. MacKinnon and H. White, J. Econometrics 29 (1985) 305-325), and intervals are Student's
with the effective number of pairs as degrees of freedom (F. E. Satterthwaite, Biometrics Bull. 2 (1946) 110-114): fewer
than there are pairs if the smallest size is noisy and has the largest weight.

A gap in tokens (`Effect`). On the baseline's law a run is worth m D tokens if its loss is that of the baseline after
m D: gap = B (m D)^-beta - B D^-beta, so 1 / m = (1 + gap / (B D^-beta))^(1/beta). This is the usual identity for a
speedup from two losses, ((L_worse - L_inf) / (L_better - L_inf))^(1 / exponent), with everything except the term of
tokens as L_inf.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import special

from lightning_llm.compare.format import more_or_fewer, short
from lightning_llm.ladder.law import (
    LEAST_NOISE,
    PARAMETERS,
    Array,
    Law,
    Rungs,
    fit_law,
    lack_of_fit,
    pure_error,
    refit,
    unequal_lack_of_fit,
)
from lightning_llm.ladder.measured import Ladder

DRAWS = 400
TERMS = 3
"""Number of terms of a gap: c_D, c_N, c_O."""
GROWTH_LEVEL = 0.05
"""Level of the test for growth with tokens per parameter."""
LEAST = 1e-6
"""Lower limit of 1 + gap / (B D^-beta), for gaps so negative that no number of tokens would match them."""


@dataclass(frozen=True)
class Runs:
    """The runs of a ladder as arrays.

    `parameters`, `tokens`: of each rung, [R]. `losses`: of the baseline, and `differences`: {recipe: recipe minus
    baseline at the same seed}, both in nats over (rung, seed), [R, S]; NaN without a run.
    """

    parameters: Array
    tokens: Array
    losses: Array
    differences: dict[str, Array]

    @classmethod
    def from_ladder(cls, ladder: Ladder) -> "Runs":
        """Return the runs of `ladder`."""
        seeds = sorted({seed for rung in ladder.rungs for seed in rung.losses})

        def table(rows: list[dict[int, float]]) -> Array:
            return np.array([[row.get(seed, math.nan) for seed in seeds] for row in rows]).reshape(len(rows), -1)

        return cls(
            np.array([float(rung.parameters) for rung in ladder.rungs]),
            np.array([float(rung.tokens) for rung in ladder.rungs]),
            table([rung.losses for rung in ladder.rungs]),
            {name: table([rung.differences.get(name, {}) for rung in ladder.rungs]) for name in ladder.recipes},
        )


@dataclass(frozen=True)
class Gap:
    """The fitted gap of one recipe to the baseline over all rungs.

    `terms`: c_D, c_N, c_O, [3]; `drawn`: the same terms in each draw of the bootstrap, [B, 3]; `fitted`: the gap on
    every rung, nats, [R]; `sd`: of one pair's difference about the fit, nats, with `df` degrees of freedom.
    `lack_of_fit`: p-value of the test that the rungs' means scatter about the fit no more than their pairs do, with a
    separate variance per size; NaN if no rung has two pairs. `influence`, [n, 3]: of each pair on the terms;
    `residuals`, [n]: of each pair, divided by 1 - leverage.
    """

    terms: Array
    drawn: Array
    fitted: Array
    sd: float
    df: int
    lack_of_fit: float
    influence: Array
    residuals: Array

    @property
    def growth(self) -> tuple[float, float]:
        """(t, p) of the one-sided test that the gap grows with tokens per parameter (c_O > 0); NaN if not tested."""
        error = float(self.drawn[:, 2].std(ddof=1))
        if error == 0 or self.df < 1:
            return math.nan, math.nan
        ratio = float(self.terms[2]) / error
        return ratio, float(special.stdtr(self.df_of(np.array([0.0, 0.0, 1.0])), -ratio))

    @property
    def growth_text(self) -> str:
        """The result of that test as text: "grows with tokens per parameter (p = 0.003)"."""
        _, p = self.growth
        if p != p:
            return "growth with tokens per parameter not tested"
        value = f"p = {p:.3f}" if p >= 0.0005 else "p < 0.001"
        return f"{'grows' if p < GROWTH_LEVEL else 'not shown to grow'} with tokens per parameter ({value})"

    def df_of(self, combination: Array) -> float:
        """Return the degrees of freedom of the variance of `combination` [3] of the terms.

        Satterthwaite's, for a sum of squares w_i with one degree each: 3 (sum w)^2 / sum w^2 (3 is the ratio for normal
        noise), minus the share of three fitted terms; between 2 and `df`.
        """
        squares = ((self.influence @ combination) * self.residuals) ** 2
        if not squares.any():
            return float(self.df)
        seen = 3 * squares.sum() ** 2 / (squares**2).sum() * self.df / (self.df + TERMS)
        return float(np.clip(seen, min(2, self.df), self.df))


@dataclass(frozen=True)
class Fit:
    """A fitted ladder: the baseline's law, and `gaps`: {recipe: its fitted gap}.

    `law`: the baseline's law; `drawn_laws`: the same in each of the B draws of the bootstrap. `residuals`: of the
    rungs' mean losses about the law, nats, [R]. `lack_of_fit`: p-value of the F test of the law; `noise`: SD of a
    baseline run about the mean of its rung, nats. Both are NaN without two seeds on any rung.
    """

    ladder: Ladder
    runs: Runs
    law: Law
    drawn_laws: Law
    gaps: dict[str, Gap]
    residuals: Array
    noise: float
    lack_of_fit: float

    @cached_property
    def misfit(self) -> float:
        """Root mean square of the residuals of the rungs' mean losses, nats per token."""
        return float(np.sqrt((self.residuals**2).mean()))

    @cached_property
    def fall(self) -> float:
        """Difference between the highest and lowest mean loss of a rung, nats per token."""
        return float(np.ptp(np.nanmean(self.runs.losses, axis=1)))


def fit_ladder(ladder: Ladder, draws: int = DRAWS, seed: int = 0) -> Fit:
    """Return the fit of `ladder`. It needs at least `PARAMETERS` + 1 rungs, which `refusal.too_small` checks.

    `draws`: number of bootstrap draws; `seed`: of their random signs.
    """
    runs = Runs.from_ladder(ladder)
    counts = np.isfinite(runs.losses).sum(1)
    means = np.nanmean(runs.losses, axis=1)
    noise, pure_df, pure = pure_error(runs.losses)
    rungs = Rungs(runs.parameters, runs.tokens, counts / max(noise if pure_df else LEAST_NOISE, LEAST_NOISE) ** 2)
    law = fit_law(rungs, means)
    fitted = law.loss(runs.parameters, runs.tokens)[0]
    # Set the noise to the scatter about the law, so that the prior has the correct weight, and fit again.
    scatter = math.sqrt(float((counts * (means - fitted) ** 2).sum()) / max(len(means) - PARAMETERS, 1))
    rungs = Rungs(runs.parameters, runs.tokens, counts / max(noise if pure_df else 0.0, scatter, LEAST_NOISE) ** 2)
    law = refit(rungs, means[None], law)
    fitted = law.loss(runs.parameters, runs.tokens)[0]
    lack = lack_of_fit(float((counts * (means - fitted) ** 2).sum()), len(means) - PARAMETERS, pure, pure_df)
    signs = np.random.default_rng(seed).choice((-1.0, 1.0), (draws, *runs.losses.shape))
    inflate = math.sqrt(len(means) / max(len(means) - PARAMETERS, 1))
    # Residuals of a run: of its rung about the law, and of the run within its rung.
    within = np.where(np.isfinite(runs.losses), runs.losses - means[:, None], 0.0)
    within *= np.sqrt(counts / np.maximum(counts - 1, 1))[:, None]
    between = np.random.default_rng(seed + 1).choice((-1.0, 1.0), (draws, len(means))) * inflate * (means - fitted)
    drawn = fitted + between * np.sqrt(_share_of_misfit(lack)) + (signs * within).sum(2) / counts
    laws = refit(rungs, drawn, law)
    gaps = {name: _fit_gap(runs, row, law, laws, signs) for name, row in runs.differences.items()}
    return Fit(ladder, runs, law, laws, gaps, means - fitted, noise if pure_df else math.nan, lack)


def _share_of_misfit(lack: float) -> float:
    """Return the share of the rungs' scatter about the law not due to their runs: 1 if that is unknown."""
    return 1.0 if math.isnan(lack) or lack < 0.5 else 0.0


def design(law: Law, parameters: Array | float, tokens: Array | float) -> Array:
    """Return the three quantities that a gap is fitted on, [B, R, 3]: B D^-beta, A N^-alpha and D / N.

    For B laws at R places, given by `parameters` N and `tokens` D.
    """
    _, size_term, token_term = law.parts(parameters, tokens)
    per_parameter = np.broadcast_to(np.atleast_1d(tokens) / np.atleast_1d(parameters), token_term.shape)
    return np.stack([token_term, size_term, per_parameter], axis=-1)


def _fit_gap(runs: Runs, differences: Array, law: Law, laws: Law, signs: Array) -> Gap:
    """Return a recipe's gap by least squares on its pairs, with the bootstrap of `signs`, [B, R, S]."""
    there = np.isfinite(differences)
    counts = there.sum(1)  # [R]
    on = counts > 0
    terms = design(law, runs.parameters, runs.tokens)  # [1, R, 3]
    means = np.where(on, np.nansum(differences, axis=1) / np.maximum(counts, 1), 0.0)
    solved, inverse = _least_squares(terms, counts, means[None])
    fitted = (terms[0] @ solved[0]).astype(float)
    residuals = np.where(there, differences - fitted[:, None], 0.0)
    df = int(there.sum()) - TERMS
    sd = math.sqrt(float((residuals**2).sum()) / df) if df > 0 else math.nan
    leverage = np.einsum("ri,ij,rj->r", terms[0], inverse[0], terms[0])
    scaled = residuals / np.maximum(1 - leverage, 0.2)[:, None]
    drawn_means = fitted + (signs * scaled).sum(2) / np.maximum(counts, 1)
    drawn, _ = _least_squares(design(laws, runs.parameters, runs.tokens), counts, drawn_means)
    lack = unequal_lack_of_fit(terms[0], differences, runs.parameters)
    influence = np.broadcast_to((terms[0] @ inverse[0])[:, None, :], (*there.shape, TERMS))[there]
    return Gap(solved[0], drawn, fitted, sd, df, lack, influence, scaled[there])


def _least_squares(terms: Array, counts: Array, means: Array) -> tuple[Array, Array]:
    """Return coefficients [B, 3] of `means` [B, R] on `terms` [B, R, 3], weighted by pairs; and (X'X)^-1."""
    scale = np.sqrt((counts[:, None] * terms**2).sum(1, keepdims=True) / counts.sum()) + 1e-300  # [B, 1, 3]
    unit = terms / scale
    normal = np.einsum("bri,r,brj->bij", unit, counts, unit)
    inverse = np.linalg.pinv(normal, rcond=1e-10, hermitian=True)
    solved = np.einsum("bij,brj,r,br->bi", inverse, unit, counts, means) / scale[:, 0]
    back = inverse / scale[:, 0, :, None] / scale[:, 0, None, :]
    return solved, back


@dataclass(frozen=True)
class Effect:
    """The fitted cost of a recipe at one place (model size and number of tokens).

    `gap`: to the baseline, nats, with its standard error `gap_se` (of the true mean, not of a run). `more_tokens`: the
    share of further tokens that compensates the gap, 0.041 for 4.1 %, with the interval [`low`, `high`] of
    `confidence`. `pair_sd`: SD of one pair's difference about the fit, nats; `df`: its degrees of freedom.
    """

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
        """Return the interval of the true gap in nats, or of the mean gap of `seeds` future pairs."""
        return (
            self.gap - (half := self.quantile * self.gap_sd(seeds)),
            self.gap + half,
        )

    def gap_sd(self, seeds: int | None = None) -> float:
        """Return the SD of the mean of `seeds` pairs about the fitted gap, nats; None: the SD of the true gap."""
        return float(np.hypot(self.gap_se, self.pair_sd / seeds**0.5 if seeds else 0.0))

    @property
    def quantile(self) -> float:
        """Half width of a two-sided interval of `confidence`, in standard errors: the quantile of Student's t."""
        return float(special.stdtrit(self.df, 0.5 + self.confidence / 2))

    @property
    def text(self) -> str:
        """The cost in tokens with its interval as text: "4.1 % more tokens [2.0, 6.5]"."""
        return more_or_fewer(self.more_tokens, (self.low, self.high))


def line_of(effect: Effect, gap: Gap, model: str = "") -> str:
    """Return a recipe's cost as a line; `model`: name of the model to add after the size, "" for none.

    For example "mxfp4_sr: 4.1 % more tokens [2.0, 6.5] at 1B / 20B, grows with tokens per parameter (p = 0.003)".
    """
    where = f"{short(effect.parameters)} / {short(effect.tokens)}{f' ({model})' if model else ''}"
    return f"{effect.recipe}: {effect.text} at {where}, {gap.growth_text}"


def more_tokens(gap: Array, law: Law, tokens: float) -> Array:
    """Return the share of further tokens that compensates `gap` (nats, [B]) at `tokens`: 0.041 for 4.1 % more.

    Negative for a recipe that is better than the baseline; -1 if no number of baseline tokens would match its loss.
    """
    token_term = law.parts(1.0, tokens)[2][:, 0]
    return np.maximum(1 + gap / token_term, LEAST) ** (1 / law.beta) - 1


def effect_at(fit: Fit, recipe: str, parameters: int, tokens: int, confidence: float = 0.95) -> Effect:
    """Return the fitted cost of `recipe` for a model of `parameters` and so many `tokens`, also beyond the ladder."""
    gap = fit.gaps[recipe]
    here = design(fit.law, parameters, tokens)[0, 0]
    estimate, df = here @ gap.terms, gap.df_of(here)
    drawn = (design(fit.drawn_laws, parameters, tokens)[:, 0] * gap.drawn).sum(1)
    share = float(more_tokens(np.array([estimate]), fit.law, tokens)[0])
    logs = np.log1p(more_tokens(drawn, fit.drawn_laws, tokens))
    wider = special.stdtrit(df, 0.5 + confidence / 2) / special.ndtri(0.5 + confidence / 2)
    tails = np.quantile(logs, (0.5 - confidence / 2, 0.5 + confidence / 2))
    # Centered at their median: a bias of the draws is not part of their scatter.
    low, high = np.expm1(np.log1p(share) + wider * (tails - np.median(logs)))
    return Effect(
        recipe, parameters, tokens, float(estimate), float(drawn.std(ddof=1)), share, float(min(low, share)),
        float(max(high, share)), df, gap.sd, confidence,
    )  # fmt: skip
