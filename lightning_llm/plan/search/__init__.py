"""Search for layouts (`plan --search`) by branch and bound: the fastest that fit, and the nearest that do not.

`mix_by_block` then chooses recomputation per block: as little as fits, for each pipeline rank separately, by dynamic
programming (Galvatron). Imports no torch.
"""

import heapq
import math
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightning_llm.base.terminal import Waiting
from lightning_llm.config.schema import Config
from lightning_llm.plan.memory import OURS
from lightning_llm.plan.memory.activations import block_bytes, on_gpu
from lightning_llm.plan.memory.rank_bytes import ALLOCATOR_RESERVE, Stage, memory_at
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.search.pricing import Priced, Pricer
from lightning_llm.plan.search.space import CHECKPOINTING, Choice
from lightning_llm.plan.stages import StagePart, layers_of, parts_of, passes_of
from lightning_llm.plan.time.step import StepTimer

LISTED = 100
"""Number of fastest layouts that a search is guaranteed to find."""
NEAREST, EMULATED = 3, 10
"""Numbers reported of too large layouts (nearest to the limit) and of emulated layouts (fewest bytes)."""
MIXED = 10
"""Number of fastest layouts that are guaranteed to mix recomputation by block if that is faster."""


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


def search(pricer: Pricer, *, by_block: bool = False, every: bool = False) -> SearchResult:
    """Return the fastest layouts of the pricer's space: at least `LISTED`, or all that fit with `every`.

    Branch and bound: layouts are visited by the lower bound of their seconds (`Bounds`), and the search ends at the
    first whose bound exceeds the seconds of `LISTED` found ones. Of layouts that differ only in recomputation, only the
    fitting one with the least recomputation is timed, since it is the fastest, unless `every`. With `by_block`, the
    fastest layouts also mix recomputation by block (`mix_by_block`).
    """
    return _Search(pricer, by_block, every).found()


class _Search:
    def __init__(self, pricer: Pricer, by_block: bool, every: bool):
        self.pricer, self.by_block, self.every = pricer, by_block, every
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
        if fitting and self.by_block and choices[0].activation_checkpoint == "none":
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
        if least == choices[0]:  # no recomputation is needed
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
        mixed = mix_by_block(self.pricer, smallest, without)
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


UNITS = 4096
"""Number of memory units; a block's bytes are rounded up to units, so that the result fits."""
ATTEMPTS = 6
"""Number of attempts to adjust a rank's budget when a result leaves memory or exceeds it."""


def mix_by_block(pricer: Pricer, smallest: Priced, without: Priced) -> Priced | None:
    """Return the layout `smallest` with as little recomputation per block as fits, instead of one mode for all.

    Galvatron's search (Miao et al. 2022, arXiv 2211.13878), restricted to the one choice that this trainer has per
    block: its recomputation. Pipeline ranks are independent, since each recomputes its own blocks in its own passes.
    Each block counts with the largest number of micro-batches that its stage has in flight, so the result fits. In the
    interleaved schedule stages do not all reach their largest number at once, so less recomputation might fit, too.
    Returns None if all blocks end with the same mode, or the result does not fit. `without`: the same layout without
    recomputation.
    """
    model = smallest.plan.config.model
    again = {mode: _again_seconds(pricer, smallest, mode) for mode in CHECKPOINTING}
    modes = [smallest.choice.activation_checkpoint] * model.num_layers
    for pp_rank in range(smallest.plan.degrees.pp):
        parts = parts_of(model, smallest.plan.config.parallel, smallest.plan.degrees, pp_rank)
        own = _modes_of_rank(pricer, smallest.plan, without.plan, parts, pp_rank, again)
        for index, mode in zip(layers_of(parts), own, strict=True):
            modes[index] = mode
    if len(set(modes)) == 1:
        return None
    config = _with_modes(pricer.space.config_of(smallest.choice), modes)
    mixed = pricer.memory(smallest.choice._replace(activation_checkpoint="by block"), config)
    return mixed if pricer.fits(mixed.memory_bytes) else None


