"""The layouts of a space that are worth a price: the fastest that fit, and those that lack the fewest bytes."""

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lightning_llm.base.terminal import Waiting
from lightning_llm.plan.search.pricing import Priced, Pricer
from lightning_llm.plan.search.space import CHECKPOINTING, Choice

LISTED = 100
"""How many of the fastest layouts a search is sure to find."""
NEAREST, EMULATED = 3, 10
"""How many are found of the layouts that lack the fewest bytes, and of the emulated ones that hold the fewest."""
MIXED = 10
"""How many of the fastest layouts are sure to recompute block by block where that is faster."""
Mix = Callable[[Priced, Priced], Priced | None]
"""Given a layout whose blocks all recompute as little as fits, and the same without any recomputation, which does not
fit: the fastest in between, None where there is none."""


@dataclass
class Found:
    """What a search found: `fitting` layouts by seconds, `missing` ones that hold too much by bytes.

    `emulated` ones fit, have no time and stand by bytes. `counts` are of layouts: `considered`, `refused` by the
    checks, `too_large`, `fitting`, `slower` than `LISTED` others, or than the same with less recomputation, and
    `emulated`; and of the work: `priced` and `timed` ones. `reasons` has how many layouts the checks refused, by what
    they reported; `no_time` how many are emulated, by the reason.
    """

    fitting: list[Priced] = field(default_factory=list)
    missing: list[Priced] = field(default_factory=list)
    emulated: list[Priced] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    no_time: Counter[str] = field(default_factory=Counter)


def search(pricer: Pricer, mix: Mix | None = None, *, every: bool = False) -> Found:
    """Return the fastest layouts of the pricer's space: `LISTED` of them surely, all that fit with `every`.

    By branch and bound: layouts come by their least seconds (`Bounds`), and the search ends at the first that is
    slower at best than `LISTED` found ones. Of those that differ in recomputation alone, the one that recomputes least
    of what fits is the fastest, and alone is timed, unless `every`.
    """
    return _Search(pricer, mix, every).found()


