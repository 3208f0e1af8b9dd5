"""A whole comparison: the verdicts, the figures of the baselines, and the runs that could not be used, with reasons."""

import math
from dataclasses import asdict, dataclass, field
from functools import cached_property
from statistics import fmean, median
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.compare.best_value import Selection
from lightning_llm.compare.error_budget import Spending
from lightning_llm.compare.estimate import Floor
from lightning_llm.compare.format import finite
from lightning_llm.compare.looks import Design
from lightning_llm.compare.recorded_looks import RecordedLook
from lightning_llm.compare.report.methods import Methods, methods_of
from lightning_llm.compare.report.study import Study
from lightning_llm.compare.requirement import Requirement, requirement_of
from lightning_llm.compare.runs.factor import Factor
from lightning_llm.compare.runs.losses import tail_of
from lightning_llm.compare.runs.pairing import ComparisonGroup
from lightning_llm.compare.statistics.all_pairs import PairGap
from lightning_llm.compare.statistics.paired_curves import paired_curves
from lightning_llm.compare.statistics.seeds import Advice
from lightning_llm.compare.terms import Terms
from lightning_llm.compare.verdict import Verdict
from lightning_llm.compare.verdict_text import line_of, reason_of
from lightning_llm.tracking.reading import Run

SCHEMA_VERSION = 1
"""Version of `compare.json`: increases when a field changes its meaning or is removed, not when one is added."""


@dataclass(frozen=True)
class Baseline:
    """The runs of the baseline in one setting, and their figures. `label`: name of the baseline, such as "bf16"."""

    label: str
    family: ComparisonGroup
    terms: Terms

    @cached_property
    def runs(self) -> list[Run]:
        """Every run that a recipe is paired with, once."""
        pairs = [pair for pairs in self.family.recipes.values() for pair in pairs]
        return list({id(pair.baseline): pair.baseline for pair in pairs}.values())

    @cached_property
    def losses(self) -> dict[int, float]:
        """{seed: mean loss over the tail, nats per token} of the runs that did not diverge."""
        kept = [run for run in self.runs if not run.diverged]
        tail = tail_of(kept, self.terms.metric, self.terms.tail_share)
        found = {run.seed: tail.level_of(run) for run in kept} if tail else {}
        return {seed: loss for seed, loss in found.items() if math.isfinite(loss)}

    @property
    def loss(self) -> float | None:
        """Mean of `losses` over the seeds, nats per token; None without a loss."""
        return fmean(self.losses.values()) if self.losses else None

    @property
    def tokens_per_second(self) -> float | None:
        """Median speed of the runs, tokens per second; None if no run recorded it."""
        found = [value for run in self.runs if (value := run.figure("tokens_per_second_median"))]
        return median(found) if found else None

    @property
    def peak_memory_bytes(self) -> float | None:
        """Largest peak memory of a run in bytes; None if no run recorded it."""
        return max((run.peak_memory_bytes for run in self.runs if run.peak_memory_bytes), default=None)

    def as_data(self) -> dict[str, Any]:
        """Return one entry of "baselines" in `compare.json`."""
        return {
            "name": self.label,
            "setting": self.family.setting,
            "seeds": sorted(run.seed for run in self.runs),
            "loss": self.loss,
            "losses": [{"seed": seed, "loss": loss} for seed, loss in sorted(self.losses.items())],
            "tokens_per_second": self.tokens_per_second,
            "peak_memory_bytes": self.peak_memory_bytes,
            "spikes": sum(run.spikes for run in self.runs),
            "skipped_steps": sum(run.skipped_steps for run in self.runs),
        }