def _modes_of_rank(
    pricer: Pricer, full: Plan, none: Plan, parts: list[StagePart], pp_rank: int, again: dict[str, list[float]]
) -> list[str]:
    """Return the mode of each block of a rank; `again`: {mode: seconds of recomputation per micro-batch and block}."""
    layers, limit = layers_of(parts), pricer.limit_bytes
    if limit is None or memory_at(none, pp_rank).total <= limit:
        return ["none"] * len(layers)
    base = memory_at(full, pp_rank).total
    reserve = 1 + (ALLOCATOR_RESERVE if on_gpu(full) else 0)
    in_flight = _in_flight(full, pp_rank)
    plans = {
        mode: pricer.plan(_with_modes(full.config, [mode] * full.config.model.num_layers)) for mode in CHECKPOINTING
    }
    kept = {mode: _kept_bytes(plan, parts) for mode, plan in plans.items()}
    smallest = {index: min(kept[mode][index] for mode in CHECKPOINTING) for index in layers}
    stage_of = {index: part.index for part in parts for index in part.layers}
    sizes = [
        [
            int(reserve * in_flight[stage_of[index]] * (kept[mode][index] - smallest[index])) + 1
            for mode in CHECKPOINTING
        ]
        for index in layers
    ]
    seconds = [[again[mode][index] for mode in CHECKPOINTING] for index in layers]
    best, least, budget = ["full"] * len(layers), math.inf, limit - base
    for _ in range(ATTEMPTS):
        chosen = cheapest_modes(seconds, sizes, budget)
        if chosen is None:
            break
        own = [CHECKPOINTING[way] for way in chosen]
        modes: list[str] = [
            full.config.parallel.checkpointing_of(index) for index in range(full.config.model.num_layers)
        ]
        for index, mode in zip(layers, own, strict=True):
            modes[index] = mode
        spare = limit - memory_at(pricer.plan(_with_modes(full.config, modes)), pp_rank).total
        spent = sum(each[way] for each, way in zip(seconds, chosen, strict=True))
        if spare >= 0 and spent >= least:
            break
        if spare >= 0:
            best, least = own, spent
        budget += spare
    return best


def _again_seconds(pricer: Pricer, priced: Priced, mode: str) -> list[float]:
    """Return each block's extra seconds in a micro-batch's backward pass with recomputation `mode`."""
    count = priced.plan.config.model.num_layers
    if mode == "none":
        return [0.0] * count
    plan = pricer.plan(_with_modes(priced.plan.config, [mode] * count))
    operations = StepTimer(plan, pricer.cluster).operations
    return [operations.block(index).again.total for index in range(count)]


def _kept_bytes(plan: Plan, parts: list[StagePart]) -> dict[int, int]:
    """Return the bytes per micro-batch that each block keeps for its backward pass, including copies of weights."""
    kept = {}
    for part in parts:
        for index in part.layers:
            alone = StagePart(part.index, range(index, index + 1), first=False, last=False)
            kept[index] = block_bytes(plan, index).kept + Stage.of(plan, alone, OURS).copies
    return kept


def _in_flight(plan: Plan, pp_rank: int) -> dict[int, int]:
    """Return the largest number of micro-batches in flight in each stage of a rank."""
    held: Counter[int] = Counter()
    most: dict[int, int] = {}
    for each in passes_of(plan.config.parallel, plan.degrees.pp, pp_rank, plan.micro_batches):
        held[each.stage] += 1 if each.forward else -1
        most[each.stage] = max(most.get(each.stage, 0), held[each.stage])
    return most


def _with_modes(config: Config, modes: list[str]) -> Config:
    keys = {"activation_checkpoint": "none", "activation_checkpoint_every": 1}
    parallel = config.parallel.model_copy(update={**keys, "activation_checkpoint_layers": tuple(modes)})
    return config.model_copy(update={"parallel": parallel})


def cheapest_modes(
    seconds: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], budget: int, units: int = UNITS
) -> list[int] | None:
    """Return the index of the way to run each layer, such that total seconds are minimal; None if nothing fits
    `budget`.

    Args:
        seconds: seconds of each way to run each layer, [layers][ways].
        sizes: bytes that each way needs, [layers][ways], not negative.
        budget: total bytes for all layers.
        units: number of parts the budget is divided into; exact if the budget has at most that many bytes.

    Galvatron's recurrence (Miao et al. 2022, arXiv 2211.13878, section 3.3), without costs between layers, since here
    all layers have the same layout: f(l, e) = min over ways s of f(l - 1, e - size(l, s)) + time(l, s), for layers up
    to l in e units.
    """
    if budget < 0:
        return None
    unit = max(1, -(-budget // units))
    room = budget // unit
    best = np.zeros(room + 1)
    chosen = np.empty((len(seconds), room + 1), dtype=np.int16)
    needed = [[-(-size // unit) for size in each] for each in sizes]
    for layer, (times, each) in enumerate(zip(seconds, needed, strict=True)):
        ways = np.full((len(times), room + 1), np.inf)
        for way, (time, size) in enumerate(zip(times, each, strict=True)):
            if size <= room:
                ways[way, size:] = best[: room + 1 - size] + time
        chosen[layer] = ways.argmin(axis=0)
        best = ways.min(axis=0)
    if not np.isfinite(best[room]):
        return None
    found, left = [], room
    for layer in reversed(range(len(seconds))):
        way = int(chosen[layer, left])
        found.append(way)
        left -= needed[layer][way]
    return found[::-1]
