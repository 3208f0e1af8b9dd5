"""Notes on verdicts over logs of other trainers: not verified settings, pairing, and the noise of replicates."""

import math
from collections.abc import Sequence
from statistics import stdev

from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.curves.curve import LoggedCurve
from lightning_llm.compare.format import count, nats
from lightning_llm.compare.statistics.seeds import MOST_SEEDS, seeds_needed
from lightning_llm.compare.verdict import Verdict
from lightning_llm.compare.verdict_text import notes_on_scope

VALIDATED = "the text of validations"
NOT_VERIFIED = (
    "the data and their order",
    VALIDATED,
    "the code and its version",
    "initial weights",
    "the parallel layout and the machine",
    "learning rate, schedule and batch size",
    "whether values were averaged or smoothed before they were logged",
)
"""Facts that the records of the project's own runs show, and logs of other trainers do not."""


def not_verified(curves: Sequence[LoggedCurve]) -> list[str]:
    """Return the facts that the logs do not show."""
    return [each for each in NOT_VERIFIED if each != VALIDATED or curves[0].loss.kind == "validation"]


def notes_on_logs(comparison: Comparison, curves: Sequence[LoggedCurve], method: str, unpaired: int) -> list[str]:
    """Return the notes; `method`: how the curves were put on one axis; `unpaired`: runs left out without a partner."""
    notes = [f"Settings not verified. The logs do not show: {'; '.join(comparison.not_verified)}.", method]
    if all(curve.log.seed is None for curve in curves):
        left_out = f" {count(unpaired, 'run')} without a partner left out." if unpaired else ""
        notes.append(
            "Seeds are not known, so runs are paired in the order of their names, as independent replicates. Pairs "
            f"of one seed have less noise: name logs ARM/SEED=PATH.{left_out}"
        )
    for verdict in comparison.verdicts:
        notes += [note for note in (_on_replicates(verdict, comparison), _on_better(verdict)) if note]
    return notes + notes_on_scope(comparison.factor, comparison.verdicts)


def _on_replicates(verdict: Verdict, comparison: Comparison) -> str:
    """Return how many pairs would decide a single pair, by the noise of the arms' own replicates."""
    estimate, tail = verdict.judged.estimate, verdict.judged.measured.tail
    if estimate.pairs != 1 or tail is None:
        return ""
    for arm in (comparison.factor.baseline_label, verdict.name):
        losses = [tail.of(run) for run in comparison.runs if comparison.factor.label(run) == arm and not run.diverged]
        losses = [loss for loss in losses if math.isfinite(loss)]
        if len(losses) < 2:
            continue
        sd = math.sqrt(2) * stdev(losses)
        needed = seeds_needed(0.0, sd, verdict.terms.margin, confidence=verdict.terms.confidence, df=len(losses) - 1)
        place = "inside" if abs(estimate.gap) < 2 * sd else "outside"
        decide = f"about {needed}" if needed else f"more than {MOST_SEEDS}"
        return (
            f"{verdict.name}: the gap of one pair, {nats(estimate.gap, signed=True)}, is {place} twice the SD of the "
            f"difference of two of {arm}'s {len(losses)} runs, {nats(sd)}. If the true gap is 0, {decide} pairs would "
            "decide."
        )
    return ""


def _on_better(verdict: Verdict) -> str:
    """Return a note on an arm that is better than the baseline by more than the margin: labels may be exchanged."""
    if not verdict.judged.estimate.gap < -verdict.terms.margin:
        return ""
    return (
        f"{verdict.name} is better than {verdict.factor.baseline_label} by more than the margin. Check that their "
        "labels are not exchanged and that both have the same data and schedule."
    )