@dataclass
class Comparison:
    """Verdicts over `runs`: one per recipe and setting.

    `factor`: what distinguishes the recipes; `families`: groups of runs that are judged together; `floors`: per group,
    the noise of runs that differ only in rounding; `problems`: arguments and runs that could not be used; `notes`: on
    the verdicts; `advice`: the command that adds deciding seeds; `looks`: all looks at these runs; `selection`: values
    chosen by --best-of; `design`: declared looks.
    """

    factor: Factor
    terms: Terms
    runs: list[Run]
    families: list[ComparisonGroup] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    floors: list[tuple[ComparisonGroup, Floor]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    advice: Advice | None = None
    looks: list[RecordedLook] = field(default_factory=list)
    selection: Selection | None = None
    all_pairs: list[PairGap] = field(default_factory=list)
    """Gaps of every recipe to every other; empty unless requested (--all-pairs)."""
    design: Design | None = None
    required: str | None = None
    """The verdict that is required of every arm (--require)."""
    spending: Spending | None = None
    """The part of its series' error budget that this look used; None without --require or with declared looks."""
    ladder: bool = False
    """True if a law over sizes and tokens was fitted, which the methods then describe."""
    logs: list[dict[str, Any]] = field(default_factory=list)
    """Facts about each log, if the runs are logs of another trainer; empty for runs of this program."""
    not_verified: list[str] = field(default_factory=list)
    """Facts about such runs that their logs do not show."""

    @property
    def baselines(self) -> list[Baseline]:
        """The baseline in each setting."""
        return [Baseline(self.factor.baseline_label, family, self.terms) for family in self.families]

    def verdicts_of(self, family: ComparisonGroup) -> list[Verdict]:
        """Return the verdicts on the recipes of one group."""
        return [verdict for verdict in self.verdicts if verdict.family is family]

    def require(self, required: str) -> Requirement:
        """Return whether every recipe has the `required` verdict, "lossless" or "not-lossy".

        The result is true if all have it, and states the outcome for each recipe.

        Raises:
            ConfigError: `required` is another word.
        """
        return requirement_of(required, self.verdicts)

    @property
    def requirement(self) -> Requirement | None:
        """The requirement that was given to `compare` (require=, --require); None without one."""
        return None if self.required is None else self.require(self.required)

    @property
    def methods(self) -> Methods:
        """The methods section of the report, with its references."""
        chosen, looks = self.selection, self.looks
        return methods_of(
            Study(
                self.factor, self.terms, self.families, self.verdicts, chosen, looks, self.design,
                bool(self.all_pairs), self.ladder,
            )
        )  # fmt: skip

    def as_data(self) -> dict[str, Any]:
        """Return the content of `compare.json`. Entries that do not apply are null.

        - `schema_version`: version of the JSON Schema.
        - `factor`, `baseline`, `margin`, `token_margin`, `confidence`, `metric`: the comparison and its terms.
        - `verdicts`: one per arm and setting.
        - `baselines`: loss, speed and memory of the baseline in each setting.
        - `aa`: noise floors, from runs of one recipe and seed that differ in rounding only.
        - `all_pairs`: `recipe`, `other`, `setting`, `verdict`, `gap`, `ci`, `pairs`, `controlled`; with `--all-pairs`.
        - `selection`: the values chosen by `--best-of`.
        - `advice`: `command`, `more_seeds`, `decides`: the runs that would decide.
        - `looks`, `sequential`: recorded looks; the design of declared looks.
        - `require`: with `--require`, `required`, `met`, `exit_code`, `arms`, `error_budget`.
        - `problems`, `notes`: what could not be used, as `key` and `text`; remarks.
        - `methods`, `references`: the methods text, and the works that it cites.
        - `runs`: `folder`, `level`, `seed`, `status`, `mlflow_run_id`, `records_verified`.
        """
        methods = self.methods
        curves = {
            id(verdict): curve.as_data()
            for family in self.families
            for verdict, curve in zip(self.verdicts_of(family), paired_curves(self.verdicts_of(family)), strict=True)
        }
        return {
            "schema_version": SCHEMA_VERSION,
            "factor": self.factor.name,
            "baseline": self.factor.baseline_label,
            "margin": finite(self.terms.margin),
            "token_margin": self.terms.token_margin,
            "confidence": self.terms.confidence,
            "metric": self.terms.metric,
            "verdicts": [{**verdict_data(verdict), "curve": curves[id(verdict)]} for verdict in self.verdicts],
            "baselines": [baseline.as_data() for baseline in self.baselines],
            "aa": [floor.as_data(family) for family, floor in self.floors],
            "all_pairs": [each.as_data() for each in self.all_pairs],
            "selection": self.selection.as_data() if self.selection else None,
            "advice": self.advice.as_data() if self.advice else None,
            "looks": [asdict(look) for look in self.looks],
            "sequential": self.design.as_data() if self.design else None,
            "require": self._requirement_data(),
            "logs": self.logs,
            "not_verified": self.not_verified,
            "problems": [{"key": each.key, "text": each.text} for each in self.problems],
            "notes": self.notes,
            "methods": methods.texts,
            "references": {reference.key: reference.text for reference in methods.references},
            "runs": [
                {
                    "folder": str(run.folder),
                    "level": self.factor.label(run),
                    "seed": run.seed,
                    "status": run.status,
                    "mlflow_run_id": run.summary.get("mlflow_run_id"),
                    "records_verified": not run.unverified,
                }
                for run in self.runs
            ],
        }

    def _requirement_data(self) -> dict[str, Any] | None:
        """Return the entry "require" of `compare.json`; exit code 2 if not all runs could be judged."""
        if self.requirement is None:
            return None
        data = self.requirement.as_data()
        data |= {"met": data["met"] and not self.problems, "exit_code": 2 if self.problems else data["exit_code"]}
        return {**data, "error_budget": self.spending.as_data() if self.spending else None}


class IncompleteComparisonError(ConfigError):
    """Some of the named runs could not be judged. `problems`: the reasons; `comparison`: the verdicts on the others."""

    def __init__(self, comparison: Comparison):
        self.comparison = comparison
        super().__init__(comparison.problems)

    def __reduce__(self) -> tuple[type["IncompleteComparisonError"], tuple[Any]]:
        return type(self), (self.comparison,)


def verdict_data(verdict: Verdict) -> dict[str, Any]:
    """Return one entry of "verdicts" in `compare.json`, in the order of the file.

    - `name`, `verdict`, `qualified`, `line`, `reason`: the arm; lossless, lossy or inconclusive; the same with its
      qualification; the sentence that `compare` prints; the qualification in words.
    - `gap`, `ci`, `loss_pairs`, `differences`: mean difference in nats per token of the pairs that did not fail, its
      interval [low, high], their number; the difference of each seed.
    - `pairs`, `controlled`, `confounders`: number of pairs; true if only the factor differs; the other differing keys,
      with the baseline's value first.
    - `records_verified`, `damaged`: true if all its runs were verified; damaged folders and files.
    - `parameters`, `tokens`, `model`, `setting`, `baseline`, `margin`, `token_margin`, `confidence`: scope of the
      verdict.
    - `look`: among declared looks, `number`, `of`, `seeds`, `interval_confidence`, `settled`, `next_seeds`,
      `waits_for`.
    - `late_switching`: of branches, `steps`, `max_steps`, `trunks` (parent runs), `seeds`, `holds_for`.
    - `loss_verdict`, `loss`, `baseline_loss`, `tail_steps`: verdict by the interval alone; losses over the tail, and
      its steps.
    - `gap_high_precision`, `gap_by_source`: the gap of validation without casts, and of each source.
    - `stability`: `verdict`, `seeds`, `failed_seeds`, `baseline_failed_seeds`, `rate_ci`, `rate_upper_bound`,
      `baseline_rate_ci`, `discordant` (seeds at which only the arm, only the baseline failed), `p`, `level`.
    - `diverged_seeds`, `baseline_diverged_seeds`, `outlier_seeds`, `missing_seeds`, `baseline_learned`: seeds that were
      lost, by cause; false if the baseline has not learned.
    - `more_seeds`, `seeds_if_no_gap`, `seeds_if_lossy`, `seeds_if_stable`: seeds to add if the true gap is 0; seeds in
      all if it is 0, if it is three margins, to show stability. Null if none are needed or more than 999.
    - `sd`, `df`, `pooled_with`, `comparisons`: SD of a pair's difference, its degrees of freedom, number of arms that
      share the pooled variance, number of joint intervals.
    - `aa_floor`, `aa_pairs`, `identical`, `may_not_have_acted`: noise floor and its pairs; true if all pairs are equal
      to the last bit, and if they should not be.
    - `curve`: `steps`, `tokens`, `gap`, `low`, `high` at each common validation, with pointwise intervals.
    - `time_to_loss`: `pairs`, `tokens_ratio`, `seconds_ratio` to a loss that both runs reached.
    - `time_to_target`: `target`, `arrived`, `baseline_arrived`, medians `tokens` and `baseline_tokens`,
      `tokens_ratio_bounds`, `slower`, `faster`, `p`, `tokens_ratio_ci`.
    - `spike_verdict`: `verdict`, `counts` by seed, `spiked_runs`, `discordant`, `p_runs`, `p_counts`, `level`.
    - `tuned`: with `--best-of`, `value`, `baseline_value`, the decision `withheld`, `because`, `unjudged`.
    - `tokens_per_second`, `tokens_per_second_ratio`, `peak_memory_bytes`, `peak_memory_ratio`, `spikes`,
      `skipped_steps`, `speed_confounders`, `emulated`: cost; differences that make speeds incomparable; true if
      the speed is not the format's own.
    - `quantized`: `linears` of `all_linears`, `blocks` of `all_blocks`; `shortfall`, the layers that the recipe's
      source keeps unquantized and this model does not.
    - `effective_data`, `net_speed`: the gap in tokens (`ratio`, `ci`, `more_tokens`, `more_tokens_ci`, `seeds`); the
      baseline's time to the arm's loss over the arm's time.
    """
    measured, estimate = verdict.judged.measured, verdict.judged.estimate
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
        **_scope_data(verdict),
        **_cause_data(verdict),
        **_seeds_data(verdict),
        **_estimate_data(verdict),
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


def _scope_data(verdict: Verdict) -> dict[str, Any]:
    """Return the scope of the verdict: model, setting, terms and declared look."""
    return {
        "parameters": verdict.parameters,
        "tokens": verdict.tokens,
        "model": verdict.pairs[0].run.config.get("model.name"),
        "setting": verdict.family.setting,
        "baseline": verdict.factor.baseline_label,
        "margin": verdict.terms.margin,
        "token_margin": verdict.terms.token_margin,
        "confidence": verdict.terms.confidence,
        "look": verdict.sequential.as_data() if verdict.sequential else None,
        "late_switching": verdict.switch.as_data() if verdict.switch else None,
    }


def _cause_data(verdict: Verdict) -> dict[str, Any]:
    """Return the verdicts that make up the verdict, and the seeds that were lost."""
    judged, measured, estimate = verdict.judged, verdict.judged.measured, verdict.judged.estimate
    return {
        "reason": reason_of(verdict),
        "loss_verdict": judged.loss,
        "loss_pairs": estimate.pairs,
        "stability": judged.stability.as_data(),
        "diverged_seeds": measured.diverged_seeds,
        "baseline_diverged_seeds": measured.baseline_diverged_seeds,
        "outlier_seeds": list(estimate.outlier_seeds),
        "missing_seeds": measured.missing_seeds,
        "baseline_learned": measured.unlearned is None,
    }


def _estimate_data(verdict: Verdict) -> dict[str, Any]:
    """Return the noise floor, the spread of pairs, and the difference of each seed."""
    measured, estimate = verdict.judged.measured, verdict.judged.estimate
    return {
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
    }


def _seeds_data(verdict: Verdict) -> dict[str, Any]:
    """Return the number of further seeds that would decide the verdict, for each planned true gap."""
    plan = verdict.plan
    return {
        "more_seeds": plan.more,
        "seeds_if_no_gap": plan.if_no_gap,
        "seeds_if_lossy": plan.if_lossy,
        "seeds_if_stable": plan.if_stable,
    }