class _Search:
    def __init__(self, pricer: Pricer, mix: Mix | None, every: bool):
        self.pricer, self.mix, self.every = pricer, mix, every
        self.result = Found()
        self.too_large: list[Choice] = []
        self.without_time: list[Choice] = []
        self.best: list[float] = []

    def found(self) -> Found:
        """Search, and return what was found."""
        native = []
        for choices in _families(self.pricer.space.choices()):
            self.result.counts["considered"] += len(choices)
            reason = self.pricer.no_time(choices[0])
            if reason is None:
                native.append((self.pricer.bounds.seconds(choices[0]), choices))
            else:
                self.result.no_time[reason] += len(choices)
                self.without_time += choices
        native.sort()
        with Waiting("layouts looked at", of=len(native)) as waiting:
            for number, (least, choices) in enumerate(native):
                waiting.tell(number)
                if least > self.limit:
                    self.result.counts["slower"] += sum(len(rest) for _, rest in native[number:])
                    break
                self._price(choices)
        self.result.fitting.sort(key=lambda priced: (priced.seconds, priced.memory_bytes, priced.choice))
        self.result.missing = list(self._smallest(self.too_large, NEAREST))
        fitting = (each for each in self._smallest(self.without_time, EMULATED) if self.pricer.fits(each.memory_bytes))
        self.result.emulated = list(fitting)
        self.result.counts["emulated"] = len(self.without_time)
        return self.result

    @property
    def limit(self) -> float:
        """Seconds above which a layout is not among those that a search is sure to find."""
        return float("inf") if self.every or len(self.best) < LISTED else self.best[LISTED - 1]

    def _price(self, choices: Sequence[Choice]) -> None:
        """Add layouts that differ in recomputation alone, the least of it first, to what is found."""
        fitting: list[Priced] = []
        for place, choice in enumerate(choices):
            if (fitting and not self.every) or self.pricer.bounds.seconds(choice) > self.limit:
                self.result.counts["slower"] += len(choices) - place
                break
            priced = self._fitting(choice)
            fitting += [priced] if priced is not None else []
        self.result.counts["fitting"] += len(fitting)
        if fitting and self.mix is not None and choices[0].activation_checkpoint == "none":
            mixed = self._mixed(choices, fitting)
            fitting = [*fitting, *mixed] if self.every else mixed or fitting
        for priced in fitting:
            timed = self.pricer.timed(priced)
            self.result.fitting.append(timed)
            insort(self.best, timed.seconds)

    def _fitting(self, choice: Choice) -> Priced | None:
        """Return the layout with its bytes where it is legal and fits; count it where it is not."""
        if not self.pricer.fits(self.pricer.bounds.held_bytes(choice)):
            self.too_large.append(choice)
            self.result.counts["too_large"] += 1
            return None
        if problems := self.pricer.problems(self.pricer.space.config_of(choice)):
            self.result.counts["refused"] += 1
            self.result.reasons.update(f"{each.key}: {each.text}" for each in problems)
            return None
        priced = self.pricer.memory(choice)
        if self.pricer.fits(priced.memory_bytes):
            return priced
        self.too_large.append(choice)
        self.result.counts["too_large"] += 1
        return None

    def _mixed(self, choices: Sequence[Choice], fitting: Sequence[Priced]) -> list[Priced]:
        """Return the layout that recomputes block by block where it may be among the `MIXED` fastest."""
        least = fitting[0].choice
        if self.mix is None or least == choices[0]:  # nothing need be recomputed
            return []
        # Nothing in between is faster than without recomputation: where that is too slow, no mix is looked for.
        slowest = self.best[MIXED - 1] if len(self.best) >= MIXED else float("inf")
        if self.pricer.bounds.seconds(choices[0]) >= slowest:
            return []
        without = self.pricer.memory(choices[0])
        if self.pricer.timed(without).seconds >= slowest:
            return []
        more = (self.pricer.memory(each) for each in reversed(choices) if each != least and each != choices[0])
        smallest = next((each for each in more if self.pricer.fits(each.memory_bytes)), fitting[0])
        mixed = self.mix(smallest, without)
        return [] if mixed is None else [mixed]

    def _smallest(self, choices: Sequence[Choice], count: int) -> Iterator[Priced]:
        """Yield the legal layouts of `choices` that hold the fewest bytes, the fewest first, at most `count`."""
        bounds, pricer, left = self.pricer.bounds, self.pricer, count
        heap: list[tuple[int, int, Priced | None]] = [
            (bounds.held_bytes(choice), number, None) for number, choice in enumerate(choices)
        ]
        heapq.heapify(heap)
        while heap and left:
            _, number, priced = heapq.heappop(heap)
            if priced is not None:
                left -= 1
                yield priced
            elif not pricer.problems(pricer.space.config_of(choices[number])):
                priced = pricer.memory(choices[number])
                heapq.heappush(heap, (priced.memory_bytes, number, priced))


def _families(choices: Iterator[Choice]) -> Iterator[list[Choice]]:
    """Yield layouts that differ in recomputation alone, the least of it first."""
    families: dict[Choice, list[Choice]] = {}
    for choice in choices:
        families.setdefault(choice._replace(activation_checkpoint=""), []).append(choice)
    for family in families.values():
        yield sorted(family, key=lambda each: CHECKPOINTING.index(each.activation_checkpoint))


def pareto_front(layouts: Sequence[Priced]) -> list[Priced]:
    """Return those than which none is both faster and smaller, the fastest first."""
    front: list[Priced] = []
    for priced in sorted(layouts, key=lambda each: (each.seconds, each.memory_bytes)):
        if not front or priced.memory_bytes < front[-1].memory_bytes:
            front.append(priced)
    return front
