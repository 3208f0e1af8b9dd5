"""Every layout of a space priced: those that fit with the seconds of a step, those that do not with their bytes."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lightning_llm.planner.pricing import Priced, Pricer
from lightning_llm.planner.space import CHECKPOINTING, Choice
from lightning_llm.terminal.waiting import Waiting

MIXED = 10
"""How many of the fastest layouts are sure to recompute block by block where that is faster."""
Mix = Callable[[Priced, Priced], Priced | None]
"""Given a layout whose blocks all recompute as little as fits, and the same without any recomputation, which does not
fit: the fastest in between, None where there is none."""


@dataclass
class Found:
    """What a search found: `fitting` layouts by seconds, `missing` ones that hold too much by bytes.

    `counts` are of layouts: `considered`, `refused` by the checks, `too_large`, `fitting`. `reasons` has how many
    layouts the checks refused, by what they said.
    """

    fitting: list[Priced] = field(default_factory=list)
    missing: list[Priced] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)


def search(pricer: Pricer, mix: Mix | None = None, *, every: bool = False) -> Found:
    """Price all layouts of the pricer's space.

    Those that differ in recomputation and in the size of a micro-batch alone are looked at together: what cannot fit at
    any larger size is not looked at again (`Priced.least_bytes`), and of those that fit at one size the one that
    recomputes least is the fastest, and alone is timed, unless `every`.
    """
    found, waiting = Found(), Waiting("layouts priced")
    for family in _families(pricer.space.choices()):
        least: dict[str, int] = {}
        for choices in family:
            found.counts["considered"] += len(choices)
            waiting.tell(found.counts["considered"])
            config = pricer.space.config_of(choices[0])
            if problems := pricer.problems(config):
                found.counts["refused"] += len(choices)
                found.reasons.update(f"{each.key}: {each.text}" for each in problems)
            elif pricer.fits(pricer.least_bytes(choices[0])):
                _price(pricer, choices, mix, least, every, found)
            else:
                found.counts["too_large"] += len(choices)
                found.missing.append(Priced(choices[0], pricer.plan(config), 0))
    found.fitting.sort(key=lambda priced: (priced.seconds, priced.memory_bytes, priced.choice))
    found.missing = _nearest(pricer, found.missing)
    return found


def _price(
    pricer: Pricer, choices: Sequence[Choice], mix: Mix | None, least: dict[str, int], every: bool, found: Found
) -> None:
    """Add layouts that differ in recomputation alone, most of it first, to `found`.

    `least` has what smaller micro-batches say that each holds at least, and is kept.
    """
    fitting: list[Priced] = []
    for choice in choices:
        if not pricer.fits(least.get(choice.activation_checkpoint, 0)):
            continue
        priced = pricer.memory(choice)
        least[choice.activation_checkpoint] = priced.least_bytes
        (fitting if pricer.fits(priced.memory_bytes) else found.missing).append(priced)
    found.counts["fitting"] += len(fitting)
    found.counts["too_large"] += len(choices) - len(fitting)
    if not fitting:
        return
    if mix is not None and choices[-1].activation_checkpoint == "none" and fitting[-1].choice != choices[-1]:
        without = pricer.memory(choices[-1])
        # Nothing in between is faster than without recomputation: where that is too slow, no mix is looked for.
        best = sorted(priced.seconds for priced in found.fitting)[:MIXED]
        if len(best) < MIXED or pricer.timed(without).seconds < best[-1]:
            mixed = mix(fitting[0], without)
            fitting += [mixed] if mixed is not None else []
    found.fitting += [pricer.timed(priced) for priced in (fitting if every else fitting[-1:])]


def _families(choices: Iterator[Choice]) -> Iterator[list[list[Choice]]]:
    """Yield layouts that differ in recomputation and size alone: by size, and by recomputation, the most first."""
    families: dict[Choice, dict[int, list[Choice]]] = {}
    for choice in choices:
        alike = choice._replace(activation_checkpoint="", micro_batch_size=0)
        families.setdefault(alike, {}).setdefault(choice.micro_batch_size, []).append(choice)
    for sizes in families.values():
        yield [
            sorted(sizes[size], key=lambda each: -CHECKPOINTING.index(each.activation_checkpoint))
            for size in sorted(sizes)
        ]


def _nearest(pricer: Pricer, missing: list[Priced], count: int = 32) -> list[Priced]:
    """Return the layouts that lack the fewest bytes, nearest first; what was not priced by what it holds at least."""
    missing.sort(key=lambda priced: priced.memory_bytes or pricer.least_bytes(priced.choice))
    nearest = [priced if priced.memory_bytes else pricer.memory(priced.choice) for priced in missing[:count]]
    return sorted(nearest, key=lambda priced: (priced.memory_bytes, priced.choice))


def pareto_front(layouts: Sequence[Priced]) -> list[Priced]:
    """Return those than which none is both faster and smaller, the fastest first."""
    front: list[Priced] = []
    for priced in sorted(layouts, key=lambda each: (each.seconds, each.memory_bytes)):
        if not front or priced.memory_bytes < front[-1].memory_bytes:
            front.append(priced)
    return front
