"""When the ranks of a pipeline have run their passes, each waiting for what it takes from others. Imports no torch."""

from collections.abc import Callable, Sequence

from lightning_llm.plan.stages import Pass


def finish_times(
    orders: Sequence[Sequence[Pass]], stages: int, seconds: Callable[[Pass], float], send_seconds: Sequence[float]
) -> list[float]:
    """Return when each rank has run the last pass of its order, where a pass waits for what it takes from other ranks.

    A forward pass takes the one of the stage before, a backward pass that of the stage behind; what comes from another
    rank is under way for the `send_seconds` of that link: between rank r and the next one, both ways, from the last to
    the first. Ranks send while they compute. Raises ValueError where an order never ends.
    """
    ranks = len(orders)
    forward_ends: dict[tuple[int, int], float] = {}
    backward_ends: dict[tuple[int, int], float] = {}
    clocks, places = [0.0] * ranks, [0] * ranks
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, order in enumerate(orders):
            clock, place, link = clocks[rank], places[rank], 0.0
            while place < len(order):
                own = order[place]
                forward, stage, micro_batch = own
                arrived: float | None
                if forward:
                    arrived = forward_ends.get((stage - 1, micro_batch)) if stage else 0.0
                    link = send_seconds[rank - 1] if stage and ranks > 1 else 0.0
                elif stage == stages - 1:
                    arrived, link = forward_ends.get((stage, micro_batch)), 0.0
                else:
                    arrived, link = (
                        backward_ends.get((stage + 1, micro_batch)),
                        send_seconds[rank] if ranks > 1 else 0.0,
                    )
                if arrived is None:
                    break
                clock = max(clock, arrived + link) + seconds(own)
                (forward_ends if forward else backward_ends)[stage, micro_batch] = clock
                place += 1
            left -= place - places[rank]
            clocks[rank], places[rank] = clock, place
        if left == before:
            raise ValueError("the ranks of a pipeline wait for each other")
    return clocks
