"""Predictions from a ladder: the target of `--predict`, and the claims recorded in the ledger."""

import json
import math
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.version import __version__
from lightning_llm.compare.format import json_ready
from lightning_llm.compare.terms import Terms
from lightning_llm.config.compose import compose_config
from lightning_llm.ladder.fit import Fit, effect_at
from lightning_llm.ladder.ledger import Prediction, add_predictions, now
from lightning_llm.ladder.measured import Ladder
from lightning_llm.ladder.refusal import Target
from lightning_llm.ladder.report import Report, line_of
from lightning_llm.model.flops import count_parameters

TOKENS = "data.tokens"
FLAG = "--predict"


def target_of(words: Sequence[str]) -> Target:
    """Parse the target: model=NAME, further keys of the model, and data.tokens=NUMBER.

    Raises:
        ConfigError: with everything missing or invalid, including errors of the model's config.
    """
    problems = [
        Problem(FLAG, f"'{word}' is neither a model (model=NAME, model.KEY=VALUE) nor {TOKENS}=NUMBER.")
        for word in words
        if not word.startswith((f"{TOKENS}=", "model=", "model."))
    ]
    model = [word for word in words if word.startswith(("model=", "model."))]
    counts = [word.partition("=")[2] for word in words if word.startswith(f"{TOKENS}=")]
    if not any(word.startswith("model=") for word in model):
        problems.append(Problem(FLAG, "has no model. Add one to set the number of parameters, e.g. model=llama_1b."))
    if len(counts) != 1:
        problems.append(Problem(FLAG, f"has {len(counts)} numbers of tokens. Give one, for example {TOKENS}=20e9."))
    tokens = _number(counts[0]) if counts else math.nan
    if len(counts) == 1 and not tokens >= 1:
        problems.append(Problem(FLAG, f"{TOKENS}={counts[0]} is not a number of tokens. Use for example 20e9."))
    if problems:
        raise ConfigError(problems)
    config = compose_config([*model, "data=python", "logger=none"]).model
    return Target(count_parameters(config).total, round(tokens), config.name)


def _number(word: str) -> float:
    try:
        found = float(word.replace("_", ""))
    except ValueError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def is_run(measured: Ladder, recipe: str, target: Target) -> bool:
    """Return whether the recipe has runs at `target` already."""
    return any(
        rung.parameters == target.parameters and abs(rung.tokens - target.tokens) <= 0.02 * target.tokens
        for rung in measured.rungs
        if rung.differences.get(recipe)
    )


def predict(report: Report, fit: Fit, target: Target, terms: Terms, file: Path) -> list[Prediction]:
    """Record the predicted cost of each recipe without a refusal at `target`; return these ledger entries."""
    date = now()
    made = [_prediction(fit, name, target, terms, date) for name in fit.gaps if name not in report.refused]
    return add_predictions(file, made) if made else []


def _prediction(fit: Fit, recipe: str, target: Target, terms: Terms, date: str) -> Prediction:
    effect = effect_at(fit, recipe, target.parameters, target.tokens, terms.confidence)
    gap = fit.gaps[recipe]
    fitted_to = fit.ladder.rows()
    return Prediction(
        date,
        claim={
            "line": line_of(effect, gap, target.name),
            "recipe": recipe,
            "baseline": fit.ladder.baseline,
            "metric": fit.ladder.metric,
            "model": target.name,
            "parameters": target.parameters,
            "tokens": target.tokens,
            "more_tokens": effect.more_tokens,
            "more_tokens_interval": [effect.low, effect.high],
            "gap": effect.gap,
            "gap_interval": list(effect.gap_interval()),
            "baseline_loss": float(fit.law.loss(target.parameters, target.tokens)[0, 0]),
            "growth_p": json_ready(gap.growth[1]),
        },
        terms={
            "confidence": terms.confidence,
            "tail": terms.tail_share,
            "gap_se": effect.gap_se,
            "pair_sd": effect.pair_sd,
            "df": effect.df,
            "graded_by": "the mean gap of S pairs within t(df) sqrt(gap_se^2 + pair_sd^2 / S) of `gap`",
            "law": fit.law.constants(),
            "gap_terms": dict(zip(("c_D", "c_N", "c_O"), map(float, gap.terms), strict=True)),
            "fitted_to": {
                "rungs": len(fit.ladder.rungs),
                "runs": len(fitted_to),
                "digest": sha256(json.dumps(fitted_to, sort_keys=True).encode()).hexdigest()[:16],
            },
            "version": __version__,
        },
    )
