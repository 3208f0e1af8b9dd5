"""A verdict on one recipe in one setting, with everything that is derived from its runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_llm.compare.cost import Cost
from lightning_llm.compare.effective_data import Curve, EffectiveData, effective_data
from lightning_llm.compare.estimate import Floor, VerdictInputs
from lightning_llm.compare.format import short
from lightning_llm.compare.runs.differences import LAYOUT, ROUNDING, Switch, switch_of, validation_differences
from lightning_llm.compare.runs.factor import ITSELF, Factor
from lightning_llm.compare.runs.losses import LOSS, Tail
from lightning_llm.compare.runs.pairing import ComparisonGroup, Pair
from lightning_llm.compare.sequential_verdicts import SequentialState
from lightning_llm.compare.statistics.intervals import Decision
from lightning_llm.compare.statistics.seeds import SeedPlan
from lightning_llm.compare.statistics.stability import Spikes, judge_spikes
from lightning_llm.compare.terms import Terms
from lightning_llm.compare.time_to_target import TimeToTarget, time_to_target
from lightning_llm.compare.tuned import Tuned
from lightning_llm.config.config_hash import below
from lightning_llm.plan.resolve import coverage_of
from lightning_llm.precision.module_rules import Coverage
from lightning_llm.tracking.reading import Run

HIGH_PRECISION = "val_loss_high_precision"


@dataclass(frozen=True)
class Verdict:
    """The verdict on one recipe in one setting.

    `judged`: measured differences, interval and decisions; `family`: the group of runs that was judged together;
    `factor`: what distinguishes the recipes; `terms`: margin and confidence; `floor`: noise of runs that differ only in
    rounding; `plan`: seeds that would decide; `cost`: speed, memory and time relative to the baseline.
    """

    judged: VerdictInputs
    family: ComparisonGroup
    factor: Factor
    terms: Terms
    floor: Floor
    plan: SeedPlan
    cost: Cost
    tuned: Tuned | None = None
    """Result of the tests over the grid, for a verdict at each recipe's best value (--best-of), else None."""
    curve: Curve | None = None
    """The baseline's losses at other numbers of tokens, which convert gaps to tokens; None without such runs."""
    sequential: SequentialState | None = None
    """Progress among declared looks; None for a verdict at one look."""

    damaged: tuple[Path, ...] = ()
    """Folders of damaged runs and damaged files of sweeps: if there are any, no recipe is called lossless."""

    unbudgeted: bool = False
    """True if nothing was left of the error budget of the series, so that this look cannot decide."""

    lossy_alone: bool = False
    """True if the recipe is lossy at the whole error of its series, but not at the part that this look may use."""

    @property
    def name(self) -> str:
        """Name of the recipe, or of the level of another factor: "mxfp8", "learning_rate=0.002"."""
        return self.judged.measured.label

    @property
    def decision(self) -> Decision:
        """The combined decision on loss and stability: "lossless", "lossy" or "inconclusive"."""
        return self.judged.decision

    @property
    def interval_confidence(self) -> float:
        """Confidence of the verdict's intervals; for declared looks that of the look."""
        return self.terms.confidence if self.sequential is None else self.sequential.levels.intervals

    @property
    def pairs(self) -> list[Pair]:
        """One pair of runs per seed, including pairs with a failed run."""
        return self.judged.measured.pairs

    @cached_property
    def sound_pairs(self) -> list[Pair]:
        """The pairs in which neither run diverged: their losses and speeds can be averaged."""
        return [pair for pair in self.pairs if pair.run.seed in self.judged.measured.differences]

    @property
    def parameters(self) -> int | None:
        """Number of parameters of the model for which the verdict holds."""
        return self.pairs[0].run.parameters

    @property
    def tokens(self) -> int | None:
        """Tokens at which the losses were judged, from the baseline: a run that diverged may have ended early."""
        seen, tail = self.pairs[0].baseline.tokens, self.judged.measured.tail
        found = seen.get(tail.steps[-1]) if tail else None
        return found or max((max(pair.baseline.tokens.values(), default=0) for pair in self.pairs), default=0) or None

    @cached_property
    def confounders(self) -> dict[str, list[Any]]:
        """{key that differs within a pair, besides the factor: all its values, the baseline's first}."""
        found: dict[str, list[Any]] = {}
        for pair in self.pairs:
            for key, values in pair.confounders.items():
                for value in values:
                    if value not in found.setdefault(key, []):
                        found[key].append(value)
        return dict(sorted(found.items()))

    @cached_property
    def switch(self) -> Switch | None:
        """The steps at which the runs branched off their parent runs, which limits the verdict; None for whole runs."""
        return switch_of([run for pair in self.pairs for run in (pair.run, pair.baseline)])

    @property
    def controlled(self) -> bool:
        """True if only the factor differs within the pairs."""
        return not self.confounders

    @cached_property
    def unverified(self) -> list[Run]:
        """The runs of the pairs, both recipe's and baseline's, with records that could not be verified."""
        runs = {id(run): run for pair in self.pairs for run in (pair.baseline, pair.run)}
        return [run for run in runs.values() if run.unverified]

    @property
    def logged_on(self) -> str:
        """The axis of curves that another trainer logged; "" for runs of this program."""
        return self.pairs[0].run.logged_on

    @property
    def scale(self) -> str:
        """The scale of the runs as text: "1.24B parameters, 20B tokens", or the end of another trainer's log."""
        tail = self.judged.measured.tail
        if not self.logged_on:
            return f"{short(self.parameters)} parameters, {short(self.tokens)} tokens"
        end = f"{tail.steps[-1]:,} {self.logged_on}" if tail else f"an unknown number of {self.logged_on}"
        return f"{end}, {short(self.tokens)} tokens" if self.tokens and self.logged_on != "tokens" else end

    @property
    def may_not_have_acted(self) -> bool:
        """True if the runs are bitwise equal to the baseline's although the factor changes more than the order of sums.

        Layouts and rounding variants are meant to be bitwise equal; a recipe that is may not have been applied at all.
        """
        rounding = self.factor.name == ITSELF or all(below(key, (*LAYOUT, *ROUNDING)) for key in self.factor.keys)
        return self.judged.measured.identical and not rounding and self.factor.name != "parallel"

    @property
    def worse(self) -> bool:
        """True for an inconclusive verdict with an interval above 0: worse, but perhaps by less than the margin."""
        return self.decision == "inconclusive" and not self.judged.measured.unlearned and self.judged.estimate.low > 0

    @property
    def open_because(self) -> str | None:
        """The reason why the verdict is inconclusive, in a few words; None if it is not."""
        judged = self.judged
        measured, pairs = judged.measured, judged.estimate.pairs
        if self.decision != "inconclusive":
            return None
        if measured.unlearned:
            return "the baseline has not learned"
        if self.damaged:
            return "damaged runs"
        if self.unbudgeted:
            return "error budget spent"
        if self.lossy_alone:
            return "lossy at the whole error of the series"
        if self.tuned is not None and self.tuned.withheld:
            return f"{self.tuned.withheld} at the chosen values alone"
        if self.sequential is not None and self.sequential.look is None:
            return "before the first look"
        if judged.loss == "lossless":
            return "seeds missing" if judged.stability.allows_lossless else "failed seeds"
        if pairs <= 1:
            return "one pair" if pairs else "no pair left"
        return "worse; by more than the margin: open" if self.worse else "the interval holds the margin"

    @property
    def qualified(self) -> str:
        """The decision in a few words, with its qualifications: for tables and tags."""
        parts: list[str] = [self.decision]
        if reason := self.open_because:
            parts.append(reason)
        if self.judged.stability.verdict == "unstable":
            parts.append("unstable")
        if self.may_not_have_acted:
            parts.append("may not have acted")
        if not self.controlled:
            parts.append("not controlled")
        if self.switch:
            parts.append("late switching")
        if self.unverified:
            parts.append("settings not verified" if self.logged_on else "records not verified")
        return f"{parts[0]} ({', '.join(parts[1:])})" if len(parts) > 1 else parts[0]

    @property
    def colour(self) -> Decision:
        """The decision by which the verdict is colored: "inconclusive" for lossless with a qualification."""
        clean = self.controlled and not self.may_not_have_acted and not self.unverified
        return "inconclusive" if self.decision == "lossless" and not clean else self.decision

    @property
    def emulated(self) -> bool:
        """True if the recipe's casts were emulated, so its speed is not that of the number format."""
        return any(
            run.summary.get("backend") == "emulated" or (run.typed is not None and run.typed.precision.quantizes)
            for run in (pair.run for pair in self.pairs)
            if run.summary.get("backend") != "native"
        )

    @cached_property
    def coverage(self) -> Coverage | None:
        """Numbers of linear layers and blocks that the recipe quantizes; None for none or an incomplete config."""
        return _coverage(self.pairs[0].run)

    @cached_property
    def baseline_coverage(self) -> Coverage | None:
        """Numbers of linear layers and blocks that the baseline quantizes; None as for `coverage`."""
        return _coverage(self.pairs[0].baseline)

    @cached_property
    def effective_data(self) -> EffectiveData | None:
        """Number of baseline tokens that the recipe's tokens are worth; None without baseline runs of other lengths."""
        tail = self.judged.measured.tail
        if self.curve is None or tail is None or self.judged.measured.unlearned:
            return None
        out = self.judged.estimate.outlier_seeds
        losses = {pair.run.seed: tail.of(pair.run) for pair in self.sound_pairs if pair.run.seed not in out}
        return effective_data(losses, self.curve, self.interval_confidence)

    @property
    def net_speed(self) -> float | None:
        """Speedup of training to equal loss: speed ratio times the worth of the recipe's tokens; None if not known.

        None for emulated runs, and if the two ran under different conditions (`Cost.speed_confounders`), so that their
        speeds are not comparable.
        """
        worth, speed = self.effective_data, self.cost.tokens_per_second_ratio
        if worth is None or speed is None or self.emulated or self.cost.speed_confounders:
            return None
        return speed * worth.ratio if math.isfinite(worth.ratio) else None

    @property
    def loss(self) -> float | None:
        """Mean loss of the recipe's runs over the tail, nats per token; None without a pair of sound runs."""
        return self._mean([pair.run for pair in self.sound_pairs])

    @property
    def baseline_loss(self) -> float | None:
        """Mean loss of the baseline's runs of the same seeds over the tail, nats per token; None as for `loss`."""
        return self._mean([pair.baseline for pair in self.sound_pairs])

    def _mean(self, runs: list[Run]) -> float | None:
        tail = self.judged.measured.tail
        return math.fsum(tail.level_of(run) for run in runs) / len(runs) if tail and runs else None

    @cached_property
    def time_to_target(self) -> TimeToTarget | None:
        """Time to `Terms.targets`, censored on both sides; None if this setting has no target."""
        target = self.terms.targets.of(self.family.text)
        if target is None:
            return None
        tail = self.judged.measured.tail
        higher = bool(tail and tail.higher_is_better)
        return time_to_target(self.pairs, self.terms.metric, target, self.interval_confidence, higher_is_better=higher)

    @cached_property
    def spikes(self) -> Spikes:
        """The verdict on spikes, over the pairs in which neither run diverged."""
        counts = {pair.run.seed: (pair.run.spikes, pair.baseline.spikes) for pair in self.sound_pairs}
        steps = max((pair.baseline.last_step for pair in self.sound_pairs), default=0)
        error = 1 - self.terms.confidence if self.sequential is None else self.sequential.levels.failures
        return judge_spikes(counts, steps, max(1, len(self.family.recipes)), self.terms.confidence, error)

    @cached_property
    def gap_high_precision(self) -> float | None:
        """The gap of the same weights validated without casts, nats per token; None if not measured."""
        tail = self.judged.measured.tail
        return None if tail is None else high_precision_gap(self.sound_pairs, tail)

    @cached_property
    def gap_by_source(self) -> dict[str, float]:
        """{validation source: mean gap, nats per token} of the sources that all runs scored on the same text."""
        tail = self.judged.measured.tail
        return {} if tail is None else gaps_by_source(self.sound_pairs, tail)


