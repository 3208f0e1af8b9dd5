"""Order of machines or devices that makes a layout fastest on measured links, by simulated annealing."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby, pairwise
from statistics import pstdev

from lightning_llm.plan.axes.axis import AXES
from lightning_llm.plan.memory.activations import boundary_bytes
from lightning_llm.plan.nodes import ranks_per_node, share_between_nodes
from lightning_llm.plan.search.pricing import Placement, Priced, Pricer
from lightning_llm.plan.time.links import LinkMatrix, PlacedLinks
from lightning_llm.plan.time.step import StepTimer

PLACED = 8
"""Number of fastest layouts for which an order of machines is searched."""
STEPS_PER_UNIT = 400
MOST_STEPS = 6_000
RESTARTS = 8
SLOPE = 0.05
WARMEST, COLDEST = 1.0, 1e-3
"""Start and end temperature, as fractions of the standard deviation of random orders' costs."""
SAMPLED = 64
"""Number of random orders from which the standard deviation of their costs is estimated."""


def critical_path_seconds(stages: Sequence[float], sends: Sequence[float], micro_batches: int) -> float:
    """Return the seconds of a 1F1B pipeline's passes.

    Args:
        stages: forward and backward seconds of a micro-batch on each of p ranks.
        sends: seconds of a message from each rank to the next [p - 1]; the same for messages back.
        micro_batches: m.

    Rank x has at most p - x micro-batches in flight, so it can begin that many only within R_x, the time of one
    micro-batch from x to the last rank and back, including sends. Pipette calls this path hidden (Yim et al. 2024,
    arXiv 2405.18093, section on the latency estimator). The result is R_0 + (m - 1) max(slowest stage, max over x of
    R_x / (p - x)).
    """
    way, slowest = 0.0, 0.0
    for behind, own in enumerate(reversed(stages)):
        way += own + (2 * sends[len(stages) - 1 - behind] if behind else 0.0)
        slowest = max(slowest, own, way / (behind + 1))
    return way + (micro_batches - 1) * slowest


@dataclass(frozen=True)
class PlacementProblem:
    """Cost model of an order of units (machines or devices).

    `seconds_per_byte` is indexed by two units. `pipelines` has the places of each pipeline's ranks, by stage. `rings`
    has, for each group that sums gradients, its stage, the bytes per link, and its places. `stages` are the forward and
    backward seconds of a micro-batch per rank, `backward` those of the backward pass alone, `message_bytes` the bytes
    that a rank sends to the next.
    """

    seconds_per_byte: Sequence[Sequence[float]]
    pipelines: Sequence[Sequence[int]]
    rings: Sequence[tuple[int, float, Sequence[int]]]
    stages: Sequence[float]
    backward: Sequence[float]
    message_bytes: float
    micro_batches: int

    def seconds(self, order: Sequence[int]) -> float:
        """Return the seconds of a step's passes and gradient sums; `order`: the unit in each place."""
        rates = self.seconds_per_byte
        edges = [0.0] * (len(self.stages) - 1)
        for places in self.pipelines:
            for edge, (one, other) in enumerate(pairwise(places)):
                edges[edge] = max(edges[edge], rates[order[one]][order[other]])
        passes = critical_path_seconds(self.stages, [self.message_bytes * rate for rate in edges], self.micro_batches)
        after = 0.0
        for stage, sent_bytes, places in self.rings:
            slowest = max(rates[order[places[at - 1]]][order[places[at]]] for at in range(len(places)))
            after = max(after, sent_bytes * slowest - sum(self.backward[:stage]))  # later stages finish earlier
        return passes + after

    def links_seconds(self, order: Sequence[int]) -> float:
        """Return the total seconds of all links used: it distinguishes orders with equal slowest links."""
        rates, total = self.seconds_per_byte, 0.0
        for places in self.pipelines:
            total += self.message_bytes * sum(rates[order[one]][order[other]] for one, other in pairwise(places))
        for _, sent_bytes, places in self.rings:
            links = (rates[order[places[at - 1]]][order[places[at]]] for at in range(len(places)))
            total += sent_bytes * sum(links) / len(places)
        return total


def place_fastest(pricer: Pricer, fitting: list[Priced], matrix: LinkMatrix) -> list[Priced]:
    """Return the fastest layouts of `fitting`, placed on `matrix` and sorted by their seconds there.

    Annealing minimizes the closed form of `PlacementProblem` (Pipette, Yim et al. 2024, arXiv 2405.18093). The reported
    seconds come from the plan's time model with the links of the found order; if that model sees no gain, the matrix'
    order is kept.
    """
    placed = [_placed(pricer, priced, matrix) for priced in fitting[:PLACED]]
    return sorted(placed, key=lambda priced: (priced.seconds, priced.memory_bytes, priced.choice))


def _placed(pricer: Pricer, priced: Priced, matrix: LinkMatrix) -> Priced:
    given = list(range(len(matrix.names)))
    problem = placement_problem(pricer, priced, matrix)
    found = anneal(problem.seconds, len(given), problem.links_seconds)
    times = {tuple(order): _timer(pricer, priced, matrix, order).time for order in (given, found)}
    before = times[tuple(given)]
    order = found if times[tuple(found)].total < before.total else given
    names = tuple(matrix.names[unit] for unit in order)
    return replace(priced, time=times[tuple(order)], placement=Placement(names, before.total))


