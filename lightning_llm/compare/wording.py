"""A verdict in words: what has to be reported beside the numbers, and everything in one line."""

import math
import re
from collections.abc import Sequence

from lightning_llm.compare.estimate import Estimate
from lightning_llm.compare.runs.losses import LEARNED_SHARE
from lightning_llm.compare.statistics.censored import TimeToTarget
from lightning_llm.compare.statistics.power import MOST_SEEDS, PLANNED_GAP, POWER
from lightning_llm.compare.statistics.seeds import FEWEST_SEEDS
from lightning_llm.compare.statistics.stability import STABILITY_MARGIN, Stability, rate_interval, upper_bound
from lightning_llm.compare.verdict import Verdict
from lightning_llm.tracking.sweep_file import FILE as SWEEP_FILE

LOOKS = (
    "Every look at a growing sweep is another chance to err: with a true gap at the margin, lossless is reported "
    "falsely at some look of {few} where the looks are after 2, 3, 4 and 5 seeds, of {many} over 2 to 20, and not "
    "2.5 %. Choose the number of seeds first, and take the verdict at that number."
)
FALSE_LOSSLESS_BY_LOOKS = {(2, 5): 0.068, (2, 20): 0.129}
"""{(first, last number of seeds looked at): how often lossless is reported at some look at a gap of the margin}: one
recipe, 95 % intervals; tests/compare/test_stability.py."""


def line_of(verdict: Verdict) -> str:
    """Return a verdict in one line: with the model's size, the tokens, the setting and the margin, every time."""
    scale = f"{short(verdict.parameters)} parameters, {short(verdict.tokens)} tokens"
    where = ", ".join(filter(None, (scale, verdict.family.words, verdict.family.survived_at)))
    decided = f"{verdict.decision} against {verdict.factor.baseline_label} at margin {verdict.terms.margin_words}"
    reason = reason_of(verdict)
    name = f"{verdict.name}{verdict.coverage.suffix if verdict.coverage else ''}"
    text = f"{name} at {where}: {decided} ({', '.join(_numbers(verdict))}){f', {reason}' if reason else ''}"
    if not verdict.controlled:
        keys = list(verdict.confounders)
        more = f" and {len(keys) - 4} more" if len(keys) > 4 else ""
        text += f"; not controlled: the runs differ in {', '.join(keys[:4])}{more} too"
    if verdict.unverified:
        runs = {id(run) for pair in verdict.pairs for run in (pair.baseline, pair.run)}
        text += f"; records not verified ({len(verdict.unverified)} of {_count(len(runs), 'run')})"
    return f"{text}; {verdict.switch.words}" if verdict.switch else text


def quantized_sentences(verdicts: Sequence[Verdict]) -> list[str]:
    """Return one sentence per recipe and model: how much of the model it quantized, and what it could not keep."""
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
    """Return what has to be reported beside the numbers, as one phrase; empty where they show it all."""
    grid = verdict.tuned.words if verdict.tuned else ""
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
    """Return how many of the recipe's runs failed and what rate that allows; the baseline's, too, where any did."""
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
        repeated = " repeated" if verdict.stage else ""
        level = f"{100 * verdict.terms.confidence:g} %{repeated} CI"
        numbers.append(f"{level} {interval_of(estimate)}")
    in_all = len(measured.seeds)
    numbers.append(_count(in_all, "pair") if estimate.pairs == in_all else f"{estimate.pairs} of {in_all} pairs")
    if verdict.stage is not None:
        numbers.append(verdict.stage.words)
    if verdict.floor.sd is not None:
        numbers.append(f"A/A floor {nats(verdict.floor.sd)}")
    numbers.append(failures(verdict.judged.stability))
    if spikes := verdict.spikes.words:
        numbers.append(spikes)
    if (time := verdict.time_to_target) is not None:
        numbers.append(_to_target(time))
    if verdict.effective_data:
        numbers.append(tokens_needed(verdict))
    return numbers


def _to_target(time: TimeToTarget) -> str:
    """Return how long it took to the target, and who got there where not all did."""
    if time.arrived == time.baseline_arrived == 0:
        return f"no run of its {_count(time.pairs, 'pair')} reached {time.target:g}, nor any of the baseline's"
    text = f"tokens to {time.target:g}: {time.words} the baseline's"
    if time.arrived == time.baseline_arrived == time.pairs:
        return text
    return f"{text}, reached by {time.arrived} of {time.pairs}, the baseline's {time.baseline_arrived}"