def _coverage(run: Run) -> Coverage | None:
    return coverage_of(run.typed) if run.typed is not None else None


def high_precision_gap(pairs: Sequence[Pair], tail: Tail) -> float | None:
    """Return the mean gap over `tail` with both weights validated without casts, nats per token.

    None if the recipe quantizes nothing or the metric is not the loss. A baseline without casts has only one loss,
    which is used.
    """
    if not (tail.metric == LOSS or tail.metric.startswith(f"{LOSS}/")):
        return None
    high = Tail(tail.metric.replace(LOSS, HIGH_PRECISION, 1), tail.steps)
    if any(set(high.steps) - set(pair.run.validations.get(high.metric, {})) for pair in pairs):
        return None
    base = [high if high.metric in pair.baseline.validations else tail for pair in pairs]
    gaps = [high.of(pair.run) - own.of(pair.baseline) for pair, own in zip(pairs, base, strict=True)]
    return math.fsum(gaps) / len(gaps) if gaps else None


def gaps_by_source(pairs: Sequence[Pair], tail: Tail) -> dict[str, float]:
    """Return {validation source: mean gap over `tail`, nats per token}.

    Of the sources that all runs scored, and both runs of each pair on the same text.
    """
    if not pairs:
        return {}
    keys = set.intersection(*(set(run.validations) for pair in pairs for run in (pair.run, pair.baseline)))
    found = {}
    for key in sorted(key for key in keys if key.startswith(f"{LOSS}/")):
        if any(validation_differences(pair.baseline, pair.run, key) for pair in pairs):
            continue
        own = Tail(key, tail.steps)
        value = math.fsum(own.of(pair.run) - own.of(pair.baseline) for pair in pairs) / len(pairs)
        if math.isfinite(value):
            found[key.removeprefix(f"{LOSS}/")] = value
    return found
