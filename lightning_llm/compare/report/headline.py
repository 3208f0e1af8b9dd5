"""The verdicts in ten seconds: per setting, which recipes are lossless, which lossy, and which are open."""

from dataclasses import dataclass

from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.statistics.intervals import Decision
from lightning_llm.compare.wording import short

ORDER: tuple[Decision, ...] = ("lossless", "lossy", "inconclusive")


@dataclass(frozen=True)
class Headline:
    """One setting's verdicts: `setting` in words, `scale`: the model's size and the tokens.

    `recipes`: (verdict, the verdict whose colour it is shown in, names).
    """

    setting: str
    scale: str
    recipes: tuple[tuple[Decision, Decision, tuple[str, ...]], ...]


def headlines(comparison: Comparison) -> list[Headline]:
    """Return one per setting; a recipe whose verdict has something against it says so behind its name."""
    found = []
    for family in comparison.families:
        verdicts = comparison.verdicts_of(family)
        if not verdicts:
            continue
        groups: dict[tuple[Decision, Decision], list[str]] = {}
        for verdict in verdicts:
            against = verdict.qualified.partition(" (")[2].rstrip(")")
            said = f"{verdict.name} ({against})" if against and verdict.decision != "inconclusive" else verdict.name
            groups.setdefault((verdict.decision, verdict.colour), []).append(said)
        first = verdicts[0]
        scale = f"{short(first.parameters)} parameters, {short(first.tokens)} tokens"
        ordered = sorted(groups, key=lambda group: (ORDER.index(group[0]), group[0] != group[1]))
        recipes = tuple((*group, tuple(groups[group])) for group in ordered)
        found.append(Headline(family.words, scale, recipes))
    return found


def sentence(comparison: Comparison) -> str:
    """Return how many of the verdicts are what, in a sentence."""
    decisions = [verdict.decision for verdict in comparison.verdicts]
    counts = [f"{decisions.count(each)} {each}" for each in ORDER if each in decisions]
    number = len(decisions)
    return f"{number} verdict{'s' * (number != 1)}: {', '.join(counts)}."
