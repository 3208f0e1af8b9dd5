"""When the ranks of a pipeline have run their passes, each waiting for what it takes from others. Imports no torch."""

from collections.abc import Callable

from lightning_llm.plan.schedule import Pass


def finish_times(
    orders: list[list[Pass]], stages: int, seconds: Callable[[Pass], float], send_seconds: float
) -> list[float]:
    """Return when each rank has run the last pass of its order, where a pass waits for what it takes from other ranks.

    A forward pass takes the one of the stage before, a backward pass that of the stage behind; what comes from another
    rank is `send_seconds` under way. Ranks send while they compute. Raises ValueError where an order never ends.
    """
    ends: dict[Pass, float] = {}
    clocks, places = [0.0] * len(orders), [0] * len(orders)
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                own = order[places[rank]]
                needed = _needed(own, stages)
                if needed is not None and needed not in ends:
                    break
                arrived = 0.0 if needed is None else ends[needed]
                if needed is not None and needed.stage % len(orders) != rank:
                    arrived += send_seconds
                clocks[rank] = max(clocks[rank], arrived) + seconds(own)
                ends[own] = clocks[rank]
                places[rank] += 1
                left -= 1
        if left == before:
            raise ValueError("the ranks of a pipeline wait for each other")
    return clocks


def _needed(own: Pass, stages: int) -> Pass | None:
    if own.forward:
        return None if own.stage == 0 else own._replace(stage=own.stage - 1)
    if own.stage == stages - 1:
        return own._replace(forward=True)
    return own._replace(stage=own.stage + 1)
