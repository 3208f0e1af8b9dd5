"""Layouts on measured links, each with the order of machines, or devices, in which it is fastest."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from lightning_llm.plan.memory.activations import boundary_bytes
from lightning_llm.plan.nodes import ranks_per_node, share_between_nodes
from lightning_llm.plan.search.link_matrix import LinkMatrix, PlacedLinks
from lightning_llm.plan.search.placement import PlacementProblem, anneal
from lightning_llm.plan.search.pricing import Placement, Priced, Pricer
from lightning_llm.plan.time.step import StepTimer

PLACED = 8
"""How many of the fastest layouts are placed."""


def place_fastest(pricer: Pricer, fitting: list[Priced], matrix: LinkMatrix) -> list[Priced]:
    """Return the fastest of `fitting` placed on `matrix`, by their seconds there.

    The order is annealed against the closed form of `PlacementProblem` (Pipette, Yim et al. 2024, arXiv 2405.18093);
    the seconds are those of the plan's own model of time over the links that the order gives, and the order stays as
    the matrix has it where that model sees no gain.
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
    """Return what an order of the matrix's units costs a layout."""
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
    """Yield each group of units that sums gradients or gathers weights: its stage, bytes over a link, and places."""
    degrees, per_node = timer.degrees, ranks_per_node(timer.config)
    for kind, axes in timer.sent[0]:
        if not {"dp_replicate", "dp_shard"} & set(axes.split()):
            continue
        share = 1.0 if unit_ranks == 1 else share_between_nodes(degrees, axes.split(), kind, per_node)
        seen = set()
        for ranks in degrees.groups(*axes.split()):
            places = tuple(place for place, _ in groupby(rank // unit_ranks for rank in ranks))
            stage = degrees.coordinates(ranks[0]).pp
            if len(places) > 1 and (stage, places) not in seen:
                seen.add((stage, places))
                yield stage, share * timer.sent[stage][kind, axes], places
