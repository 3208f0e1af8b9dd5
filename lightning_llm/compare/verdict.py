"""A verdict: one per recipe and setting, and what it rests on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_llm.compare.cost import Cost
from lightning_llm.compare.effective_data import Curve, EffectiveData, effective_data
from lightning_llm.compare.estimate import Floor, VerdictInputs
from lightning_llm.compare.runs.branches import Switch, switch_of
from lightning_llm.compare.runs.differences import LAYOUT, ROUNDING, validation_differences
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
from lightning_llm.precision.recipe.module_rules import Coverage
from lightning_llm.tracking.reading import Run

HIGH_PRECISION = "val_loss_high_precision"


@dataclass(frozen=True)
class Verdict:
    """The verdict on one recipe in one setting. Everything else about it follows from these."""

    judged: VerdictInputs
    family: ComparisonGroup
    factor: Factor
    terms: Terms
    floor: Floor
    plan: SeedPlan
    cost: Cost
    tuned: Tuned | None = None
    """What the grid says, of a verdict at each one's best value (--best-of)."""
    curve: Curve | None = None
    sequential: SequentialState | None = None
    """Where it stands among declared looks; None of a verdict at one look."""

    damaged: tuple[Path, ...] = ()
    """Folders of damaged runs, and damaged files of sweeps, because of which it is not called lossless."""

    @property
    def name(self) -> str:
        """The recipe, or whatever level of the factor it is."""
        return self.judged.measured.label

    @property
    def decision(self) -> Decision:
        """Lossless, lossy or inconclusive."""
        return self.judged.decision

    @property
    def interval_confidence(self) -> float:
        """Of the verdict's own interval and those beside it: of declared looks what that look's are taken at."""
        return self.terms.confidence if self.sequential is None else self.sequential.levels.intervals

    @property
    def pairs(self) -> list[Pair]:
        """One per seed, those that failed included."""
        return self.judged.measured.pairs

    @cached_property
    def sound_pairs(self) -> list[Pair]:
        """The pairs of which neither run diverged: those whose losses and speeds can be averaged."""
        return [pair for pair in self.pairs if pair.run.seed in self.judged.measured.differences]

    @property
    def parameters(self) -> int | None:
        """Of the model, at which the verdict holds."""
        return self.pairs[0].run.parameters

    @property
    def tokens(self) -> int | None:
        """The tokens that the judged losses are after, by the baseline: a run that diverged may have ended early."""
        seen, tail = self.pairs[0].baseline.tokens, self.judged.measured.tail
        found = seen.get(tail.steps[-1]) if tail else None
        return found or max((max(pair.baseline.tokens.values(), default=0) for pair in self.pairs), default=0) or None

    @cached_property
    def confounders(self) -> dict[str, list[Any]]:
        """Each key that differs within any pair beside the factor, with all values met, the baseline's first."""
        found: dict[str, list[Any]] = {}
        for pair in self.pairs:
            for key, values in pair.confounders.items():
                for value in values:
                    if value not in found.setdefault(key, []):
                        found[key].append(value)
        return dict(sorted(found.items()))

    @cached_property
    def switch(self) -> Switch | None:
        """Where the runs branched off their trunks, which is all that the verdict holds for; None of whole runs."""
        return switch_of([run for pair in self.pairs for run in (pair.run, pair.baseline)])

    @property
    def controlled(self) -> bool:
        """Whether only the factor differs."""
        return not self.confounders

    @cached_property
    def unverified(self) -> list[Run]:
        """The runs that it rests on whose records could not be verified."""
        runs = {id(run): run for pair in self.pairs for run in (pair.baseline, pair.run)}
        return [run for run in runs.values() if run.unverified]

    @property
    def may_not_have_acted(self) -> bool:
        """Whether the runs equal the baseline's to the last bit though the factor changes more than the order of sums.

        Layouts and ways to round are made to equal each other; a recipe that does may not have been applied at all.
        """
        rounding = self.factor.name == ITSELF or all(below(key, (*LAYOUT, *ROUNDING)) for key in self.factor.keys)
        return self.judged.measured.identical and not rounding and self.factor.name != "parallel"

    @property
    def worse(self) -> bool:
        """Whether the interval says that there is a gap, and not whether it is above the margin."""
        return self.decision == "inconclusive" and not self.judged.measured.unlearned and self.judged.estimate.low > 0

    @property
    def open_because(self) -> str | None:
        """What stands between the runs and a verdict, in a few words; None where there is one."""
        judged = self.judged
        measured, pairs = judged.measured, judged.estimate.pairs
        if self.decision != "inconclusive":
            return None
        if measured.unlearned:
            return "the baseline has not learned"
        if self.damaged:
            return "damaged runs"
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
        """The decision in a few words, with what keeps it from being taken at its word: for tables and tags."""
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
            parts.append("records not verified")
        return f"{parts[0]} ({', '.join(parts[1:])})" if len(parts) > 1 else parts[0]

    @property
    def colour(self) -> Decision:
        """The decision whose colour it is shown in: no green where something stands against it."""
        clean = self.controlled and not self.may_not_have_acted and not self.unverified
        return "inconclusive" if self.decision == "lossless" and not clean else self.decision

    @property
    def emulated(self) -> bool:
        """Whether the recipe ran emulated, so that its speed is none of the format's."""
        return any(
            run.summary.get("backend") == "emulated" or (run.typed is not None and run.typed.precision.quantises)
            for run in (pair.run for pair in self.pairs)
            if run.summary.get("backend") != "native"
        )

    @cached_property
    def coverage(self) -> Coverage | None:
        """Linear layers and blocks that the recipe's runs quantized; None without casts or without a whole config."""
        return _coverage(self.pairs[0].run)

    @cached_property
    def baseline_coverage(self) -> Coverage | None:
        """The same of the baseline's runs."""
        return _coverage(self.pairs[0].baseline)

    @cached_property
    def effective_data(self) -> EffectiveData | None:
        """What the recipe's tokens are worth by the baseline's; None without its runs at other numbers of tokens."""
        tail = self.judged.measured.tail
        if self.curve is None or tail is None or self.judged.measured.unlearned:
            return None
        out = self.judged.estimate.outlier_seeds
        losses = {pair.run.seed: tail.of(pair.run) for pair in self.sound_pairs if pair.run.seed not in out}
        return effective_data(losses, self.curve, self.interval_confidence)

    @property
    def net_speed(self) -> float | None:
        """Time to the baseline's loss: its over the recipe's, by speed and effective data; None of an emulation.

        None, too, where the two did not run alike: a speed that says nothing of the format is no gain to be netted.
        """
        worth, speed = self.effective_data, self.cost.tokens_per_second_ratio
        if worth is None or speed is None or self.emulated or self.cost.speed_confounders:
            return None
        return speed * worth.ratio if math.isfinite(worth.ratio) else None

    @property
    def loss(self) -> float | None:
        """Mean tail loss of the recipe's runs, nats per token."""
        return self._mean([pair.run for pair in self.sound_pairs])

    @property
    def baseline_loss(self) -> float | None:
        """Mean tail loss of the baseline's runs of the same seeds, nats per token."""
        return self._mean([pair.baseline for pair in self.sound_pairs])

    def _mean(self, runs: list[Run]) -> float | None:
        tail = self.judged.measured.tail
        return math.fsum(tail.level_of(run) for run in runs) / len(runs) if tail and runs else None

    @cached_property
    def time_to_target(self) -> TimeToTarget | None:
        """How long to `Terms.targets`, censored both ways; None where this setting has none."""
        target = self.terms.targets.of(self.family.words)
        if target is None:
            return None
        tail = self.judged.measured.tail
        higher = bool(tail and tail.higher_is_better)
        return time_to_target(self.pairs, self.terms.metric, target, self.interval_confidence, higher_is_better=higher)

    @cached_property
    def spikes(self) -> Spikes:
        """The verdict on spikes, over the pairs of which neither run diverged."""
        counts = {pair.run.seed: (pair.run.spikes, pair.baseline.spikes) for pair in self.sound_pairs}
        steps = max((pair.baseline.last_step for pair in self.sound_pairs), default=0)
        error = 1 - self.terms.confidence if self.sequential is None else self.sequential.levels.failures
        return judge_spikes(counts, steps, max(1, len(self.family.recipes)), self.terms.confidence, error)

    @cached_property
    def gap_high_precision(self) -> float | None:
        """The gap of the same weights without casts in the forward pass; None where the recipe quantises nothing."""
        tail = self.judged.measured.tail
        return None if tail is None else high_precision_gap(self.sound_pairs, tail)

    @cached_property
    def gap_by_source(self) -> dict[str, float]:
        """The mean gap on each source that all runs scored, and of which each pair scored the same."""
        tail = self.judged.measured.tail
        return {} if tail is None else gaps_by_source(self.sound_pairs, tail)


def _coverage(run: Run) -> Coverage | None:
    return coverage_of(run.typed) if run.typed is not None else None


def high_precision_gap(pairs: Sequence[Pair], tail: Tail) -> float | None:
    """Return the mean gap, nats per token, of the weights of `pairs` without casts in the forward pass, over `tail`.

    None where the recipe quantises nothing, and for another metric than the loss. A baseline that casts nothing has no
    second loss, and is taken by its own.
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
    """Return {source: mean gap over `tail`, nats per token} of those that all runs scored, and each pair alike."""
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