def _timer(pricer: Pricer, priced: Priced, matrix: LinkMatrix, order: list[int]) -> StepTimer:
    degrees, per_node = priced.plan.degrees, ranks_per_node(priced.plan.config)
    links = PlacedLinks(pricer.cluster, degrees, per_node, matrix, order)
    return StepTimer(priced.plan, pricer.cluster, links)


def placement_problem(pricer: Pricer, priced: Priced, matrix: LinkMatrix) -> PlacementProblem:
    """Return the placement problem of a layout on the matrix' units."""
    plan, timer = priced.plan, StepTimer(priced.plan, pricer.cluster)
    config, degrees = plan.config, plan.degrees
    unit_ranks = degrees.world // len(matrix.names)
    last = plan.micro_batches - 1
    forward, backward = [0.0] * degrees.pp, [0.0] * degrees.pp
    for each, cost in timer.costs.items():
        if each.micro_batch == min(1, last):  # one in the middle of a step
            (forward if each.forward else backward)[each.stage % degrees.pp] += cost.total
    return PlacementProblem(
        seconds_per_byte=matrix.seconds_per_byte,
        pipelines=list(dict.fromkeys(tuple(rank // unit_ranks for rank in ranks) for ranks in degrees.groups("pp"))),
        rings=list(_rings(timer, unit_ranks)),
        stages=[one + other for one, other in zip(forward, backward, strict=True)],
        backward=backward,
        message_bytes=boundary_bytes(config, degrees) * config.parallel.virtual_stages,
        micro_batches=plan.micro_batches,
    )


def _rings(timer: StepTimer, unit_ranks: int) -> Iterator[tuple[int, float, tuple[int, ...]]]:
    """Yield (stage, bytes per link, places) of each group of units that sums gradients or gathers weights."""
    degrees, per_node = timer.degrees, ranks_per_node(timer.config)
    for kind, axes in timer.sent[0]:
        if not set(AXES.cutting("data")) & set(axes.split()):
            continue
        share = 1.0 if unit_ranks == 1 else share_between_nodes(degrees, axes.split(), kind, per_node)
        seen = set()
        for ranks in degrees.groups(*axes.split()):
            places = tuple(place for place, _ in groupby(rank // unit_ranks for rank in ranks))
            stage = degrees.coordinates(ranks[0]).pp
            if len(places) > 1 and (stage, places) not in seen:
                seen.add((stage, places))
                yield stage, share * timer.sent[stage][kind, axes], places


Cost = Callable[[Sequence[int]], float]


def anneal(cost: Cost, units: int, slope: Cost | None = None, seed: int = 0) -> list[int]:
    """Return the order of 0 .. units - 1 with the least cost found; the given order if none is better.

    `slope`: a second cost, added with weight `SLOPE`, that guides the search where the slowest link hides all others.

    Simulated annealing (Kirkpatrick et al. 1983) with swaps, reversals and moves of a segment, as in Pipette, followed
    by greedy swaps. Deterministic for a given seed.
    """
    best = list(range(units))
    best_cost = cost(best)
    spread = _spread(cost, units, seed)
    steps = min(MOST_STEPS, STEPS_PER_UNIT * units)
    for restart in range(RESTARTS if units > 2 and spread else 0):
        draw = random.Random(f"{seed}-{restart}")
        order = list(range(units))
        if restart:
            draw.shuffle(order)
        energy = cost(order) + _tilt(slope, order)
        for step in range(steps):
            temperature = spread * WARMEST * (COLDEST / WARMEST) ** (step / steps)
            neighbour = _neighbour(order, draw)
            own = cost(neighbour)
            if own < best_cost:
                best, best_cost = neighbour, own
            then = own + _tilt(slope, neighbour)
            if then <= energy or draw.random() < math.exp((energy - then) / temperature):
                order, energy = neighbour, then
    return _descended(best, best_cost, cost)


def _spread(cost: Cost, units: int, seed: int) -> float:
    draw = random.Random(f"{seed}-spread")
    return pstdev(cost(draw.sample(range(units), units)) for _ in range(SAMPLED))


def _tilt(slope: Cost | None, order: Sequence[int]) -> float:
    return SLOPE * slope(order) if slope else 0.0


def _neighbour(order: list[int], draw: random.Random) -> list[int]:
    low, high = sorted(draw.sample(range(len(order)), 2))
    kind = draw.randrange(3)
    if kind == 0:
        made = list(order)
        made[low], made[high] = made[high], made[low]
        return made
    if kind == 1:
        return [*order[:low], *reversed(order[low : high + 1]), *order[high + 1 :]]
    rest = [*order[:low], *order[high:]]
    at = draw.randrange(len(rest) + 1)
    return [*rest[:at], *order[low:high], *rest[at:]]


def _descended(order: list[int], now: float, cost: Cost) -> list[int]:
    improved = True
    while improved:
        improved = False
        for low, high in combinations(range(len(order)), 2):
            made = list(order)
            made[low], made[high] = made[high], made[low]
            if (then := cost(made)) < now:
                order, now, improved = made, then, True
    return order
