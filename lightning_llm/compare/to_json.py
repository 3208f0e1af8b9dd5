"""Verdicts as JSON: one verdict's entry in `compare.json`, and null for every number that is not finite."""

import json
import math
from collections.abc import Mapping
from typing import Any

from lightning_llm.compare.verdict import Verdict
from lightning_llm.compare.verdict_text import line_of, reason_of


def verdict_data(verdict: Verdict) -> dict[str, Any]:
    """Return one verdict; the order is that of the file."""
    judged, family = verdict.judged, verdict.family
    measured, estimate = judged.measured, judged.estimate
    return {
        "name": verdict.name,
        "verdict": verdict.decision,
        "qualified": verdict.qualified,
        "gap": finite(estimate.gap),
        "ci": [finite(estimate.low), finite(estimate.high)],
        "pairs": len(measured.seeds),
        "controlled": verdict.controlled,
        "records_verified": not verdict.unverified,
        "damaged": [str(folder) for folder in verdict.damaged],
        "confounders": [{"key": key, "values": values} for key, values in verdict.confounders.items()],
        "parameters": verdict.parameters,
        "tokens": verdict.tokens,
        "model": verdict.pairs[0].run.config.get("model.name"),
        "setting": family.setting,
        "baseline": verdict.factor.baseline_label,
        "margin": verdict.terms.margin,
        "token_margin": verdict.terms.token_margin,
        "confidence": verdict.terms.confidence,
        "look": verdict.stage.as_data() if verdict.stage else None,
        "late_switching": verdict.switch.as_data() if verdict.switch else None,
        "reason": reason_of(verdict),
        "loss_verdict": judged.loss,
        "loss_pairs": estimate.pairs,
        "stability": judged.stability.as_data(),
        "diverged_seeds": measured.diverged_seeds,
        "baseline_diverged_seeds": measured.baseline_diverged_seeds,
        "outlier_seeds": list(estimate.outlier_seeds),
        "missing_seeds": measured.missing_seeds,
        "baseline_learned": measured.unlearned is None,
        **_seeds_data(verdict),
        "aa_floor": verdict.floor.sd,
        "aa_pairs": verdict.floor.pairs,
        "sd": finite(estimate.sd),
        "df": finite(estimate.df),
        "pooled_with": estimate.pool - 1,
        "comparisons": estimate.comparisons,
        "identical": measured.identical,
        "may_not_have_acted": verdict.may_not_have_acted,
        "differences": [{"seed": seed, "gap": value} for seed, value in sorted(measured.differences.items())],
        "tail_steps": list(measured.tail.steps) if measured.tail else [],
        "loss": verdict.loss,
        "baseline_loss": verdict.baseline_loss,
        "gap_high_precision": verdict.gap_high_precision,
        "gap_by_source": verdict.gap_by_source,
        **verdict.cost.as_data(),
        "time_to_target": verdict.time_to_target.as_data() if verdict.time_to_target else None,
        "spike_verdict": verdict.spikes.as_data(),
        "tuned": verdict.tuned.as_data() if verdict.tuned else None,
        "emulated": verdict.emulated,
        "quantized": verdict.coverage.as_data() if verdict.coverage else None,
        "effective_data": verdict.effective_data.as_data() if verdict.effective_data else None,
        "net_speed": verdict.net_speed,
        "line": line_of(verdict),
    }


def _seeds_data(verdict: Verdict) -> dict[str, Any]:
    """Return how many more seeds would decide the verdict, and how many for each true gap that is planned for."""
    plan = verdict.plan
    return {
        "more_seeds": plan.more,
        "seeds_if_no_gap": plan.if_no_gap,
        "seeds_if_lossy": plan.if_lossy,
        "seeds_if_stable": plan.if_stable,
    }


def finite(value: float) -> float | None:
    """Return `value`, None where it is no finite number, for which JSON has no word."""
    return value if math.isfinite(value) else None


def json_ready(value: Any) -> Any:
    """Return nested data with None for every number that is not finite."""
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, Mapping):
        return {key: json_ready(each) for key, each in value.items()}
    return [json_ready(each) for each in value] if isinstance(value, list | tuple) else value


def as_json(value: Any) -> str:
    """Return `value` as JSON; what is no finite number is null, for which JSON has no other word."""
    return json.dumps(json_ready(value), indent=1, default=str, allow_nan=False)