def tokens_needed(verdict: Verdict) -> str:
    """Return what the gap is in tokens: "4.1 % more tokens [2.0, 6.5]", and the time it nets where speeds are real."""
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


def more_or_fewer(share: float, interval: tuple[float, float]) -> str:
    """Return a share of tokens more in words: "4.1 % more tokens [2.0, 6.5]", and -0.002 as "0.2 % fewer tokens".

    Bounds are of the word before them: [-0.003, -0.001] more is [0.1, 0.3] fewer. "beyond": not known from the runs
    there are, a bound that is infinite or -1; without an interval, NaN, there are no brackets.
    """
    fewer = round(100 * share, 1) < 0
    bounds = tuple(-each for each in reversed(interval)) if fewer else interval
    text = f"{100 * abs(share):.1f} % {'fewer' if fewer else 'more'} tokens"
    if any(math.isnan(each) for each in bounds):
        return text
    known = (math.isfinite(b) and (-b if fewer else b) > -1 for b in bounds)
    words = (f"{round(100 * b, 1) + 0.0:.1f}" if k else "beyond" for b, k in zip(bounds, known, strict=True))
    return f"{text} [{', '.join(words)}]"


def _surer_in_tokens(verdict: Verdict) -> str:
    """Return why the interval in tokens leaves out 0 where that of the gap holds it; empty where it is not so."""
    estimate, worth = verdict.judged.estimate, verdict.effective_data
    if worth is None or estimate.comparisons < 2 or not estimate.low <= 0 <= estimate.high:
        return ""
    low, high = worth.more_tokens_interval
    if not (low > 0 or high < 0):
        return ""
    return "the interval in tokens, by its own pairs alone, excludes 0; that of the gap, for all recipes together, not"


def interval_of(estimate: Estimate) -> str:
    """Return the interval in brackets."""
    return f"[{nats(estimate.low, signed=True)}, {nats(estimate.high, signed=True)}]"


def _damaged(verdict: Verdict) -> str:
    if not verdict.damaged:
        return ""
    sweeps = sum(folder.name == SWEEP_FILE for folder in verdict.damaged)
    runs = len(verdict.damaged) - sweeps
    found = ["another run"] if runs == 1 else [f"{runs} other runs"] if runs else []
    found += [SWEEP_FILE] if sweeps else []
    verb = "is" if len(verdict.damaged) == 1 else "are"
    return f"{' and '.join(found)} {verb} damaged, so nothing is called lossless"


def _unlearned(verdict: Verdict) -> str:
    if verdict.judged.measured.unlearned is None:
        return ""
    loss, below = verdict.judged.measured.unlearned
    text = "the baseline has not learned"
    if math.isfinite(below):
        entropy = any(pair.baseline.figure("validation_unigram_nats") == below for pair in verdict.pairs)
        source = "the frequencies of the tokens alone give" if entropy else f"{LEARNED_SHARE:g} ln(vocabulary) is"
        text += f": its best run ends at {loss:.3f} nats, where {source} {below:.3f}"
    return f"{text}. What a recipe loses cannot show: train for longer"


def _failed(verdict: Verdict) -> str:
    """Return which seeds failed and how, and what that makes of the verdict."""
    judged = verdict.judged
    stability, outliers = judged.stability, judged.estimate.outlier_seeds
    parts = []
    if judged.measured.diverged_seeds:
        parts.append(f"diverged at {_seeds(judged.measured.diverged_seeds)}")
    for seed in outliers:
        gap = judged.measured.differences[seed]
        whose = "" if gap > 0 else " in the recipe's favour"
        parts.append(f"seed {seed} is an outlier, {gap:+.3g} ({abs(gap) / verdict.terms.margin:.0f} margins{whose})")
    if judged.measured.baseline_diverged_seeds:
        parts.append(f"the baseline diverged at {_seeds(judged.measured.baseline_diverged_seeds)}")
    if not parts:
        return ""
    if stability.verdict == "unstable":
        parts.append(f"unstable: it fails more often than the baseline (p = {stability.p:.2g})")
    elif judged.loss == "lossless" and not stability.allows_lossless:
        parts.append(f"so it is not called lossless by the other {_count(judged.estimate.pairs, 'pair')}")
    return ", ".join(parts)


