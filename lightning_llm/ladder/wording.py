"""A ladder in words: what a recipe costs in tokens, and what became of a prediction."""

from collections.abc import Sequence

from lightning_llm.compare.wording import more_or_fewer, nats, short
from lightning_llm.ladder.effect import Effect
from lightning_llm.ladder.fit import Fit, Gap
from lightning_llm.ladder.ledger import Prediction

GROWTH_LEVEL = 0.05


def line_of(effect: Effect, gap: Gap, model: str = "") -> str:
    """Return "mxfp4_sr: 4.1 % more tokens [2.0, 6.5] at 1B / 20B, grows with tokens per parameter (p = 0.003)"."""
    where = f"{short(effect.parameters)} / {short(effect.tokens)}{f' ({model})' if model else ''}"
    return f"{effect.recipe}: {share(effect)} at {where}, {growth(gap)}"


def share(effect: Effect) -> str:
    """Return "4.1 % more tokens [2.0, 6.5]"."""
    return more_or_fewer(effect.more_tokens, (effect.low, effect.high))


def growth(gap: Gap) -> str:
    """Return what the test of growth says."""
    _, p = gap.growth
    if p != p:
        return "growth with tokens per parameter not tested"
    said = f"p = {p:.3f}" if p >= 0.0005 else "p < 0.001"
    return f"{'grows' if p < GROWTH_LEVEL else 'not shown to grow'} with tokens per parameter ({said})"


def law_line(fit: Fit) -> str:
    """Return the baseline's law in a line, with how well it fits."""
    law = fit.law.constants()
    lack = "" if fit.lack_of_fit != fit.lack_of_fit else f", lack of fit p = {fit.lack_of_fit:.2g}"
    return (
        f"{fit.ladder.baseline}: L = {law['E']:.3f} + {law['A']:.3g} N^-{law['alpha']:.3f} + {law['B']:.3g} "
        f"D^-{law['beta']:.3f} over {len(fit.ladder.rungs)} rungs (residual {fit.misfit:.4f} of a fall of "
        f"{fit.fall:.3f} nats{lack})"
    )


def gap_line(name: str, gap: Gap) -> str:
    """Return a recipe's gap in a line: its terms with their standard errors."""
    errors = gap.drawn.std(0, ddof=1)
    c_d, c_n, c_o = (f"{value:+.2g} ({error:.1g})" for value, error in zip(gap.terms, errors, strict=True))
    lack = "" if gap.lack_of_fit != gap.lack_of_fit else f", lack of fit p = {gap.lack_of_fit:.2g}"
    return (
        f"{name}: gap = {c_d} B D^-beta {c_n} A N^-alpha {c_o} D/N (standard errors in brackets), SD of a pair "
        f"{gap.sd:.4f}, {gap.df} degrees of freedom{lack}; {growth(gap)}"
    )


def prediction_line(prediction: Prediction) -> str:
    """Return a prediction with its date and hash, and its outcome where there is one."""
    claim, outcome = prediction.claim, prediction.outcome
    text = f"{claim['line']} [{prediction.date} {prediction.hash}]"
    if outcome is None:
        return f"{text}: not run yet"
    low, high = (nats(each, signed=True) for each in outcome["interval"])
    pairs = len(outcome["seeds"])
    when = {
        True: "predicted before it was run",
        False: "NOT before it was run",
        None: "when it was run is not known",
    }[outcome["made_before_the_runs"]]
    held = "held" if outcome["inside"] else "FAILED"
    measured, predicted = (nats(each, signed=True) for each in (outcome["gap"], claim["gap"]))
    return (
        f"{text}: {held}, measured {measured} over {pairs} pair{'s' * (pairs > 1)}, predicted {predicted} "
        f"[{low}, {high}], z = {outcome['z']:+.1f}; {when}"
    )


def tally(predictions: Sequence[Prediction]) -> str:
    """Return how many of all predictions held."""
    graded = [each for each in predictions if each.outcome]
    early = [each for each in graded if each.outcome and each.outcome["made_before_the_runs"] is True]
    held = sum(1 for each in early if each.outcome and each.outcome["inside"])
    levels = sorted({100 * each.terms["confidence"] for each in early})
    at = f" at {' or '.join(f'{level:g} %' for level in levels)}" if levels else ""
    late = len(graded) - len(early)
    return f"{held} of {len(early)} graded predictions held{at}; {len(predictions) - len(graded)} not run yet" + (
        f"; {late} made after the runs, which count for nothing" if late else ""
    )
