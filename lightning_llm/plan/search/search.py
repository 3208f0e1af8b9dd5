"""Branch and bound over the layouts of a space: the fastest that fit, and the nearest that do not."""

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lightning_llm.base.terminal import Waiting
from lightning_llm.plan.search.pricing import Priced, Pricer
from lightning_llm.plan.search.space import CHECKPOINTING, Choice

LISTED = 100
"""Number of fastest layouts that a search is guaranteed to find."""
NEAREST, EMULATED = 3, 10
"""Numbers reported of too large layouts (nearest to the limit) and of emulated layouts (fewest bytes)."""
MIXED = 10
"""Number of fastest layouts that are guaranteed to mix recomputation by block if that is faster."""
Mix = Callable[[Priced, Priced], Priced | None]
"""Called with a layout whose blocks all recompute as little as fits, and the same layout without recomputation, which
does not fit; returns the fastest mixture, or None."""


@dataclass
class SearchResult:
    """Result of a search: `fitting` layouts by seconds, `missing` ones (too large) by bytes, `emulated` by bytes.

    `emulated` layouts fit, but have no step time because casts are emulated. `counts` has numbers of layouts:
    `considered`, `refused` by the checks, `too_large`, `fitting`, `slower` (than `LISTED` others, or than the same with
    less recomputation) and `emulated`; and of the work: `priced` and `timed`. `reasons` has the number of refused
    layouts by problem, `no_time` that of emulated ones by reason.
    """

    fitting: list[Priced] = field(default_factory=list)
    missing: list[Priced] = field(default_factory=list)
    emulated: list[Priced] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    no_time: Counter[str] = field(default_factory=Counter)


def search(pricer: Pricer, mix: Mix | None = None, *, every: bool = False) -> SearchResult:
    """Return the fastest layouts of the pricer's space: at least `LISTED`, or all that fit with `every`.

    Branch and bound: layouts are visited by the lower bound of their seconds (`Bounds`), and the search ends at the
    first whose bound exceeds the seconds of `LISTED` found ones. Of layouts that differ only in recomputation, only the
    fitting one with the least recomputation is timed, since it is the fastest, unless `every`.
    """
    return _Search(pricer, mix, every).found()


class _Search:
    def __init__(self, pricer: Pricer, mix: Mix | None, every: bool):
        self.pricer, self.mix, self.every = pricer, mix, every
        self.result = SearchResult()
        self.too_large: list[Choice] = []
        self.without_time: list[Choice] = []
        self.best: list[float] = []

    def found(self) -> SearchResult:
        """Run the search and return its result."""
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
        with Waiting("layouts visited", of=len(native)) as waiting:
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
        """Seconds above which a layout is not among the `LISTED` fastest."""
        return float("inf") if self.every or len(self.best) < LISTED else self.best[LISTED - 1]

    def _price(self, choices: Sequence[Choice]) -> None:
        """Add layouts that differ only in recomputation, least first, to the result."""
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
        """Return the layout with its bytes if it is legal and fits; otherwise count it and return None."""
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
        """Return the layout with recomputation mixed by block, if it may be among the `MIXED` fastest."""
        least = fitting[0].choice
        if self.mix is None or least == choices[0]:  # no recomputation is needed
            return []
        # No mixture is faster than no recomputation: if that is too slow, none is tried.
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
        """Yield at most `count` legal layouts of `choices` with the fewest bytes, fewest first."""
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
    """Yield lists of layouts that differ only in recomputation, least first."""
    families: dict[Choice, list[Choice]] = {}
    for choice in choices:
        families.setdefault(choice._replace(activation_checkpoint=""), []).append(choice)
    for family in families.values():
        yield sorted(family, key=lambda each: CHECKPOINTING.index(each.activation_checkpoint))


def pareto_front(layouts: Sequence[Priced]) -> list[Priced]:
    """Return the layouts that no other beats in both seconds and bytes, fastest first."""
    front: list[Priced] = []
    for priced in sorted(layouts, key=lambda each: (each.seconds, each.memory_bytes)):
        if not front or priced.memory_bytes < front[-1].memory_bytes:
            front.append(priced)
    return front