def _missing(verdict: Verdict) -> str:
    missing = verdict.judged.measured.missing_seeds
    if not missing or (verdict.stage is not None and verdict.stage.waits_for):  # which names them
        return ""
    lead = f"{_seeds(missing)} missing: crashed or unfinished where the baseline was not"
    spared = verdict.judged.loss == "lossless" and verdict.judged.stability.allows_lossless
    return f"{lead}, so it is not called lossless by the others" if spared else lead


def _unpriced(verdict: Verdict) -> str:
    seeds = verdict.judged.measured.unpriced_seeds
    why = "the baseline has no sound runs of other numbers of tokens there, which say what the margin is"
    return f"{_seeds(seeds)} left out: {why}" if seeds else ""


def _identical(verdict: Verdict) -> str:
    if not verdict.may_not_have_acted:
        return ""
    return "every loss equals the baseline's to the last bit: the recipe may not have acted at all; see plan"


def _open(verdict: Verdict) -> str:
    """Return what more seeds would do, for true gaps that are worth planning for: the observed one is noise."""
    judged, plan = verdict.judged, verdict.plan
    if verdict.decision != "inconclusive" or judged.measured.unlearned or judged.measured.identical or verdict.damaged:
        return ""
    if verdict.tuned is not None and verdict.tuned.withheld:
        return ""
    if verdict.stage is not None:
        worse = "worse; by more than the margin: " if verdict.worse else ""
        return worse + verdict.stage.what_next
    if judged.loss == "lossless":
        if plan.if_stable is None:
            return ""
        more = _count(plan.more or 1, "more seed")
        return f"{more} without another failure would show a failure rate below {100 * STABILITY_MARGIN:g} %"
    if not judged.estimate.pairs:
        return "no pair is left whose loss can be compared"
    if judged.estimate.pairs == 1:
        return f"one pair shows no spread: at least {_count(plan.more or 1, 'more seed')} ({FEWEST_SEEDS} pairs in all)"
    worse = "worse; by more than the margin: open; " if verdict.worse else ""
    return worse + _seed_plan(verdict)


def _seed_plan(verdict: Verdict) -> str:
    plan, pairs = verdict.plan, verdict.judged.estimate.pairs
    if plan.if_no_gap is None:
        text = f"more than {MOST_SEEDS} seeds would be needed to decide if the true gap is 0"
        return text if plan.if_lossy is None else f"{text}, about {plan.if_lossy} if it is {PLANNED_GAP} margins"
    if plan.more is None:
        power = f"{_count(pairs, 'seed')} would mostly have told a gap of 0 or of {PLANNED_GAP} margins"
        return f"the gap is likely near the margin, and more seeds would hardly decide: {power}"
    return (
        f"about {_count(plan.more, 'more seed')} ({pairs + plan.more} in all) would decide if the true gap is 0, "
        f"{plan.if_lossy} in all if it is {PLANNED_GAP} margins"
    )


def power_statement() -> str:
    """Return what "N more seeds would decide" assumes."""
    return (
        f"'N more seeds would decide': with a probability of at least {100 * POWER:.0f} % if the true gap is the one "
        "named, averaged over what the true spread may be, given the one estimated here. A spread from few pairs is "
        "itself known to a factor of two or so, and N goes with its square."
    )


def looks_statement() -> str:
    """Return what repeated looks do to the error rate."""
    few, many = (f"{100 * rate:.1f} %" for rate in FALSE_LOSSLESS_BY_LOOKS.values())
    return LOOKS.format(few=few, many=many)


def nats(value: float, *, signed: bool = False) -> str:
    """Return a loss or a gap to four digits behind the point; what a table has no room for, as a power of ten."""
    sign = "+" if signed else ""
    return format(value, f"{sign}.4f" if not 1e5 <= abs(value) < math.inf else f"{sign}.2e")


def minus(words: str) -> str:
    """Return `words` with the sign that is as wide as a plus before negative numbers, for print."""
    return re.sub(r"(?<!\w)-(?=[\d.]|inf)", "−", words)


def short(number: int | float | None) -> str:
    """Return a count to two or three digits: 6.9M, 1.6M, 768K."""
    if number is None:
        return "unknown"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def per_parameter(tokens: int, parameters: int) -> str:
    """Return tokens per parameter to two digits, all of those before the point: 0.023, 5.5, 160."""
    return short(float(f"{tokens / parameters:.2g}"))


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
