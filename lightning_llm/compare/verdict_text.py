"""Verdicts as text: one line each, the reasons, and notes on the scope of verdicts."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_llm.base.terminal import shown
from lightning_llm.compare.format import count, interval_text, more_or_fewer, nats, seeds_text, short
from lightning_llm.compare.runs.differences import notes_on_branches
from lightning_llm.compare.runs.factor import Factor
from lightning_llm.compare.runs.losses import LEARNED_SHARE, LOSS
from lightning_llm.compare.runs.pairing import ComparisonGroup
from lightning_llm.compare.statistics.seeds import FEWEST_SEEDS, MOST_SEEDS, PLANNED_GAP, POWER
from lightning_llm.compare.statistics.stability import STABILITY_MARGIN, Stability, rate_interval, upper_bound
from lightning_llm.compare.time_to_target import TimeToTarget
from lightning_llm.compare.verdict import Verdict
from lightning_llm.tracking.reading import Run
from lightning_llm.tracking.sweep_file import FILE as SWEEP_FILE


def line_of(verdict: Verdict) -> str:
    """Return a verdict as one line of text, which always states model size, tokens, setting and margin."""
    where = ", ".join(filter(None, (verdict.scale, verdict.family.text, verdict.family.survived_at)))
    decided = f"{verdict.decision} against {verdict.factor.baseline_label} at margin {verdict.terms.margin_text}"
    reason = reason_of(verdict)
    name = f"{verdict.name}{verdict.coverage.suffix if verdict.coverage else ''}"
    text = f"{name} at {where}: {decided} ({', '.join(_numbers(verdict))}){f', {reason}' if reason else ''}"
    if not verdict.controlled:
        keys = list(verdict.confounders)
        more = f" and {len(keys) - 4} more" if len(keys) > 4 else ""
        text += f"; not controlled: the runs also differ in {', '.join(keys[:4])}{more}"
    if verdict.logged_on:
        text += "; settings not verified"
    elif verdict.unverified:
        runs = {id(run) for pair in verdict.pairs for run in (pair.baseline, pair.run)}
        text += f"; records not verified ({len(verdict.unverified)} of {count(len(runs), 'run')})"
    return f"{text}; {verdict.switch.text}" if verdict.switch else text


def quantized_sentences(verdicts: Sequence[Verdict]) -> list[str]:
    """Return one sentence per recipe and model on the share of the model that was quantized.

    It also names layers that the recipe's source keeps unquantized and this model does not.
    """
    found: dict[str, None] = {}
    several = len({verdict.parameters for verdict in verdicts}) > 1
    for verdict in verdicts:
        size = f" at {short(verdict.parameters)} parameters" if several else ""
        baseline = verdict.factor.baseline_label
        for name, covered in ((baseline, verdict.baseline_coverage), (verdict.name, verdict.coverage)):
            if covered is not None:
                found[f"{name}{size}: {covered.text}{f'; {covered.shortfall}' if covered.shortfall else ''}."] = None
    return list(found)


def reason_of(verdict: Verdict) -> str:
    """Return the qualifications of a verdict (failed seeds, few pairs, confounders, ...) as text; "" without any."""
    grid = verdict.tuned.text if verdict.tuned else ""
    parts = [
        _damaged(verdict),
        _unlearned(verdict),
        _failed(verdict),
        _missing(verdict),
        _unpriced(verdict),
        _identical(verdict),
    ]
    parts += [grid, _surer_in_tokens(verdict), _open(verdict)]
    return "; ".join(filter(None, parts))


def failures(stability: Stability) -> str:
    """Return the number of failed runs as text, with the failure rate that it does not exclude.

    The same for the baseline, if any of its runs failed.
    """
    baseline = ""
    if stability.baseline_failed:
        baseline = f", of the baseline's {_rate(len(stability.baseline_failed), stability)}"
    return f"{_rate(len(stability.failed), stability)}{baseline}"


def _rate(failed: int, stability: Stability) -> str:
    runs, confidence = stability.seeds, stability.confidence
    if not failed:
        return f"0 of {runs} failed: failure rate up to {100 * upper_bound(0, runs, confidence):.0f} %"
    low, high = rate_interval(failed, runs, confidence)
    return f"{failed} of {runs} failed: failure rate {100 * low:.0f} to {100 * high:.0f} %"


def _numbers(verdict: Verdict) -> list[str]:
    estimate, measured = verdict.judged.estimate, verdict.judged.measured
    numbers = []
    if estimate.pairs:
        numbers.append(f"gap {nats(estimate.gap, signed=True)}")
    if measured.identical:
        numbers.append("equal to the last bit")
    elif estimate.low == estimate.low:  # no NaN
        repeated = " repeated" if verdict.sequential else ""
        level = f"{100 * verdict.terms.confidence:g} %{repeated} CI"
        numbers.append(f"{level} {interval_text(estimate.low, estimate.high)}")
    in_all = len(measured.seeds)
    numbers.append(count(in_all, "pair") if estimate.pairs == in_all else f"{estimate.pairs} of {in_all} pairs")
    if verdict.sequential is not None:
        numbers.append(verdict.sequential.text)
    if verdict.floor.sd is not None:
        numbers.append(f"A/A floor {nats(verdict.floor.sd)}")
    numbers.append(failures(verdict.judged.stability))
    if spikes := verdict.spikes.text:
        numbers.append(spikes)
    if (time := verdict.time_to_target) is not None:
        numbers.append(_to_target(time))
    if verdict.effective_data:
        numbers.append(tokens_needed(verdict))
    return numbers


def _to_target(time: TimeToTarget) -> str:
    """Return the time to the target, and how many runs reached it if not all did."""
    if time.arrived == time.baseline_arrived == 0:
        return f"no run of its {count(time.pairs, 'pair')} reached {time.target:g}, nor any of the baseline's"
    text = f"tokens to {time.target:g}: {time.text} the baseline's"
    if time.arrived == time.baseline_arrived == time.pairs:
        return text
    return f"{text}, reached by {time.arrived} of {time.pairs}, the baseline's {time.baseline_arrived}"


def tokens_needed(verdict: Verdict) -> str:
    """Return the gap in tokens: "4.1 % more tokens [2.0, 6.5]", with the net speedup if speeds are native."""
    worth = verdict.effective_data
    if worth is None:
        return ""
    if not 0 < worth.ratio < math.inf:
        return (
            "worth fewer tokens than the baseline was run for" if not worth.ratio else "worth more than it was run for"
        )
    text = more_or_fewer(worth.more_tokens, worth.more_tokens_interval)
    net = verdict.net_speed
    return text if net is None else f"{text}, {net:.2f}x net of speed"


def _surer_in_tokens(verdict: Verdict) -> str:
    """Return why the interval in tokens excludes 0 while that of the gap contains it; empty if it does not."""
    estimate, worth = verdict.judged.estimate, verdict.effective_data
    if worth is None or estimate.comparisons < 2 or not estimate.low <= 0 <= estimate.high:
        return ""
    low, high = worth.more_tokens_interval
    if not (low > 0 or high < 0):
        return ""
    return "the interval in tokens, for this recipe alone, excludes 0; that of the gap, for all recipes, contains it"


def _damaged(verdict: Verdict) -> str:
    if not verdict.damaged:
        return ""
    sweeps = sum(folder.name == SWEEP_FILE for folder in verdict.damaged)
    runs = len(verdict.damaged) - sweeps
    found = ["another run"] if runs == 1 else [f"{runs} other runs"] if runs else []
    found += [SWEEP_FILE] if sweeps else []
    verb = "is" if len(verdict.damaged) == 1 else "are"
    return f"{' and '.join(found)} {verb} damaged, so no recipe is called lossless"


def _unlearned(verdict: Verdict) -> str:
    if verdict.judged.measured.unlearned is None:
        return ""
    loss, below = verdict.judged.measured.unlearned
    text = "the baseline has not learned"
    if verdict.logged_on:
        return (
            f"{text}: its log ends at {loss:.3f}, not below {below:.3f}, where it began less the margin and the noise"
        )
    if math.isfinite(below):
        entropy = any(pair.baseline.figure("validation_unigram_nats") == below for pair in verdict.pairs)
        source = "the frequencies of the tokens alone give" if entropy else f"{LEARNED_SHARE:g} ln(vocabulary) is"
        text += f": its best run ends at {loss:.3f} nats, where {source} {below:.3f}"
    return f"{text}. A gap cannot show yet: train longer"


def _failed(verdict: Verdict) -> str:
    """Return the failed seeds, the kind of failure, and its effect on the verdict."""
    judged = verdict.judged
    stability, outliers = judged.stability, judged.estimate.outlier_seeds
    parts = []
    if judged.measured.diverged_seeds:
        parts.append(f"diverged at {seeds_text(judged.measured.diverged_seeds)}")
    for seed in outliers:
        gap = judged.measured.differences[seed]
        whose = "" if gap > 0 else " in the recipe's favour"
        parts.append(f"seed {seed} is an outlier, {gap:+.3g} ({abs(gap) / verdict.terms.margin:.0f} margins{whose})")
    if judged.measured.baseline_diverged_seeds:
        parts.append(f"the baseline diverged at {seeds_text(judged.measured.baseline_diverged_seeds)}")
    if not parts:
        return ""
    if stability.verdict == "unstable":
        parts.append(f"unstable: it fails more often than the baseline (p = {stability.p:.2g})")
    elif judged.loss == "lossless" and not stability.allows_lossless:
        parts.append(f"so the remaining {count(judged.estimate.pairs, 'pair')} cannot make it lossless")
    return ", ".join(parts)


def _missing(verdict: Verdict) -> str:
    missing = verdict.judged.measured.missing_seeds
    if not missing or (verdict.sequential is not None and verdict.sequential.waits_for):  # which lists them
        return ""
    lead = f"{seeds_text(missing)} missing: crashed or unfinished where the baseline was not"
    spared = verdict.judged.loss == "lossless" and verdict.judged.stability.allows_lossless
    return f"{lead}, so the remaining pairs cannot make it lossless" if spared else lead


def _unpriced(verdict: Verdict) -> str:
    seeds = verdict.judged.measured.unpriced_seeds
    why = "the baseline has no usable runs of other lengths there, which the margin in tokens needs"
    return f"{seeds_text(seeds)} left out: {why}" if seeds else ""


def _identical(verdict: Verdict) -> str:
    if not verdict.may_not_have_acted:
        return ""
    return "every loss equals the baseline's to the last bit: the recipe may not have acted at all; check it with plan"


def _open(verdict: Verdict) -> str:
    """Return the effect of more seeds, for planned true gaps: the observed gap is noise."""
    judged, plan = verdict.judged, verdict.plan
    if verdict.decision != "inconclusive" or judged.measured.unlearned or judged.measured.identical or verdict.damaged:
        return ""
    if verdict.unbudgeted or (verdict.tuned is not None and verdict.tuned.withheld):
        return ""
    if verdict.sequential is not None:
        worse = "worse; by more than the margin: " if verdict.worse else ""
        return worse + verdict.sequential.what_next
    if judged.loss == "lossless":
        if plan.if_stable is None:
            return ""
        more = count(plan.more or 1, "more seed")
        return f"{more} without another failure would show a failure rate below {100 * STABILITY_MARGIN:g} %"
    if not judged.estimate.pairs:
        return "no pair is left to compare"
    if judged.estimate.pairs == 1:
        return f"one pair shows no spread: at least {count(plan.more or 1, 'more seed')} ({FEWEST_SEEDS} pairs in all)"
    worse = "worse; by more than the margin: open; " if verdict.worse else ""
    return worse + _seed_plan(verdict)


def _seed_plan(verdict: Verdict) -> str:
    plan, pairs = verdict.plan, verdict.judged.estimate.pairs
    if plan.if_no_gap is None:
        text = f"more than {MOST_SEEDS} seeds would be needed to decide if the true gap is 0"
        return text if plan.if_lossy is None else f"{text}, about {plan.if_lossy} if it is {PLANNED_GAP} margins"
    if plan.more is None:
        power = f"{count(pairs, 'seed')} would mostly have shown a gap of 0 or of {PLANNED_GAP} margins"
        return f"the gap is likely near the margin, and more seeds would hardly decide: {power}"
    return (
        f"about {count(plan.more, 'more seed')} ({pairs + plan.more} in all) would decide if the true gap is 0, "
        f"{plan.if_lossy} in all if it is {PLANNED_GAP} margins"
    )


def power_statement() -> str:
    """Return the sentence of reports that states the assumptions behind "N more seeds would decide"."""
    return (
        f"'N more seeds would decide': with a probability of at least {100 * POWER:.0f} % if the true gap is the one "
        "named, averaged over the possible true spreads given the one estimated here. A spread from few pairs is "
        "uncertain by a factor of about two, and N is proportional to its square."
    )


def notes_on(
    factor: Factor, families: Sequence[ComparisonGroup], verdicts: Sequence[Verdict], damaged: Sequence[Path] = ()
) -> list[str]:
    """Return the notes on verdicts over runs of this program, one or two sentences each.

    `damaged`: folders of damaged runs.
    """
    notes = notes_on_scope(factor, verdicts)
    runs = list({id(run): run for family in families for run in family.runs}.values())
    notes += [*_on_records(runs, damaged), *_on_middles(runs)]
    if any((run.summary.get("git") or {}).get("dirty") and "code_hash" not in run.summary for run in runs):
        notes.append("Some runs used a modified checkout (git dirty): whether they ran the same code is not recorded.")
    if unnamed := [run for run in runs if run.summary.get("data_hash") is None]:
        notes.append(
            f"Some runs have no hash of their data ({_named(unnamed)}), so only their configs show it was the same."
        )
    notes += [
        f"{run.name} was resumed from another folder at step {run.first_step}: its earlier tokens to loss, spikes and "
        "skipped steps are unknown."
        for run in runs
        if run.first_step > 1 and not run.branch
    ]
    notes += notes_on_branches(runs)
    notes += _short_tails(verdicts)
    if keys := sorted({key for each in verdicts for key in each.cost.speed_confounders}):
        notes.append(f"Speed and memory are not comparable: the runs differ in {', '.join(keys)}.")
    at_once = sorted({run.at_once for run in runs} - {1})
    if at_once:
        notes.append(
            f"Speed, seconds to loss and memory are of runs that shared the machine, {' or '.join(map(str, at_once))} "
            "at once (launcher.at_once); they differ from those of a run alone."
        )
    notes += quantized_sentences(verdicts)
    emulated = [each.name for each in verdicts if each.emulated]
    if emulated:
        notes.append(f"Emulated, so their speed is not that of the format: {', '.join(dict.fromkeys(emulated))}.")
    return notes


def notes_on_scope(factor: Factor, verdicts: Sequence[Verdict]) -> list[str]:
    """Return the notes that apply to all verdicts, also to those over logs of other trainers."""
    notes = [factor.note] if factor.note else []
    notes.append(
        "A verdict holds at its model size and number of tokens. It can rule a recipe out; lossless here does not "
        "imply lossless for larger models or longer runs, where damage may grow: compare the gap at several of both."
    )
    if any(each.plan.if_no_gap and each.plan.more for each in verdicts):
        notes.append(power_statement())
    if any(each.judged.estimate.comparisons > 1 for each in verdicts):
        notes.append("The intervals of recipes that share a baseline are simultaneous (Dunnett).")
    return notes


MOST_NAMED = 6
"""Maximum number of runs listed in a note."""


def _named(runs: Iterable[Run]) -> str:
    names = [run.name for run in runs]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


def _on_records(runs: Sequence[Run], damaged: Sequence[Path]) -> list[str]:
    """Return the notes on damaged runs and on runs with unverified records, by reason."""
    notes = []
    if damaged:
        names = ", ".join(str(shown("/".join(folder.parts[-2:]))) for folder in damaged)
        notes.append(
            f"Damaged and left out: {names}. With damaged runs no recipe is called lossless. Restore their files from "
            "a copy, rerun them, or name only the intact runs."
        )
    reasons: dict[str, list[Run]] = {}
    for run in runs:
        if run.unverified:
            reasons.setdefault(run.unverified, []).append(run)
    notes += [f"Records not verified, since {why}: {_named(found)}." for why, found in reasons.items()]
    return notes


def _on_middles(runs: Sequence[Run]) -> list[str]:
    """Return a note for each run that continued after a validation with a non-finite loss."""
    notes = []
    for run in runs:
        losses = run.validations.get(LOSS, {})
        lost = [step for step in sorted(losses)[:-1] if not math.isfinite(losses[step])]
        if lost and math.isfinite(losses[max(losses)]):
            notes.append(f"{run.name} had a validation loss that was not finite at step {', '.join(map(str, lost))}.")
    return notes


def _short_tails(verdicts: Sequence[Verdict]) -> list[str]:
    """Return a note if the tail is a single validation, because its noise adds to the spread."""
    tails = [each.judged.measured.tail for each in verdicts]
    steps = sorted({tail.steps[0] for tail in tails if tail and len(tail.steps) == 1})
    if not steps:
        return []
    every = max(1, steps[0] // 40)  # four in the last tenth
    earlier = any(
        0.7 * steps[-1] < step < steps[-1]
        for each in verdicts
        for pair in each.pairs
        for step in pair.run.validations.get(each.terms.metric, {})
    )
    more = ", or use more of the existing validations (--tail 0.3)" if earlier else ""
    return [
        f"The tail is one validation (step {', '.join(map(str, steps))}), so nothing is averaged. The mean of several "
        f"has less noise from step to step: validate more often (trainer.validate_every_steps={every}){more}."
    ]
